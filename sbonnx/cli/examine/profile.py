"""``sbonnx profile``: layer-wise error analysis by weights, inputs, isolated and accumulated error."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.cli.output.printer import Printer
from sbonnx.cli.output.tables import bar
from sbonnx.errors import RecipeError

if TYPE_CHECKING:
    from sbonnx.graph import Graph
    from sbonnx.profile import Column, Profile

HELP: Final = (
    "Show the quantization error of each layer. The model is quantized by the recipe, or a quantized file of "
    "any tool is read."
)

GRAPH: Final = "graph"
"""Sort key: graph order."""

TITLES: Final = {"alone": "isolated", "weights": "weights", "activations": "inputs", "gathered": "accumulated"}
"""Column titles of the table."""

DEFAULT_MEMORY: Final = "512 MiB"
"""Memory limit for buffered activations if a quantized file is profiled."""

QUANT: Final = options.optional_argument(
    "quantized", "QUANT", "A quantized file of that model; without it, the model is quantized by the recipe."
)
METRIC: Final = options.setting(
    "--metric sqnr|mse|cosine|max|kl", "sqnr", "Error measure at the outputs of each layer."
)
SORT: Final = options.setting(
    "--sort graph|alone|weights|activations|gathered",
    "alone",
    "Worst first by a column (alone: isolated, gathered: accumulated error), or in graph order.",
)
TOP: Final = options.option("--top N", int, "Show only the first N rows.")
MERMAID: Final = options.option("--mermaid FILE", Path, "Write the graph, coloured by loss, as a Mermaid chart.")

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
    options.FORCE,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx import graph as graphs
    from sbonnx.mermaid import mermaid as to_mermaid

    model, quantized, mermaid = given[options.MODEL], given[QUANT], given[MERMAID]
    printer, sort, top = given.printer(), given[SORT], given[TOP]
    _check_words(given[METRIC], sort, top)
    data = given.required_data()
    recipe_flags = given.overrides(without=(options.DEVICE, options.SAMPLES, options.MEMORY))
    if mermaid is not None:
        inputs = [model, Path(data), *([quantized] if quantized else [])]
        graphs.check_target(mermaid, inputs=inputs, force=given[options.FORCE])
    if quantized is None:
        graph, profile = _profile_recipe(given)
    elif any((recipe_flags, given[options.RECIPE], given[options.BACKEND])):
        raise RecipeError(
            f"{quantized} is quantized already: leave --recipe, --backend, --bits and other options of the recipe out"
        )
    else:
        graph, profile = _profile_file(given, quantized)
    if mermaid is not None:
        graphs.write_text(mermaid, to_mermaid(graph, profile.losses()))
    rows = profile.layers if sort == GRAPH else profile.worst_first(_column(sort))
    shown = replace(profile, layers=rows[:top])
    printer.value("profile", shown.to_dict())
    _tables(printer, f"{quantized or model}", profile, shown, _column(sort))
    if mermaid is not None:
        printer.line(f"written: {mermaid}")
    return 0


def _check_words(metric: str, sort: str, top: int | None) -> None:
    from sbonnx.profile import COLUMNS, MEASURES

    if metric not in MEASURES:
        raise RecipeError(f"--metric {metric}: there are {', '.join(MEASURES)}")
    if sort not in (GRAPH, *COLUMNS):
        raise RecipeError(f"--sort {sort}: there are {', '.join((GRAPH, *COLUMNS))}")
    if top is not None and top < 1:
        raise RecipeError(f"--top {top} shows nothing: use 1 or more")


def _column(sort: str) -> Column:
    """Return the column that determines the order of rows and the length of bars."""
    from sbonnx.profile import COLUMNS

    return next((column for column in COLUMNS if column == sort), COLUMNS[0])


def _profile_recipe(given: Arguments) -> tuple[Graph, Profile]:
    from sbonnx.pipeline import solve
    from sbonnx.profile import WalkOptions, losses
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
        checker=given[METRIC],
        options=WalkOptions(None, recipe.device, recipe.calibration.memory, recipe.calibration.threads),
    )
    return state.prepared.graph, profile


def _profile_file(given: Arguments, quantized: Path) -> tuple[Graph, Profile]:
    from sbonnx.calib.data import dataset as datasets
    from sbonnx.profile import WalkOptions, losses, same_model, subject_of

    model = given[options.MODEL]
    subject = subject_of(model, quantized)
    feeds = datasets.read(
        given.required_data(), subject.graph, split=given[options.SPLIT], limit=given[options.SAMPLES]
    )
    notes = (*subject.notes, *same_model(subject, model, feeds))
    profile = losses(
        subject.graph,
        subject.plan,
        subject.solution,
        feeds,
        checker=given[METRIC],
        options=WalkOptions(device=given[options.DEVICE] or "cpu", memory=given[options.MEMORY] or DEFAULT_MEMORY),
    )
    return subject.graph, replace(profile, notes=(*notes, *profile.notes))


def _tables(printer: Printer, title: str, profile: Profile, shown: Profile, column: Column) -> None:
    from sbonnx.profile import COLUMNS

    values = profile.to_dict()
    unit = f" {values['unit']}" if values["unit"] else ""
    better = "more is better" if values["higher_is_better"] else "less is better"
    printer.table(
        f"outputs of {title}, quantized as a whole ({values['measure']}{unit}, {better}; {profile.feeds} feeds)",
        ("output", values["measure"]),
        list(profile.outputs.items()),
    )
    losses = profile.losses(column)
    most = max((loss for loss in losses.values() if math.isfinite(loss)), default=0.0)
    rows = []
    for row in shown.layers:
        share = losses.get(row.node, 0.0) / most if most else 0.0
        rows.append((row.node, row.op, row.label, *(row.value(name) for name in COLUMNS), bar(share)))
    titles = [TITLES[name] for name in COLUMNS]
    counted = f"{len(shown.layers)} of {len(profile.layers)} layers"
    printer.table(
        f"{counted}: {values['measure']}{unit} of the outputs of each, against float; bars: {TITLES[column]} loss",
        ("layer", "op", "reads", *titles, "loss"),
        rows,
    )
    for note in profile.notes:
        printer.note(note)
