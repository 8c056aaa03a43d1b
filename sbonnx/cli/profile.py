"""``sbonnx profile``: layer-wise error analysis by weights, inputs, isolated and accumulated error."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sbonnx.cli import options
from sbonnx.cli.output.bars import bar
from sbonnx.cli.output.show import Show
from sbonnx.errors import RecipeError

if TYPE_CHECKING:
    from sbonnx.backends import Backend
    from sbonnx.graph import Graph
    from sbonnx.profile import Column, Profile
    from sbonnx.recipe import Recipe

HELP: Final = (
    "Show which layers lose the most, and by what. The model is quantized as the recipe says, or a quantized file of "
    "any tool is read."
)

GRAPH: Final = "graph"
"""Sort key: graph order."""

TITLES: Final = {"alone": "alone", "weights": "weights", "activations": "inputs", "gathered": "with all before"}
"""Column titles of the table."""

MEMORY: Final = "512 MiB"
"""Default memory limit for buffered activations."""

Quantized = Annotated[
    Path | None,
    typer.Argument(metavar="QUANT", help="A quantized file of it, instead of quantizing it now.", show_default=False),
]
Metric = Annotated[
    str, typer.Option("--metric", metavar="sqnr|mse|cosine|max|kl", help="What is measured at a layer's outputs.")
]
Sort = Annotated[
    str,
    typer.Option(
        "--sort", metavar="graph|alone|weights|activations|gathered", help="Worst first by a column, or as layers run."
    ),
]
Top = Annotated[int | None, typer.Option("--top", metavar="N", help="Show the first N rows.", show_default=False)]
Mermaid = Annotated[
    Path | None,
    typer.Option("--mermaid", metavar="FILE", help="Write the graph, coloured by loss.", show_default=False),
]


def run(
    model: options.Model,
    quantized: Quantized = None,
    data: options.Data = None,
    backend: options.Backend = None,
    recipe: options.RecipePath = None,
    bits: options.Bits = None,
    block_size: options.BlockSize = None,
    mode: options.Mode = None,
    sets: options.Sets = None,
    split: options.Split = None,
    samples: options.Samples = None,
    device: options.Device = None,
    memory: options.Memory = None,
    asym: options.Asym = False,
    feedback: options.Feedback = None,
    metric: Metric = "sqnr",
    sort: Sort = "alone",
    top: Top = None,
    mermaid: Mermaid = None,
    force: options.Force = False,
    as_json: options.Json = False,
    json_progress: options.JsonProgress = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Run ``sbonnx profile`` and return the exit code."""
    from sbonnx import graph as graphs
    from sbonnx.mermaid import mermaid as chart
    from sbonnx.progress import make_progress
    from sbonnx.stages.state import read_recipe

    show = Show(as_json=as_json, quiet=quiet)
    _check_words(metric, sort, top)
    source = options.required(data)
    recipe_flags = options.overrides(sets, bits=bits, block_size=block_size, mode=mode, asym=asym)
    recipe_flags = options.overrides(recipe_flags, feedback=options.pairs(feedback))
    if mermaid is not None:
        inputs = [model, source, *([quantized] if quantized else [])]
        graphs.check_target(mermaid, inputs=inputs, force=force)
    if quantized is None:
        flags = options.overrides(recipe_flags, device=device, samples=samples, memory=memory)
        wishes = read_recipe(recipe, backend, flags)
        graph, found = _planned(model, source, wishes, split, metric, make_progress(quiet=quiet, as_json=json_progress))
    elif recipe_flags or recipe or backend:
        raise RecipeError(f"{quantized} is quantized already: leave --recipe, --backend, --bits and their kin out")
    else:
        feeds = {"source": source, "split": split, "samples": samples}
        graph, found = _read(model, quantized, feeds, metric, device or "cpu", memory or MEMORY)
    if mermaid is not None:
        graphs.write_text(mermaid, chart(graph, found.losses()))
    rows = found.layers if sort == GRAPH else found.worst_first(_column(sort))
    shown = replace(found, layers=rows[:top])
    show.value(shown.to_dict())
    _tables(show, f"{quantized or model}", found, shown, _column(sort))
    if mermaid is not None:
        show.line(f"written: {mermaid}")
    return 0


def _check_words(metric: str, sort: str, top: int | None) -> None:
    """Check the options before the work begins."""
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


def _planned(
    model: Path, source: Path, wishes: tuple[Recipe, Backend], split: int | None, metric: str, progress: Any
) -> tuple[Graph, Profile]:
    """Quantize the model with the recipe and profile it on the same data."""
    from sbonnx.pipeline import solve
    from sbonnx.profile import losses
    from sbonnx.stages.state import Request

    recipe, rules = wishes
    if recipe.mode == "dynamic":
        raise RecipeError("MODE: dynamic cannot be profiled: the scales of activations are computed as the file runs")
    try:
        state = solve(Request(model, recipe, rules, data=source, split=split), progress)
    finally:
        progress.close()
    found = losses(
        state.prepared.graph,
        state.prepared.plan,
        state.solution,
        () if state.data is None else state.data.every,
        checker=metric,
        device=recipe.device,
        memory=recipe.calibration.memory,
        threads=recipe.calibration.threads,
    )
    return state.prepared.graph, found


def _read(
    model: Path, quantized: Path, given: dict[str, Any], metric: str, device: str, memory: str
) -> tuple[Graph, Profile]:
    """Profile a quantized file against its float model."""
    from sbonnx.calib.data import dataset as datasets
    from sbonnx.profile import losses, same_model, subject_of

    subject = subject_of(model, quantized)
    feeds = datasets.read(given["source"], subject.graph, split=given["split"], limit=given["samples"])
    notes = (*subject.notes, *same_model(subject, model, feeds))
    found = losses(subject.graph, subject.plan, subject.solution, feeds, checker=metric, device=device, memory=memory)
    return subject.graph, replace(found, notes=(*notes, *found.notes))


def _tables(show: Show, title: str, found: Profile, shown: Profile, column: Column) -> None:
    """Show the measurements: outputs, layers with a bar each, and notes."""
    from sbonnx.profile import COLUMNS

    plain = found.to_dict()
    unit = f" {plain['unit']}" if plain["unit"] else ""
    better = "more is better" if plain["higher_is_better"] else "less is better"
    show.table(
        f"outputs of {title}, quantized as a whole ({plain['measure']}{unit}, {better}; {found.feeds} feeds)",
        ("output", plain["measure"]),
        list(found.outputs.items()),
    )
    losses = found.losses(column)
    most = max((loss for loss in losses.values() if math.isfinite(loss)), default=0.0)
    rows = []
    for row in shown.layers:
        share = losses.get(row.node, 0.0) / most if most else 0.0
        rows.append((row.node, row.op, row.label, *(row.value(one) for one in COLUMNS), bar(share)))
    names = [TITLES[one] for one in COLUMNS]
    counted = f"{len(shown.layers)} of {len(found.layers)} layers"
    show.table(
        f"{counted}: {plain['measure']}{unit} of what each gives, against float; bars: loss {TITLES[column]}",
        ("layer", "op", "reads", *names, "loss"),
        rows,
    )
    for note in found.notes:
        show.note(note)
