"""``sbonnx compare``: compare a quantized model with its float model on the same data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.evaluation import evaluation_of
from sbonnx.cli.options import Arguments
from sbonnx.errors import RecipeError
from sbonnx.present.text.tables import comparison_facts, show_evaluation, show_outputs, show_refusals

if TYPE_CHECKING:
    from sbonnx.graph import Graph
    from sbonnx.verify import Tasks

HELP: Final = "Compare a quantized model with its float model. Error of each output, size, latency, integer kernels."


FLOAT: Final = options.argument("float_model", "FLOAT", "The float model.")
QUANT: Final = options.argument("quant_model", "QUANT", "The quantized model.")

OPTIONS: Final = (
    FLOAT,
    QUANT,
    options.DATA,
    *options.FEEDS,
    options.RUNTIME,
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
    from sbonnx import graph as graphs
    from sbonnx import verify
    from sbonnx.calib.data import dataset as datasets
    from sbonnx.calib.input_check import doubts_about, first_layer_of
    from sbonnx.report import Problem, Refusal, verdict_of
    from sbonnx.report.comparison import CommandAdvice, FileComparison
    from sbonnx.system.cpu import target_cpu
    from sbonnx.verify.runtimes import chosen_runtime, exact_products, recorded_cpu

    printer, float_model, quant_model = given.printer(), given[FLOAT], given[QUANT]
    rows = {row.key.removeprefix("VERIFY."): row for row in options.LIMITS}
    thresholds: dict[str, float | None] = {key.lower(): given[row] for key, row in rows.items()}
    limits = verify.Limits(**thresholds, names={key: row.flags[0] for key, row in rows.items()})
    source, evaluation, max_loss = given.required_data(), evaluation_of(given), _max_loss(given)
    task = _task(given)
    quantized = graphs.load(quant_model)  # validates the file, for a clear error message
    graph = graphs.load(float_model)
    _check_order(float_model, graph, quant_model, quantized)
    verify.check_tasks(task, graph)
    feeds = datasets.read(source, graph, split=given[options.SPLIT], limit=given[options.SAMPLES])
    printer.notes(feeds.notes)
    doubts = doubts_about(first_layer_of(graph), feeds)
    device = given[options.DEVICE] or "cpu"
    runtime = chosen_runtime(given[options.RUNTIME], [quant_model], device=device)
    cpu = given.file_cpu(runtime)
    depth = verify.Depth(latency=cpu in ("", target_cpu().name), levels=True, kernels=True)
    judged = verify.VerifyOptions(exact=exact_products(quant_model, cpu), device=device, runtime=runtime, task=task)
    comparison = verify.compare(float_model, quant_model, feeds, depth=depth, options=judged)
    cpu = cpu or (recorded_cpu(quant_model) if comparison.saturating or comparison.unknown_sums else "")
    comparison = replace(comparison, doubts=doubts, cpu=cpu)
    missed: tuple[Problem, ...] = ()
    if evaluation is not None:
        models = {"float": float_model, "quantized": quant_model}
        measured = verify.evaluate(models, evaluation, device=device, runtimes={"quantized": runtime}, cpu=cpu)
        measured = replace(measured, max_loss=max_loss)
        comparison, missed = replace(comparison, evaluation=measured), measured.problems("--max-loss")
    problems = (*comparison.problems(), *comparison.unknown(), *missed, *limits.problems(comparison))
    code = printer.problems(problems)
    advice: CommandAdvice | None = None
    if limits.below(comparison) and _can_profile(float_model, quant_model):
        command = given.other_command("profile", (FLOAT, QUANT, options.DATA, *options.FEEDS))
        advice = CommandAdvice("show which layers lose most", command)
        printer.advice(advice.text, advice.command)
    verdict = verdict_of(comparison, problems=problems, backend=comparison.runtime)
    printer.value("compare", FileComparison(problems, verdict, str(float_model), str(quant_model), comparison, advice))
    printer.facts(f"{quant_model} against {float_model}", comparison_facts(comparison, backend=comparison.runtime))
    show_outputs(printer, "outputs against float", comparison)
    show_evaluation(printer, comparison)
    left = () if comparison.kernels is None else comparison.kernels.left_float
    refusals = [Refusal(kernel.op, kernel.node, kernel.why) for kernel in left]
    show_refusals(printer, refusals, title="in float between Q/DQ pairs", verbose=given[options.VERBOSE])
    printer.verdict(verdict, [advice.command] if advice else [])
    return code


def _check_order(float_model: Path, graph: Graph, quant_model: Path, quantized: Graph) -> None:
    """Check that not the first file is the quantized one, and the second is not.

    Raises:
        ModelError: the files are in the other order.
    """
    from sbonnx.errors import ModelError
    from sbonnx.qdq import is_quantized

    if is_quantized(graph) and not is_quantized(quantized):
        raise ModelError(
            f"{float_model} is quantized and {quant_model} is not: give the float model first, sbonnx compare "
            f"{quant_model} {float_model}"
        )


def _max_loss(given: Arguments) -> float | None:
    """Parse ``--max-loss``.

    Raises:
        RecipeError: it is no share, or there is no metric.
    """
    from sbonnx import recipe as recipes

    value = given[options.MAX_METRIC_LOSS]
    if value is None:
        return None
    if given[options.EVAL] is None:
        raise RecipeError("--max-loss limits the loss in a metric: give --eval DATA and --metric")
    return recipes.load(None, overrides=[f"max_loss={value}"]).mixed.max_loss


def _task(given: Arguments) -> Tasks:
    """Parse ``--task``.

    Raises:
        RecipeError: there is no such task.
    """
    from sbonnx import recipe as recipes

    value = given[options.TASK]
    return None if not value else recipes.load(None, overrides={"task": options.output_tasks(value)}).verify.task


def _can_profile(float_model: Path, quant_model: Path) -> bool:
    """Whether `sbonnx profile` finds pairs in the quantized file."""
    from sbonnx.errors import SbonnxError
    from sbonnx.profiling import subject_of

    try:
        subject_of(float_model, quant_model)
    except SbonnxError:
        return False
    return True
