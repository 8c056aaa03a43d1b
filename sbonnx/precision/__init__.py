"""Half precision: converts the float part of a quantized graph to float16 or bfloat16, where values allow it."""

from __future__ import annotations

from sbonnx.precision.convert import OPSET, Converted, convert
from sbonnx.precision.emulate import emulated

__all__ = ["OPSET", "Converted", "convert", "emulated"]
