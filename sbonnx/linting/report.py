"""`lint_file`: a check of a model file, with the fixes before it, as a report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from sbonnx import graph as graphs
from sbonnx.graph import Graph, query
from sbonnx.linting import Severity, lint, rules_for
from sbonnx.linting.engine_layers import EngineReport, engine_report
from sbonnx.linting.findings import Finding
from sbonnx.linting.fix import Fixed, fix
from sbonnx.report.codes import Note
from sbonnx.report.notebook import Result
from sbonnx.values import INLINE, OPTIONAL

SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "info")

UNQUANTIZED: Final = Note(
    "nothing-to-check",
    "the model has no Q/DQ pairs and no integer operators: there is nothing to check; quantize it first",
)


@dataclass(frozen=True)
class SeverityCounts:
    """Number of findings by severity."""

    error: int
    warning: int
    info: int

    @property
    def text(self) -> str:
        """The counts as text: ``1 error, 2 warnings, 3 info``."""
        return ", ".join(count_text(getattr(self, severity), severity) for severity in SEVERITIES)


def count_text(count: int, severity: Severity) -> str:
    """Format a number of findings: ``1 error``, ``2 warnings``, ``3 info``."""
    return f"{count} {severity}{'' if count == 1 or severity == 'info' else 's'}"


@dataclass(frozen=True)
class FixedFile:
    """A model that was fixed.

    Attributes:
        output: the fixed model (--fix).
        fixed: what was fixed (--fix).
    """

    output: str
    fixed: tuple[Fixed, ...]


@dataclass(frozen=True, repr=False)
class LintReport(Result):
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

    frame_of: ClassVar = "findings"

    model: str
    target: str
    rules: int
    counts: SeverityCounts
    findings: tuple[Finding, ...]
    notes: tuple[Note, ...]
    engine: EngineReport | None = field(metadata=OPTIONAL)
    fix: FixedFile | None = field(metadata=INLINE)

    @property
    def checked(self) -> Path:
        """The file that was checked: the fixed model, if there is one."""
        return Path(self.model if self.fix is None else self.fix.output)


def lint_file(
    model: Path,
    target: str,
    *,
    cpu: str = "",
    fixed: Path | None = None,
    force: bool = False,
    engine: tuple[Path, Path | None] | None = None,
) -> LintReport:
    """Check a model file, see `lint`; fix it before if asked to.

    Args:
        model, target, cpu: see `lint`.
        fixed: path of a model with everything fixed that needs no data, which is then checked; None: nothing is fixed.
        force: overwrite a file.
        engine: layers of a TensorRT engine and the times of its layers, see `engine_report`; None: there are none.

    Raises:
        RecipeError: the target is not known.
        ModelError, DataError, OutputError: a file cannot be read or written.
    """
    rules, checked, file = rules_for(target), model, None
    if fixed is not None:
        graphs.check_target(fixed, inputs=[model], force=force, model=True)
        done = fix(model, target, cpu=cpu)
        graphs.save(done.graph, fixed, force=force)
        checked, file = fixed, FixedFile(str(fixed), done.rows)
    findings = sorted(lint(checked, target, cpu=cpu), key=lambda finding: SEVERITIES.index(finding.severity))
    counts = Counter(finding.severity for finding in findings)
    return LintReport(
        model=str(model),
        target=target,
        rules=len(rules),
        counts=SeverityCounts(**{severity: counts[severity] for severity in SEVERITIES}),
        findings=tuple(findings),
        notes=() if _is_quantized(graphs.load(checked, opset=1)) else (UNQUANTIZED,),
        engine=None if engine is None else engine_report(graphs.load(checked), *engine),
        fix=file,
    )


def _is_quantized(graph: Graph) -> bool:
    """Whether a model has quantized operators of any form."""
    return any(
        "quant" in node.op.lower() or "Integer" in node.op or "NBits" in node.op or node.op.startswith("QLinear")
        for node in query.all_nodes(graph)
    )
