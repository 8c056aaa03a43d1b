"""Sketches: what calibration remembers of a tensor."""

from __future__ import annotations

from sbonnx.calib.sketches.distribution import Distribution
from sbonnx.calib.sketches.panel import Panel
from sbonnx.calib.sketches.sketch import Detail, Sketch

__all__ = ["Detail", "Distribution", "Panel", "Sketch"]
