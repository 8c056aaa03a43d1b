"""Half precision: what stays float in a quantized graph becomes float16 or bfloat16, where its values allow it."""

from __future__ import annotations

from sbonnx.precision.convert import OPSET, Converted, convert
from sbonnx.precision.emulate import emulated

__all__ = ["OPSET", "Converted", "convert", "emulated"]
