"""Q/DQ pairs: `insert` writes them, `read` finds them, `strip` takes them out."""

from __future__ import annotations

from sbonnx.qdq.insert import BITS, insert, opset_needed
from sbonnx.qdq.read import Pair, read, strip

__all__ = ["BITS", "Pair", "insert", "opset_needed", "read", "strip"]
