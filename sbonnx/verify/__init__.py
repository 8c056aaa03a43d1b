"""Verification of a quantized file: validity, loading, interface and outputs, and its gains in size and speed."""

from __future__ import annotations

from sbonnx.verify.comparison import COLLAPSED_DB, Comparison, LevelDifference
from sbonnx.verify.kernels import FloatOp, Kernels
from sbonnx.verify.limits import Limits
from sbonnx.verify.proof import Depth, check, compare
from sbonnx.verify.sessions import LEVEL_NAMES, Feeds, file_bytes, session

__all__ = [
    "COLLAPSED_DB",
    "LEVEL_NAMES",
    "Comparison",
    "Depth",
    "Feeds",
    "FloatOp",
    "Kernels",
    "LevelDifference",
    "Limits",
    "check",
    "compare",
    "file_bytes",
    "session",
]
