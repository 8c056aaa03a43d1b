"""Verification of a quantized file: validity, loading, interface and outputs, and its gains in size and speed."""

from __future__ import annotations

from sbonnx.verify.comparison import COLLAPSED_DB, Comparison, LevelDifference, Limits
from sbonnx.verify.file_check import Depth, check, compare
from sbonnx.verify.kernel_count import FloatOp, Kernels
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
