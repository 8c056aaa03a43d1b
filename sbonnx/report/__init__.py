"""Reports of quantizations: what was applied, what was refused and why, and the verdict in one sentence."""

from __future__ import annotations

from sbonnx.report.codes import Note, Problem, Reason, Refusal
from sbonnx.report.outcome import Fired, LayerError, QuantizedTensor, Report
from sbonnx.report.verdict import Verdict, verdict_of

__all__ = [
    "Fired",
    "LayerError",
    "Note",
    "Problem",
    "QuantizedTensor",
    "Reason",
    "Refusal",
    "Report",
    "Verdict",
    "verdict_of",
]
