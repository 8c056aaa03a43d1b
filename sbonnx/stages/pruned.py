"""First stage of a recipe with SPARSE: the float model is pruned, and takes the place of the original."""

from __future__ import annotations

import os
from dataclasses import replace

import onnx

from sbonnx import graph as graphs
from sbonnx.calib.held_out import HeldOutSplit
from sbonnx.graph import query
from sbonnx.options import RunOptions
from sbonnx.plan.node_infos import node_infos
from sbonnx.progress import Progress
from sbonnx.pruning.verified import measure, prune
from sbonnx.recipe.names import STATIC
from sbonnx.stages.measure import divided
from sbonnx.stages.prepare import load
from sbonnx.stages.state import PipelineState, Prepared, PrunedModel, Request, original_of, run_options


def prune_first(state: PipelineState, options: RunOptions) -> PipelineState:
    """Prune the model of the request if the recipe has SPARSE, on the samples that are calibrated on.

    The following stages read the pruned model; the result is compared with the original. A request that has a pruned
    model already is not changed.

    Raises:
        SbonnxError: a subclass; see `sbonnx.prune`.
    """
    request = state.request
    recipe = request.recipe
    if recipe.sparse.problem is not None:
        raise recipe.origin.error(recipe.sparse.problem)
    if not recipe.sparse.wanted or isinstance(request.model, PrunedModel):
        return state
    loaded = load(state, options).prepared
    infos, tensors = tuple(node_infos(loaded.graph)), tuple(query.tensors_by_name(loaded.graph))
    source, parts = _inputs(request, loaded)
    # MAX_LOSS is judged on samples that neither pruning nor verification sees: those that `prune` holds out itself
    data = parts if parts is None or recipe.sparse.max_loss is None else parts.fit
    integers = recipe.mode == STATIC
    found = prune(source, data, recipe=recipe, min_sqnr=None, quantized=integers, progress=options.progress)
    name = os.fspath(request.model) if isinstance(request.model, (str, os.PathLike)) else found.model
    model = PrunedModel(
        request.model,
        replace(found, model=name),
        infos,
        tensors,
        loaded.graph.info.files,
        loaded.graph.info.original_opset,
        loaded.nodes_before,
    )
    return replace(state, request=replace(request, model=model))


def measure_first(request: Request, progress: Progress) -> None:
    """Measure what `prune_first` reads from the cache of the recipe, if pruning measures anything.

    Raises:
        SbonnxError: a subclass; see `sbonnx.prune`.
    """
    source, parts = _inputs(request, load(PipelineState.of(request), run_options(request.recipe)).prepared)
    if parts is not None and request.recipe.sparse.max_loss is None:
        measure(source, parts, request.recipe, quantized=request.recipe.mode == STATIC, progress=progress)


def _inputs(request: Request, loaded: Prepared) -> tuple[str | os.PathLike[str] | onnx.ModelProto, HeldOutSplit | None]:
    """Return the float model to prune, and its samples."""
    data = None if request.data is None else divided(request.data, loaded, request.split)
    source = graphs.to_proto(loaded.graph) if request.recipe.requantize else original_of(request.model)
    return source, data
