"""``sbonnx compare``: compare a quantized model with its float model on the same data."""

from __future__ import annotations

from typing import Final

from sbonnx.cli import options
from sbonnx.cli.evaluation_options import evaluation_of
from sbonnx.cli.options import Arguments
from sbonnx.present.text.tables import comparison_facts, show_evaluation, show_outputs, show_portability, show_refusals

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
    from sbonnx.report import Refusal

    printer, tasks = given.printer(), given[options.TASK]
    given.required_data()
    task = options.output_tasks(tasks) if tasks else None
    result = given.call(compare, evaluation=evaluation_of(given), task=task)
    printer.notes(result.notes)
    code, comparison, advice = printer.problems(result.problems), result.comparison, result.advice
    if advice is not None:
        printer.advice(advice.text, advice.command)
    printer.value("compare", result)
    printer.facts(
        f"{result.quantized} against {result.float}", comparison_facts(comparison, backend=comparison.runtime)
    )
    show_outputs(printer, "outputs against float", comparison)
    show_evaluation(printer, comparison)
    show_portability(printer, result.portability)
    left = () if comparison.kernels is None else comparison.kernels.left_float
    refusals = [Refusal(kernel.op, kernel.node, kernel.why) for kernel in left]
    show_refusals(printer, refusals, title="in float between Q/DQ pairs", verbose=given[options.VERBOSE])
    printer.verdict(result.verdict, [advice.command] if advice else [])
    return code
