"""Report of a check of a model, and of the fixes before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sbonnx.lint.engine_layers import EngineReport
from sbonnx.lint.findings import Finding
from sbonnx.lint.fix import Fixed
from sbonnx.report.codes import Note
from sbonnx.values import INLINE, OPTIONAL


@dataclass(frozen=True)
class SeverityCounts:
    """Number of findings by severity."""

    error: int
    warning: int
    info: int


@dataclass(frozen=True)
class FixedFile:
    """A model that was fixed.

    Attributes:
        output: the fixed model (--fix).
        fixed: what was fixed (--fix).
    """

    output: str
    fixed: tuple[Fixed, ...]


@dataclass(frozen=True)
class LintReport:
    """Findings of a model.

    Attributes:
        model, target: the model and the runtime.
        rules: number of rules.
        counts: findings by severity.
        findings: the findings, most severe first.
        notes: one sentence each.
        engine: layers of the engine (--engine-layers).
        fix: the fixed model (--fix).
    """

    model: str
    target: str
    rules: int
    counts: SeverityCounts
    findings: tuple[Finding, ...]
    notes: tuple[Note, ...]
    engine: EngineReport | None = field(metadata=OPTIONAL)
    fix: FixedFile | None = field(metadata=INLINE)
