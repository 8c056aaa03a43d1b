"""Reports of quantizations: what was applied, what was refused and why, and the verdict in one sentence."""

from __future__ import annotations

from sbonnx.report.outcome import Fired, Refusal, Report
from sbonnx.report.verdict import Verdict, verdict_of

__all__ = ["Fired", "Refusal", "Report", "Verdict", "verdict_of"]
