"""Tables of the findings of lint, of fixes, and of the layers of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from sbonnx.linting import Finding, Severity
from sbonnx.linting.engine_layers import EngineReport
from sbonnx.linting.fix import Fixed
from sbonnx.linting.report import SEVERITIES, LintReport
from sbonnx.present.text.printer import Printer

MOST_REFORMATS: Final = 8
"""Reformats in the table; the JSON has all of them."""


def show_lint(printer: Printer, report: LintReport, *, verbose: bool) -> None:
    """Show a line with the counts, fixes, findings by severity (all of a rule if `verbose`), the engine, notes."""
    summary = ", ".join(_counted(getattr(report.counts, severity), severity) for severity in SEVERITIES)
    printer.line(f"{report.checked} for {report.target}: {report.rules} rules, {summary}")
    _fix_tables(printer, () if report.fix is None else report.fix.fixed)
    _tables(printer, report.findings, verbose=verbose)
    if report.engine is not None:
        _engine_tables(printer, report.engine)
    printer.notes(report.notes)


def _engine_tables(printer: Printer, engine: EngineReport) -> None:
    """Show the operators that the engine runs in float, the slowest reformats, and a line with the counts."""
    others = [row for row in engine.planned if row.runs_in != "integers"]
    printer.table(
        "planned in integers, and not run so by the engine",
        ("node", "op", "runs in", "types", "ms"),
        [(row.node, row.op, row.runs_in, row.types, row.ms) for row in others],
    )
    printer.table(
        "reformats of the engine",
        ("layer", "ms"),
        [(layer.name, layer.ms) for layer in engine.reformats[:MOST_REFORMATS]],
    )
    took = "" if engine.ms is None else f", {engine.reformat_ms:.3g} of {engine.ms:.3g} ms"
    printer.line(
        f"engine: {len(engine.planned) - len(others)} of {len(engine.planned)} planned operators in integers; "
        f"{len(engine.reformats)} reformats{took}"
    )


def _fix_tables(printer: Printer, rows: tuple[Fixed, ...]) -> None:
    """Show applied fixes, one row per rule with the first node (the JSON has all), and failed ones, one per reason."""
    done = [row for row in rows if row.done]
    first = {row.rule: row for row in reversed(done)}
    printer.table(
        f"fixed: {len(done)}",
        ("rule", "times", "with equal values", "first at", "change"),
        [
            (rule, count, sum(row.exact for row in done if row.rule == rule), first[rule].node, first[rule].what)
            for rule, count in Counter(row.rule for row in done).items()
        ],
    )
    failed = [row for row in rows if not row.done]
    places = {(row.rule, row.what): row.node for row in reversed(failed)}
    printer.table(
        "not fixed",
        ("rule", "times", "first at", "why"),
        [
            (*key[:1], count, places[key], key[1])
            for key, count in Counter((row.rule, row.what) for row in failed).items()
        ],
    )


def _tables(printer: Printer, findings: Sequence[Finding], *, verbose: bool) -> None:
    """Show a table per severity, the most severe first: each rule with its first finding, or all if `verbose`."""
    for severity in SEVERITIES:
        some = [finding for finding in findings if finding.severity == severity]
        kinds: dict[object, list[Finding]] = {}
        for number, finding in enumerate(some):
            kinds.setdefault(number if verbose else finding.rule, []).append(finding)
        several = len(kinds) < len(some)
        rows = [
            (*((len(alike),) if several else ()), row.rule, row.node or None, row.tensor or None, row.why, row.mend)
            for alike in kinds.values()
            for row in alike[:1]
        ]
        titles = ("times", "rule", "first node", "first tensor", "why", "fix")
        plain = ("rule", "node", "tensor", "why", "fix")
        printer.table(_counted(len(some), severity), titles if several else plain, rows)


def _counted(count: int, severity: Severity) -> str:
    """``1 error``, ``2 warnings``, ``3 info``."""
    return f"{count} {severity}{'' if count == 1 or severity == 'info' else 's'}"
