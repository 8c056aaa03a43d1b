"""Q/DQ pairs: `insert` writes them, `read` finds them, `strip` removes them, `unfold` creates them from integer ops."""

from __future__ import annotations

from sbonnx.plan import BITS
from sbonnx.qdq.insert import insert, opset_needed
from sbonnx.qdq.read import Pair, read
from sbonnx.qdq.requantize import make_float
from sbonnx.qdq.strip import strip
from sbonnx.qdq.unfold import is_integer_op, unfold

__all__ = ["BITS", "Pair", "insert", "is_integer_op", "make_float", "opset_needed", "read", "strip", "unfold"]
