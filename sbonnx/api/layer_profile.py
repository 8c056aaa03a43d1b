"""``profile``: layer-wise error analysis by weights, inputs, isolated and accumulated error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx import graph as graphs
from sbonnx import pipeline
from sbonnx.api.arguments import File, check_evaluation, feeds_of, model_files, reading
from sbonnx.calib.data import Preprocessing, with_preprocess
from sbonnx.errors import DataError, RecipeError
from sbonnx.graph import Graph
from sbonnx.graph.storage.model_file import ModelSource
from sbonnx.mermaid import mermaid as to_mermaid
from sbonnx.planning.types import Plan, Solution
from sbonnx.profiling import COLUMNS, MEASURES, Profile, WalkOptions, file_losses, losses, metric_losses, subject_of
from sbonnx.profiling.metric_losses import EvaluatedProfile, MetricLosses
from sbonnx.progress import Progress, Silent, shown_by_default
from sbonnx.report.details import Column
from sbonnx.stages.state import Request, read_recipe
from sbonnx.verify import EvaluationData
from sbonnx.verify.runtimes import CPU

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sbonnx.recipe.keywords import RecipeKeywords

GRAPH: Final = "graph"
"""Sort key: graph order."""

MEASURE: Final = "sqnr"
"""Default error measure."""

EVALUATED: Final = 10
"""Default number of layers whose loss in a task metric is measured."""

DEFAULT_MEMORY: Final = "512 MiB"
"""Memory limit for buffered activations if a quantized file is profiled."""

OF_FILES: Final = {"device": CPU, "memory": DEFAULT_MEMORY, "samples": None}
"""Recipe keys that apply to quantized files too, with their defaults there."""


@dataclass(frozen=True)
class _Profiled:
    """A profile, and the network that it is of."""

    graph: Graph
    plan: Plan
    solution: Solution
    profile: Profile
    device: str


@shown_by_default
def profile(
    model: ModelSource,
    quantized: ModelSource | None = None,
    data: Any = None,
    *,
    backend: str | None = None,
    recipe: Any = None,
    preprocess: Preprocessing | None = None,
    split: int | None = None,
    metric: str = MEASURE,
    sort: str = "alone",
    top: int | None = None,
    mermaid: File | None = None,
    evaluation: EvaluationData | None = None,
    force: bool = False,
    progress: Progress | None = None,
    ort_libraries: Sequence[File] = (),
    **overrides: Unpack[RecipeKeywords],
) -> EvaluatedProfile:
    """Measure the quantization error of each layer: by its weights, its inputs, isolated and accumulated.

    Args:
        model: path of the float model, or a model in memory.
        quantized: quantized form of that model, of any tool, likewise; None: the model is quantized by the recipe.
        data: calibration data, or feeds for the quantized file, see `sbonnx.quantize`; needed.
        backend, recipe, preprocess, split: see `sbonnx.quantize`; with `quantized` there is no recipe.
        metric: error measure at the outputs of each layer: "sqnr", "mse", "cosine", "max" or "kl".
        sort: worst layers first by "alone" (isolated error), "weights", "activations" or "gathered" (accumulated
            error); "graph": in graph order.
        top: number of layers in the result; None: all.
        mermaid, force: path for the graph, coloured by loss, as a Mermaid chart, and whether to overwrite a file.
        evaluation: labelled data and a metric, which is measured with only one layer quantized and with all but one,
            for the `top` layers with the largest isolated error (None: 10).
        progress: receiver of progress updates; None: a bar in notebooks and on terminals.
        ort_libraries: libraries of custom operators that onnxruntime loads, for all later sessions of the process.
        overrides: recipe keys by keyword, such as ``bits="w4a8"``. With `quantized` only ``device``, ``samples`` and
            ``memory``.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix.
    """
    _check_words(metric, sort, top)
    check_evaluation(evaluation)
    if data is None:
        raise DataError("the data are missing: give data=FILE or FOLDER (docs/data.md)")
    progress, keys = progress or Silent(), dict(overrides)
    models = (model,) if quantized is None else (model, quantized)
    with reading(*models, data, recipe, ort_libraries=ort_libraries), model_files(*models) as (files, names):
        if mermaid is not None:
            graphs.check_target(Path(mermaid), inputs=(), force=force)
        data = with_preprocess(data, preprocess)
        if quantized is None:
            settings = read_recipe(recipe, backend, keys)
            request = Request(model, *settings, data=data, split=split, evaluation=evaluation)
            evaluation, profiled = request.evaluation, _profile_recipe(request, metric, progress)
        elif keys.keys() - OF_FILES.keys() or recipe is not None or backend is not None:
            raise RecipeError(
                f"{names[1]} is quantized already: leave --recipe, --backend, --bits and other options of the recipe "
                "out"
            )
        else:
            profiled = _profile_file(files, data, split, metric, {**OF_FILES, **keys})
        whole = profiled.profile
        if mermaid is not None:
            graphs.write_text(Path(mermaid), to_mermaid(profiled.graph, whole.losses()))
        rows = whole.layers if sort == GRAPH else whole.worst_first(column_of(sort))
        in_metric = None if evaluation is None else _metric_losses(profiled, evaluation, top or EVALUATED, progress)
    return EvaluatedProfile(replace(whole, layers=rows[:top]), in_metric, whole)


def column_of(sort: str) -> Column:
    """Return the column that determines the order of rows; of graph order, that of the length of bars."""
    return next((column for column in COLUMNS if column == sort), COLUMNS[0])


def _check_words(metric: str, sort: str, top: int | None) -> None:
    if metric not in MEASURES:
        raise RecipeError(f"--metric {metric}: there are {', '.join(MEASURES)}; a task metric needs --eval DATA")
    if sort not in (GRAPH, *COLUMNS):
        raise RecipeError(f"--sort {sort}: there are {', '.join((GRAPH, *COLUMNS))}")
    if top is not None and top < 1:
        raise RecipeError(f"--top {top} shows nothing: use 1 or more")


def _metric_losses(profiled: _Profiled, evaluation: EvaluationData, top: int, progress: Progress) -> MetricLosses:
    """Measure the loss in the task metric of the layers with the largest isolated error."""
    rows = [row for row in profiled.profile.worst_first("alone") if not row.scope]
    progress.start("evaluation", None)
    return metric_losses(
        profiled.graph,
        profiled.plan,
        profiled.solution,
        [row.node for row in rows[:top]],
        evaluation,
        device=profiled.device,
        feeds_done=progress.advance,
    )


def _profile_recipe(request: Request, metric: str, progress: Progress) -> _Profiled:
    recipe = request.recipe
    if recipe.mode == "dynamic":
        raise RecipeError("MODE: dynamic cannot be profiled: the scales of activations are computed as the file runs")
    state = pipeline.solve(request, progress)
    graph, plan = state.prepared.graph, state.prepared.plan
    walk = WalkOptions(None, recipe.device, recipe.calibration.memory, recipe.calibration.threads)
    feeds = () if state.data is None else state.data.every
    result = losses(graph, plan, state.solution, feeds, checker=metric, options=walk)
    return _Profiled(graph, plan, state.solution, result, recipe.device)


def _profile_file(
    files: tuple[Path, ...], data: Any, split: int | None, metric: str, keys: Mapping[str, Any]
) -> _Profiled:
    model, quantized = files
    subject = subject_of(model, quantized)
    network = subject.graph, subject.plan, subject.solution
    feeds = feeds_of(data, subject.graph, split=split, samples=keys["samples"])
    walk = WalkOptions(device=keys["device"], memory=keys["memory"])
    result = file_losses(model, quantized, *network, feeds, checker=metric, options=walk)
    return _Profiled(*network, replace(result, notes=(*subject.notes, *result.notes)), keys["device"])
