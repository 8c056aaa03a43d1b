"""Fake-quantization modules for weights and activations in training, one class for each method."""

from __future__ import annotations

from sbonnx.qat.fakequant.base import BiasCodes, FakeQuant, Role, quant_parameters
from sbonnx.qat.fakequant.methods import METHODS, make_fake_quant

__all__ = ["METHODS", "BiasCodes", "FakeQuant", "Role", "make_fake_quant", "quant_parameters"]
