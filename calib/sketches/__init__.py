"""Sketches: mergeable statistics of tensors."""

from __future__ import annotations

from sbonnx.calib.sketches.distribution import Distribution
from sbonnx.calib.sketches.panel import Panel
from sbonnx.calib.sketches.sketch import Detail, Sketch

__all__ = ["Detail", "Distribution", "Panel", "Sketch"]
