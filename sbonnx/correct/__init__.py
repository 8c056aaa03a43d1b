"""Bias correction, batch-norm tuning, and batch-norm statistics of the float network."""

from __future__ import annotations

from sbonnx.correct.biases import bias_of, biases_of, give_biases
from sbonnx.correct.normals import own_statistics, record_normals

__all__ = ["bias_of", "biases_of", "give_biases", "own_statistics", "record_normals"]
