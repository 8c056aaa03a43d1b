"""``sbonnx prune``: remove channels from a float model, refit the remaining weights, and verify the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments, required_output
from sbonnx.cli.output.tables import comparison_facts, percent, show_outputs

if TYPE_CHECKING:
    from sbonnx.cli.output.printer import Printer
    from sbonnx.pruning.verified import PruningReport
    from sbonnx.report import Refusal

HELP: Final = "Remove channels from a float model. The other weights are refitted, without training."

GOAL: Final = "Goal"
"""Help group."""

WORST: Final = 8
"""Dimensions in the table, those that cost most first; the JSON has all of them."""

OUTPUT: Final = replace(options.OUTPUT, help="The pruned model to write.")
MACS: Final = options.option("--macs SHARE", float, "Share of the multiplications that may remain, such as 0.5.", GOAL)
WEIGHTS: Final = options.option("--weights SHARE", float, "Share of the stored values that may remain.", GOAL)
RATIO: Final = options.option("--ratio SHARE", float, "Share of the channels to remove from each dimension.", GOAL)
STRATEGY: Final = options.setting(
    "--strategy auto|obs|output|l1norm|l2norm|random",
    "auto",
    "Order of removal; auto: obs with data, l1norm without.",
    GOAL,
)
MULTIPLE: Final = options.setting("--multiple N", 1, "Remaining channels are a multiple of N, or all.", GOAL)
LEAST: Final = options.setting("--least SHARE", 0.1, "Share of each dimension that always remains.", GOAL)
NO_REFIT: Final = options.switch("--no-refit", "Do not refit the remaining weights.", GOAL)
MASKED: Final = options.switch("--masked", "Write zero weights instead of removing channels: shapes unchanged.", GOAL)
PLAN: Final = options.switch("--plan", "List dimensions and pinned layers with reasons, and write nothing.", GOAL)
MEMORY: Final = options.setting("--memory SIZE", "2 GiB", "Memory limit of activations.", options.CALIBRATION)
MIN_SQNR: Final = replace(options.MIN_SQNR, key="")
REPORT: Final = options.option("--report FILE.json", Path, "Write the whole report as JSON.", options.FILES)

OPTIONS: Final = (
    options.MODEL,
    options.DATA,
    OUTPUT,
    MACS,
    WEIGHTS,
    RATIO,
    STRATEGY,
    MULTIPLE,
    LEAST,
    NO_REFIT,
    MASKED,
    PLAN,
    *options.FEEDS,
    MEMORY,
    MIN_SQNR,
    REPORT,
    options.FORCE,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx import graph as graphs
    from sbonnx.cli.output.printer import to_json
    from sbonnx.pruning.verified import prune

    if given[PLAN]:
        return _show_dimensions(given)
    model, output, force = given[options.MODEL], required_output(given[OUTPUT]), given[options.FORCE]
    page = given[REPORT]
    if page is not None:
        graphs.check_target(page, inputs=[model, output], force=force)
    samples = given[options.SAMPLES]
    progress = given.progress()
    try:
        report = prune(
            model,
            given[options.DATA],
            macs=given[MACS],
            weights=given[WEIGHTS],
            ratio=given[RATIO],
            strategy=given[STRATEGY],
            multiple=given[MULTIPLE],
            least=given[LEAST],
            refit=not given[NO_REFIT],
            masked=given[MASKED],
            output=output,
            force=force,
            min_sqnr_db=given[MIN_SQNR],
            split=given[options.SPLIT],
            limit=samples,
            device=given[options.DEVICE] or "cpu",
            memory=given[MEMORY],
            progress=progress,
        )
    finally:
        progress.close()
    if page is not None:
        graphs.write_text(page, to_json(report.to_dict()) + "\n")
    return _show_report(given, report)


def _show_report(given: Arguments, report: PruningReport) -> int:
    printer = given.printer()
    code = printer.problems(report.problems)
    printer.value(report.to_dict())
    printer.facts(
        report.model,
        {
            "multiplications": f"{percent(report.macs)} remain",
            "stored values": f"{percent(report.weights)} remain",
            **comparison_facts({"kernels": None, **report.metrics} if report.metrics else {}),
        },
    )
    show_outputs(printer, "outputs against the original", report.metrics)
    rows = sorted(report.dimensions, key=lambda row: -(row["error"] or 0.0))[:WORST]
    printer.table(
        "dimensions (error of the outputs if pruned alone)",
        ("written by", "read by", "before", "after", "error"),
        [(_few(row["writers"]), _few(row["readers"]), row["before"], row["after"], row["error"]) for row in rows],
    )
    _show_refusals(printer, report.refusals)
    for note in report.notes:
        printer.note(note)
    printer.line(f"written: {report.output}")
    return code


def _show_dimensions(given: Arguments) -> int:
    """List what can be removed together, and what never is."""
    from sbonnx.pruning.groups.dimensions import dependencies
    from sbonnx.pruning.verified import load_for_pruning

    printer, graph = given.printer(), load_for_pruning(given[options.MODEL])
    found = dependencies(graph)
    pinned = found.pinned()
    printer.value(
        {
            "model": given[options.MODEL],
            "dimensions": [
                {"writers": each.writers, "readers": each.readers, "groups": each.size} for each in found.dimensions
            ],
            "pinned": pinned,
        }
    )
    printer.table(
        "dimensions: any group of channels can be removed in place of another",
        ("written by", "read by", "groups"),
        [(_few(each.writers), _few(each.readers), each.size) for each in found.dimensions],
    )
    _show_refusals(printer, pinned)
    return printer.problems([])


def _show_refusals(printer: Printer, refusals: Iterable[Refusal]) -> None:
    every = list(refusals)
    first = {refusal.why: refusal.where for refusal in reversed(every)}
    counts = Counter(refusal.why for refusal in every)
    printer.table(
        "not pruned or not refitted",
        ("times", "why", "first at"),
        [(count, why, first[why]) for why, count in counts.most_common()],
    )


def _few(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:2]) + (f" and {len(every) - 2} more" if len(every) > 2 else "") or "-"
