"""Verification of a quantized file: validity, loading, interface and outputs, and its gains in size and speed."""

from __future__ import annotations

from sbonnx.report.comparison import Comparison
from sbonnx.report.figures import Evaluation, FloatOp, Kernels, LevelDifference
from sbonnx.report.verdict import COLLAPSED_DB
from sbonnx.verify.file_check import Depth, check, compare
from sbonnx.verify.labelled import EvaluationData, LabelledLoss, check_labels, evaluate
from sbonnx.verify.limits import Limits
from sbonnx.verify.natures import Tasks, check_tasks
from sbonnx.verify.ort_options import VerifyOptions
from sbonnx.verify.sessions import LEVEL_NAMES, Feeds, file_bytes, libraries_of, session, use_libraries

__all__ = [
    "COLLAPSED_DB",
    "LEVEL_NAMES",
    "Comparison",
    "Depth",
    "Evaluation",
    "EvaluationData",
    "Feeds",
    "FloatOp",
    "Kernels",
    "LabelledLoss",
    "LevelDifference",
    "Limits",
    "Tasks",
    "VerifyOptions",
    "check",
    "check_labels",
    "check_tasks",
    "compare",
    "evaluate",
    "file_bytes",
    "libraries_of",
    "session",
    "use_libraries",
]
