"""Tables of the findings of lint, of fixes, and of the layers of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from sbonnx.linting import Finding, Severity
from sbonnx.linting.engine_layers import EngineReport
from sbonnx.linting.fix import Fixed
from sbonnx.linting.report import SEVERITIES, LintReport, count_text
from sbonnx.present.text.printer import Printer

MOST_REFORMATS: Final = 8
"""Reformats in the table; the JSON has all of them."""


MOST_RULES: Final = 8
"""Rules in the table, unless all findings are asked for."""


def show_lint(printer: Printer, report: LintReport, *, verbose: bool) -> None:
    """Show a line with the counts, fixes, findings by severity (all of a rule if `verbose`), the engine, notes."""
    printer.line(f"{report.checked} for {report.target}: {report.rules} rules, {report.counts.text}")
    _fix_tables(printer, () if report.fix is None else report.fix.fixed)
    (_tables if verbose else _kinds)(printer, report.findings)
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


def _tables(printer: Printer, findings: Sequence[Finding]) -> None:
    """Show a table per severity, the most severe first."""
    for severity in SEVERITIES:
        rows = [
            (row.rule, row.node or None, row.tensor or None, row.why, row.mend)
            for row in findings
            if row.severity == severity
        ]
        printer.table(count_text(len(rows), severity), ("rule", "node", "tensor", "why", "fix"), rows)


def _kinds(printer: Printer, findings: Sequence[Finding]) -> None:
    """Show each rule that has findings with their number and the first, the most severe rules first."""
    kinds: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in findings:
        kinds.setdefault((finding.severity, finding.rule), []).append(finding)
    rows = [
        (severity, len(alike), rule, alike[0].node or None, alike[0].tensor or None, alike[0].why, alike[0].mend)
        for severity in SEVERITIES
        for (kind, rule), alike in kinds.items()
        if kind == severity
    ]
    counted = f"the first {MOST_RULES} of {len(rows)} rules; " if len(rows) > MOST_RULES else ""
    columns = ("severity", "times", "rule", "first node", "first tensor", "why", "fix")
    printer.table(f"findings ({counted}each: -v)", columns, rows[:MOST_RULES])
