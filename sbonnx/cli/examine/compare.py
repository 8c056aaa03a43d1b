"""``sbonnx compare``: compare a quantized model with its float model on the same data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.evaluation_options import evaluation_of
from sbonnx.cli.options import Arguments
from sbonnx.present.text.printer import Printer
from sbonnx.present.text.summary import Fact, first_of, show_facts, show_verdict
from sbonnx.present.text.tables import (
    comparison_facts,
    reasons_of,
    show_evaluation,
    show_outputs,
    show_portability,
    show_refusals,
)

if TYPE_CHECKING:
    from sbonnx.report import Refusal
    from sbonnx.report.comparison import Comparison

MOST_OUTPUTS: Final = 3
"""Outputs that are named."""

HELP: Final = "Compare a quantized model with its float model. Error of each output, size, latency, integer kernels."


FLOAT: Final = options.argument("float_model", "FLOAT", "The float model.")
QUANT: Final = options.argument("quant_model", "QUANT", "The quantized model.")

OPTIONS: Final = (
    FLOAT,
    QUANT,
    options.DATA,
    *options.FEEDS,
    options.RUNTIME,
    options.RUNTIMES,
    options.FILE_CPU,
    options.TASK,
    *options.EVALUATING,
    options.MAX_METRIC_LOSS,
    *options.LIMITS,
    options.VERBOSE,
    options.ORT_LIBRARY,
    *options.COMMON,
)


def run(given: Arguments) -> int:
    from sbonnx.api.file_comparison import compare

    printer, tasks = given.printer(), given[options.TASK]
    given.required_data()
    task = options.output_tasks(tasks) if tasks else None
    result = given.call(compare, evaluation=evaluation_of(given), task=task)
    printer.notes(result.notes)
    code, comparison, advice = printer.problems(result.problems), result.comparison, result.advice
    if advice is not None:
        printer.advice(advice.text, advice.command)
    printer.value("compare", result)
    printer.line(f"{result.quantized} against {result.float} (run in {comparison.runtime})")
    show_verdict(printer, result.verdict)
    show_facts(printer, _facts(comparison))
    show_portability(printer, result.portability)
    if given[options.VERBOSE]:
        printer.line("")
        _show_details(printer, comparison)
    if advice is not None and advice.command:
        printer.line(f"next: {advice.command}")
    return code


def _facts(comparison: Comparison) -> list[Fact]:
    """Return the rows below the verdict."""
    from sbonnx.report.verdict import state_text

    outputs = sorted(comparison.quality, key=lambda row: not row.problem)
    several = [f"{row.name} {state_text(row.state, row.decided_by)}" for row in outputs] if len(outputs) > 1 else []
    kernels = comparison.kernels
    left = _left_float(comparison)
    reasons = reasons_of(left).most_common()
    others = f"; {len(reasons) - 1} other reason{'s' * (len(reasons) != 2)}" if len(reasons) > 1 else ""
    first = next((row for row in left if (row.what, row.code) == reasons[0][0]), None)
    planned = (
        "" if kernels is None or not kernels.planned else f"{kernels.in_integers} of {kernels.with_kernel} planned ops"
    )
    return [
        ("outputs", first_of(several, MOST_OUTPUTS)),
        ("in integers", planned),
        ("in float", f"{len(left)} between Q/DQ pairs, such as '{first.where}': {first.why}{others}" if first else ""),
        ("details", "-v"),
    ]


def _show_details(printer: Printer, comparison: Comparison) -> None:
    """Print all that was measured, and each operator in float between pairs."""
    printer.facts("measured", comparison_facts(comparison, backend=comparison.runtime))
    show_outputs(printer, "outputs against float", comparison)
    show_evaluation(printer, comparison)
    show_refusals(printer, _left_float(comparison), title="in float between Q/DQ pairs", verbose=True)


def _left_float(comparison: Comparison) -> list[Refusal]:
    from sbonnx.report import Refusal

    left = () if comparison.kernels is None else comparison.kernels.left_float
    return [Refusal(kernel.op, kernel.node, kernel.why) for kernel in left]
