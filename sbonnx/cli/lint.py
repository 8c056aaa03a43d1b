"""``sbonnx lint``: what a runtime would refuse, misread or run slowly in a Q/DQ model, whoever made it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sbonnx.cli import options
from sbonnx.cli.faults import BELOW_QUALITY, DONE
from sbonnx.cli.show import Show, to_json
from sbonnx.errors import RecipeError

if TYPE_CHECKING:
    from sbonnx.lint import Finding, Severity

HELP: Final = "Check a Q/DQ model against a runtime's rules. Each finding comes with its mend; exit code 1 on errors."

SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "info")


def run(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="The ONNX model with Q/DQ, made by any tool.", show_default=False)
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="tensorrt@11|tensorrt@10|tensorrt@8.6|onnxruntime",
            help="The runtime whose rules are checked.",
            show_default=False,
        ),
    ] = None,
    sarif: Annotated[
        Path | None,
        typer.Option("--sarif", metavar="FILE", help="Write the findings as SARIF 2.1.0, for CI.", show_default=False),
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """See `HELP`."""
    from sbonnx import graph as graphs
    from sbonnx.lint import TARGETS, lint, rules_for
    from sbonnx.lint.sarif import sarif as to_sarif

    if target is None:
        raise RecipeError(f"--target is missing: name the runtime, one of {', '.join(TARGETS)}")
    show = Show(as_json=as_json, quiet=quiet)
    rules = rules_for(target)
    if sarif is not None:
        graphs.check_target(sarif, inputs=[model], force=force)
    findings = sorted(lint(model, target), key=lambda finding: SEVERITIES.index(finding.severity))
    if sarif is not None:
        graphs.write_text(sarif, to_json(to_sarif(findings, rules, model)) + "\n")
    counts = Counter(finding.severity for finding in findings)
    show.value(
        {
            "model": model,
            "target": target,
            "rules": len(rules),
            "counts": {severity: counts[severity] for severity in SEVERITIES},
            "findings": [finding.to_dict() for finding in findings],
        }
    )
    _tables(show, findings)
    told = ", ".join(_counted(counts[severity], severity) for severity in SEVERITIES)
    show.line(f"{model} for {target}: {len(rules)} rules, {told}")
    if sarif is not None:
        show.line(f"written: {sarif}")
    return BELOW_QUALITY if counts["error"] else DONE


def _tables(show: Show, findings: list[Finding]) -> None:
    """A table a severity, the worst first."""
    for severity in SEVERITIES:
        rows = [
            (one.rule, one.node or None, one.tensor or None, one.why, one.mend)
            for one in findings
            if one.severity == severity
        ]
        show.table(_counted(len(rows), severity), ("rule", "node", "tensor", "why", "mend"), rows)


def _counted(count: int, severity: Severity) -> str:
    """``1 error``, ``2 warnings``, ``3 info``."""
    return f"{count} {severity}{'' if count == 1 or severity == 'info' else 's'}"
