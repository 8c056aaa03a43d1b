"""``sbonnx profile``: layer-wise error analysis by weights, inputs, isolated and accumulated error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.evaluation_options import calibration_data, evaluation_of
from sbonnx.cli.options import Arguments, CommandOption
from sbonnx.present.text.printer import Printer, cell
from sbonnx.present.text.summary import first_of
from sbonnx.present.text.tables import bar, metric_text

if TYPE_CHECKING:
    from sbonnx.profiling.metric_losses import EvaluatedProfile, MetricLosses
    from sbonnx.report.details import Column
    from sbonnx.report.figures import MetricRow

HELP: Final = (
    "Show the quantization error of each layer. The model is quantized by the recipe, or a quantized file of "
    "any tool is read."
)

EVALUATING: Final = tuple(row for row in options.EVALUATING if row is not options.METRIC)

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
    "--top N",
    int,
    "Show the first N rows. With --eval: measure the metric of N layers, 10 by default.",
    shown="some, all with -v",
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
    options.VERBOSE,
    options.ORT_LIBRARY,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx.api.layer_profile import MEASURE, column_of, profile

    printer, quantized = given.printer(), given[QUANT]
    evaluation = evaluation_of(given, METRIC)
    calibration_data(given, "profile")
    of_files: tuple[CommandOption[Any], ...] = (options.DEVICE, options.SAMPLES, options.MEMORY)
    of_recipe = (given.overrides(without=of_files), given[options.RECIPE], given[options.BACKEND])
    recipe = given.recipe() if quantized is None or any(of_recipe) else None
    keys = {} if recipe else {row.name: given[row] for row in of_files}
    metric = given[METRIC] if evaluation is None else MEASURE
    result = given.call(profile, metric=metric, evaluation=evaluation, recipe=recipe, backend=None, **keys)
    printer.value("profile", result)
    brief = given[TOP] is None and not given[options.VERBOSE]
    _tables(printer, f"{quantized or given[options.MODEL]}", result, column_of(given[SORT]), brief=brief)
    if result.evaluation is not None:
        _metric_table(printer, result.evaluation)
    if given[MERMAID] is not None:
        printer.line(f"written: {given[MERMAID]}")
    return 0


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


LINES: Final = 8
"""Lines of layers and notes, unless more are asked for."""

MOST_NOTES: Final = 2
"""Notes, unless more are asked for."""

MOST_OUTPUTS: Final = 3
"""Outputs that are named, unless more are asked for."""


def _tables(printer: Printer, title: str, result: EvaluatedProfile, column: Column, *, brief: bool) -> None:
    from sbonnx.profiling import COLUMNS, TITLES

    shown, profile = result.profile, result.whole or result.profile
    unit = f" {profile.unit}" if profile.unit else ""
    better = "more is better" if profile.higher_is_better else "less is better"
    whole = f"outputs of {title}, quantized as a whole ({profile.measure}{unit}, {better}; {profile.feeds} feeds)"
    if brief:
        outputs = [f"{name} {cell(value)}" for name, value in profile.outputs.items()]
        printer.line(f"{whole}: {first_of(outputs, MOST_OUTPUTS)}")
    else:
        printer.table(whole, ("output", profile.measure), list(profile.outputs.items()))
    layers = shown.layers[: LINES - min(len(profile.notes), MOST_NOTES)] if brief else shown.layers
    losses = profile.losses(column)
    most = max((loss for loss in losses.values() if math.isfinite(loss)), default=0.0)
    rows = []
    for row in layers:
        share = losses.get(row.node, 0.0) / most if most else 0.0
        rows.append((row.node, row.op, row.label, *(row.value(name) for name in COLUMNS), bar(share)))
    titles = [TITLES[name] for name in COLUMNS]
    bars = f"{TITLES[column]} loss"
    more = " (all: -v)" if len(layers) < len(shown.layers) else ""
    counted = f"{len(layers)} of {len(profile.layers)} layers"
    printer.table(
        f"{counted}: {profile.measure}{unit} of the outputs of each, against float{more}",
        ("layer", "op", "reads", *titles, bars),
        rows,
        optional=(bars, "op", "reads"),
    )
    for note in profile.notes[: MOST_NOTES if brief else None]:
        printer.note(note)
