"""``sbonnx simplify``: simplify and fuse a float model without changing its outputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments, required_output
from sbonnx.present.text.tables import show_outputs

HELP: Final = "Simplify and fuse a float model. Equal outputs are verified in onnxruntime."

OUTPUT: Final = replace(options.OUTPUT, help="The model to write.")
NO_FUSE: Final = options.switch("--no-fuse", "Do not fuse batch norms and other operators.")

OPTIONS: Final = (
    options.MODEL,
    OUTPUT,
    NO_FUSE,
    options.DATA,
    options.PREPROCESS,
    options.SPLIT,
    options.SAMPLES,
    options.FORCE,
    options.ORT_LIBRARY,
    *options.COMMON,
)


def run(given: Arguments) -> int:
    from sbonnx.api.create import simplify
    from sbonnx.report.comparison import Comparison

    printer, target = given.printer(), required_output(given[OUTPUT])
    report = given.call(simplify)
    printer.value("simplify", report)
    printer.facts(report.model, {"nodes": f"{report.nodes_before} -> {report.nodes_after}"})
    first = {match.pattern: match.node for match in reversed(report.applied)}
    counts = Counter(match.pattern for match in report.applied)
    printer.table(
        "applied", ("pattern", "times", "first at"), [(name, n, first[name]) for name, n in counts.most_common()]
    )
    rows = [(refusal.what, refusal.where, refusal.why) for refusal in report.refusals]
    printer.table("not done", ("what", "where", "why"), rows)
    show_outputs(printer, "outputs against the original", Comparison(report.outputs, quality=report.quality))
    for note in report.notes:
        printer.note(note)
    printer.line(f"written: {target}")
    return printer.problems(report.problems)
