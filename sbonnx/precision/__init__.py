"""Half precision: converts the float part of a quantized graph to float16 or bfloat16, where values allow it."""

from __future__ import annotations

from sbonnx.precision.convert import OPSET, PrecisionResult, convert, emulated, widened

__all__ = ["OPSET", "PrecisionResult", "convert", "emulated", "widened"]
