"""``sbonnx profile``: layer-wise error analysis by weights, inputs, isolated and accumulated error."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.evaluation import evaluation_of
from sbonnx.cli.options import Arguments
from sbonnx.errors import RecipeError
from sbonnx.present.text.printer import Printer
from sbonnx.present.text.tables import bar, metric_text

if TYPE_CHECKING:
    from sbonnx.graph import Graph
    from sbonnx.planning.types import Plan, Solution
    from sbonnx.profiling import MetricLosses, Profile
    from sbonnx.report.details import Column
    from sbonnx.report.figures import MetricRow
    from sbonnx.verify import EvaluationData

HELP: Final = (
    "Show the quantization error of each layer. The model is quantized by the recipe, or a quantized file of "
    "any tool is read."
)

GRAPH: Final = "graph"
"""Sort key: graph order."""

MEASURE: Final = "sqnr"
"""Error measure without --metric."""

EVALUATED: Final = 10
"""Layers whose loss in a task metric is measured, without --top."""

EVALUATING: Final = tuple(row for row in options.EVALUATING if row is not options.METRIC)

DEFAULT_MEMORY: Final = "512 MiB"
"""Memory limit for buffered activations if a quantized file is profiled."""

QUANT: Final = options.optional_argument(
    "quantized", "QUANT", "A quantized file of that model; without it, the model is quantized by the recipe."
)
METRIC: Final = options.option(
    "--metric sqnr|mse|cosine|max|kl",
    str,
    "Error measure at the outputs of each layer. With --eval: the task metric instead, such as top1 or map50.",
    shown="sqnr",
)
SORT: Final = options.setting(
    "--sort graph|alone|weights|activations|gathered",
    "alone",
    "Worst first by a column (alone: isolated, gathered: accumulated error), or in graph order.",
)
TOP: Final = options.option(
    "--top N", int, "Show only the first N rows. With --eval: measure the metric of N layers, 10 by default."
)
MERMAID: Final = options.output_option("--mermaid FILE", "Write the graph, coloured by loss, as a Mermaid chart.")

OPTIONS: Final = (
    options.MODEL,
    QUANT,
    options.DATA,
    *options.BASIC,
    options.BLOCK_SIZE,
    options.MODE,
    options.SET,
    *options.NODES,
    *options.FEEDS,
    options.MEMORY,
    options.ASYM,
    options.FEEDBACK,
    METRIC,
    SORT,
    TOP,
    MERMAID,
    *EVALUATING,
    options.FORCE,
    options.ORT_LIBRARY,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx import graph as graphs
    from sbonnx.mermaid import mermaid as to_mermaid
    from sbonnx.profiling.metric_losses import EvaluatedProfile

    model, quantized, mermaid = given[options.MODEL], given[QUANT], given[MERMAID]
    printer, sort, top = given.printer(), given[SORT], given[TOP]
    evaluation = evaluation_of(given, METRIC)
    _check_words(_measure(given), sort, top)
    data = given.required_data()
    recipe_flags = given.overrides(without=(options.DEVICE, options.SAMPLES, options.MEMORY))
    if mermaid is not None:
        inputs = [model, Path(data), *([quantized] if quantized else [])]
        graphs.check_target(mermaid, inputs=inputs, force=given[options.FORCE])
    if quantized is None:
        profiled = _profile_recipe(given)
    elif any((recipe_flags, given[options.RECIPE], given[options.BACKEND])):
        raise RecipeError(
            f"{quantized} is quantized already: leave --recipe, --backend, --bits and other options of the recipe out"
        )
    else:
        profiled = _profile_file(given, quantized)
    graph, profile = profiled.graph, profiled.profile
    if mermaid is not None:
        graphs.write_text(mermaid, to_mermaid(graph, profile.losses()))
    rows = profile.layers if sort == GRAPH else profile.worst_first(_column(sort))
    shown = replace(profile, layers=rows[:top])
    metric = None if evaluation is None else _metric_losses(given, profiled, evaluation)
    printer.value("profile", EvaluatedProfile(shown, metric))
    _tables(printer, f"{quantized or model}", profile, shown, _column(sort))
    if metric is not None:
        _metric_table(printer, metric)
    if mermaid is not None:
        printer.line(f"written: {mermaid}")
    return 0


@dataclass(frozen=True)
class _Profiled:
    """A profile, and the network that it is of."""

    graph: Graph
    plan: Plan
    solution: Solution
    profile: Profile


def _measure(given: Arguments) -> str:
    return given[METRIC] or MEASURE if given[options.EVAL] is None else MEASURE


def _metric_losses(given: Arguments, found: _Profiled, evaluation: EvaluationData) -> MetricLosses:
    """Measure the loss in the task metric of the layers with the largest isolated error."""
    from sbonnx.profiling import metric_losses

    rows = [row for row in found.profile.worst_first("alone") if not row.scope]
    nodes = [row.node for row in rows[: given[TOP] or EVALUATED]]
    progress = given.progress()
    try:
        progress.start("evaluation", None)
        return metric_losses(
            found.graph,
            found.plan,
            found.solution,
            nodes,
            evaluation,
            device=given[options.DEVICE] or "cpu",
            feeds_done=progress.advance,
        )
    finally:
        progress.close()


def _metric_table(printer: Printer, found: MetricLosses) -> None:
    def cells(row: MetricRow) -> tuple[str, str | None]:
        difference = None if row.difference is None else metric_text(row.difference, found, sign=True)
        return metric_text(row.metric, found), difference

    printer.table(
        f"{found.metric} of {found.samples} labelled samples, 95 % intervals",
        ("network", found.metric, "difference"),
        [("float", *cells(found.float)), ("quantized", *cells(found.quantized))],
    )
    printer.table(
        f"{found.metric} of the {len(found.layers)} layers with the largest isolated error, against float",
        ("layer", "op", "quantized alone", "loss", "all but this quantized", "loss"),
        [
            (row.node, row.op, cells(row.alone)[0], row.alone.loss, cells(row.kept_float)[0], row.kept_float.loss)
            for row in found.layers
        ],
    )


def _check_words(metric: str, sort: str, top: int | None) -> None:
    from sbonnx.profiling import COLUMNS, MEASURES

    if metric not in MEASURES:
        raise RecipeError(f"--metric {metric}: there are {', '.join(MEASURES)}; a task metric needs --eval DATA")
    if sort not in (GRAPH, *COLUMNS):
        raise RecipeError(f"--sort {sort}: there are {', '.join((GRAPH, *COLUMNS))}")
    if top is not None and top < 1:
        raise RecipeError(f"--top {top} shows nothing: use 1 or more")


def _column(sort: str) -> Column:
    """Return the column that determines the order of rows and the length of bars."""
    from sbonnx.profiling import COLUMNS

    return next((column for column in COLUMNS if column == sort), COLUMNS[0])


def _profile_recipe(given: Arguments) -> _Profiled:
    from sbonnx.pipeline import solve
    from sbonnx.profiling import WalkOptions, losses
    from sbonnx.stages.state import Request, read_recipe

    recipe, rules = read_recipe(given[options.RECIPE], given[options.BACKEND], given.overrides())
    if recipe.mode == "dynamic":
        raise RecipeError("MODE: dynamic cannot be profiled: the scales of activations are computed as the file runs")
    request = Request(given[options.MODEL], recipe, rules, data=given.required_data(), split=given[options.SPLIT])
    state = solve(request, given.progress())
    profile = losses(
        state.prepared.graph,
        state.prepared.plan,
        state.solution,
        () if state.data is None else state.data.every,
        checker=_measure(given),
        options=WalkOptions(None, recipe.device, recipe.calibration.memory, recipe.calibration.threads),
    )
    return _Profiled(state.prepared.graph, state.prepared.plan, state.solution, profile)


def _profile_file(given: Arguments, quantized: Path) -> _Profiled:
    from sbonnx.calib.data import dataset as datasets
    from sbonnx.profiling import WalkOptions, file_losses, subject_of

    model = given[options.MODEL]
    subject = subject_of(model, quantized)
    feeds = datasets.read(
        given.required_data(), subject.graph, split=given[options.SPLIT], limit=given[options.SAMPLES]
    )
    profile = file_losses(
        model,
        quantized,
        subject.graph,
        subject.plan,
        subject.solution,
        feeds,
        checker=_measure(given),
        options=WalkOptions(device=given[options.DEVICE] or "cpu", memory=given[options.MEMORY] or DEFAULT_MEMORY),
    )
    profile = replace(profile, notes=(*subject.notes, *profile.notes))
    return _Profiled(subject.graph, subject.plan, subject.solution, profile)


def _tables(printer: Printer, title: str, profile: Profile, shown: Profile, column: Column) -> None:
    from sbonnx.profiling import COLUMNS, TITLES

    unit = f" {profile.unit}" if profile.unit else ""
    better = "more is better" if profile.higher_is_better else "less is better"
    printer.table(
        f"outputs of {title}, quantized as a whole ({profile.measure}{unit}, {better}; {profile.feeds} feeds)",
        ("output", profile.measure),
        list(profile.outputs.items()),
    )
    losses = profile.losses(column)
    most = max((loss for loss in losses.values() if math.isfinite(loss)), default=0.0)
    rows = []
    for row in shown.layers:
        share = losses.get(row.node, 0.0) / most if most else 0.0
        rows.append((row.node, row.op, row.label, *(row.value(name) for name in COLUMNS), bar(share)))
    titles = [TITLES[name] for name in COLUMNS]
    bars = f"{TITLES[column]} loss"
    counted = f"{len(shown.layers)} of {len(profile.layers)} layers"
    printer.table(
        f"{counted}: {profile.measure}{unit} of the outputs of each, against float",
        ("layer", "op", "reads", *titles, bars),
        rows,
        optional=(bars, "op", "reads"),
    )
    for note in profile.notes:
        printer.note(note)
