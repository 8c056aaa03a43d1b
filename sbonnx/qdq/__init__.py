"""Q/DQ pairs: `insert` writes them, `read` finds them, `strip` removes them, `unfold` creates them from integer ops."""

from __future__ import annotations

from sbonnx.planning import BITS
from sbonnx.qdq.from_qoperator import is_integer_op, unfold
from sbonnx.qdq.insert import insert, opset_needed
from sbonnx.qdq.requantize import Pair, has_quantized_ops, is_quantized, make_float, read
from sbonnx.qdq.strip import strip

__all__ = [
    "BITS",
    "Pair",
    "has_quantized_ops",
    "insert",
    "is_integer_op",
    "is_quantized",
    "make_float",
    "opset_needed",
    "read",
    "strip",
    "unfold",
]
