"""Stages without data: load, simplify, fuse, equalize weights, plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from sbonnx import graph as graphs
from sbonnx import patterns, precision, qdq
from sbonnx.backends import Backend
from sbonnx.calib.input_check import first_layer_of
from sbonnx.calib.observers import OBSERVERS
from sbonnx.correct import give_biases, own_statistics, record_normals
from sbonnx.equalize import equalize
from sbonnx.graph import Graph, edit, query
from sbonnx.linear.embedding import tie_tables
from sbonnx.ops import LINEAR
from sbonnx.options import RunOptions
from sbonnx.patterns.blocks.masks import bound_masks
from sbonnx.planning import Plan, make
from sbonnx.planning.node_infos import node_infos
from sbonnx.recipe import empty_file, other_defaults
from sbonnx.recipe.torch_modules import Modules
from sbonnx.report import Fired, Note, Reason, Refusal
from sbonnx.stages.contract import stage
from sbonnx.stages.state import ABSENT, BASE_OPSET, Original, PipelineState, Prepared, equalization_of

BATCH_NORM: Final = "fuse_bn"
"""Name prefix of the patterns that apply only if the recipe folds batch norms."""


@stage(sets=("graph",))
def load(state: PipelineState, options: RunOptions) -> PipelineState:
    """Load the model at `state.opset`.

    Raises:
        ModelError: the file cannot be used.
    """
    request = state.request
    graph = graphs.load(request.float_model, opset=state.opset)
    prepared = Prepared(graph, ABSENT, request.recipe, request.backend, query.node_count(graph))
    return replace(state, prepared=prepared)


@stage(needs=("graph",), sets=("graph",))
def resolve(state: PipelineState, options: RunOptions) -> PipelineState:
    """Remove the Q/DQ pairs of the model if the recipe requantizes, and resolve the names of layers in the recipe.

    Raises:
        ModelError: the file is quantized already.
        RecipeError: a pattern of the recipe matches nothing.
    """
    request, pruned, graph = state.request, state.request.pruned, state.prepared.graph
    count = state.prepared.nodes_before
    refusals = list(qdq.make_float(graph, requantize=request.recipe.requantize))
    if pruned is None:
        infos, tensors = tuple(node_infos(graph)), tuple(query.tensors_by_name(graph))
        original = Original(infos, tensors, graph.info.files, graph.info.original_opset, count)
    else:
        original = pruned.original
        graph.info.files, graph.info.original_opset = original.files, original.opset
        graph.info.notes = list(pruned.report.notes)
        refusals += pruned.report.refusals
    recipe, skipped = request.recipe.for_model(original.nodes, original.tensors)
    why = "no node in the file belongs to it, so that nothing needs to be skipped. "
    refusals += [
        Refusal("skip", f"SKIP_TRACE_MODULES '{name}'", Reason("module-not-in-file", why + hint))
        for name, hint in skipped.items()
    ]
    prepared = Prepared(
        graph,
        ABSENT,
        recipe,
        request.backend,
        original.node_count,
        refusals=tuple(refusals),
        layers=Modules(original.nodes),
        first_layer=first_layer_of(graph),
    )
    return replace(state, prepared=prepared, original=original)


@stage(needs=("graph",), sets=("graph",))
def simplify(state: PipelineState, options: RunOptions) -> PipelineState:
    """Apply the simplifying patterns, in place."""
    return _applied(state, patterns.SIMPLIFY) if state.prepared.recipe.simplify else state


@stage(needs=("graph",), sets=("graph",))
def fuse(state: PipelineState, options: RunOptions) -> PipelineState:
    """Apply the fusing patterns, in place."""
    chosen, recipe = state.request.fusions, state.prepared.recipe
    folds = recipe.schedule.fuse_bn or recipe.schedule.bn_tuning
    fusions = [
        pattern
        for pattern in patterns.FUSE
        if (folds or not pattern.name.startswith(BATCH_NORM))
        and (chosen is None or pattern.name.startswith(tuple(chosen)))
    ]
    return _applied(state, fusions)


@stage(needs=("graph",), sets=("graph",))
def record_norms(state: PipelineState, options: RunOptions) -> PipelineState:
    """Record mean and deviation of batch norms, before they are fused, for corrections by them."""
    recipe = state.prepared.recipe
    state.prepared.graph.info.notes.extend(filter(None, [other_defaults(recipe), empty_file(recipe)]))
    record_normals(state.prepared.graph)
    return state


@stage(needs=("graph",), sets=("graph",))
def add_biases(state: PipelineState, options: RunOptions) -> PipelineState:
    """Add biases, and statistics of shared batch norms, where later stages change them, in place."""
    graph, recipe = state.prepared.graph, state.prepared.recipe
    linear = [node for _, body in query.scopes(graph) for node in body.nodes if node.op in LINEAR]
    ops, depthwise = {node.op for node in linear}, any(query.is_depthwise(node) for node in linear)
    corrects = recipe.corrects_biases(ops, depthwise=depthwise)
    if corrects or recipe.bias_correction == "analytic" or recipe.schedule.bn_tuning:
        give_biases(graph)
    if recipe.schedule.bn_tuning:
        own_statistics(graph)
    return replace(state, prepared=replace(state.prepared, corrects=corrects))


@stage(needs=("graph",), sets=("graph",))
def equalize_weights(state: PipelineState, options: RunOptions) -> PipelineState:
    """Equalize by weights alone, in place."""
    done = equalize(state.prepared.graph, equalization_of(state.prepared.recipe))
    return _extended(state, done.fired, done.refusals)


@stage(needs=("graph",), sets=("graph", "plan"))
def plan(state: PipelineState, options: RunOptions) -> PipelineState:
    """Decide which tensor is quantized to which integers.

    Raises:
        RecipeError: the recipe asks for something that does not exist.
    """
    prepared = state.prepared
    graph, recipe = prepared.graph, prepared.recipe
    if recipe.mode == "weight_only" and prepared.backend.files.integer_operators:
        tied = [Fired("tie_tables", name) for name in tie_tables(graph)]
        prepared = replace(prepared, applied=(*prepared.applied, *tied))
    if prepared.backend.placement.quantizes_masks and recipe.mode == "static":
        bounded = [Fired("bound_mask", name) for name in bound_masks(graph)]
        prepared = replace(prepared, applied=(*prepared.applied, *bounded))
    edit.sort(graph)
    planned = make(graph, recipe, prepared.backend, observers=frozenset(OBSERVERS), overrides=state.overrides)
    _note_half_precision(graph, planned, prepared.backend)
    refusals = list(planned.refusals)
    search = "AUTO" if recipe.auto.enable else "MIXED" if recipe.mixed.wanted else "TUNE" if recipe.tune.wanted else ""
    if search:
        why = Reason(
            "not-searched",
            "only sbonnx.quantize and the verb quantize try recipes: this is the one that they begin with",
        )
        refusals.insert(0, Refusal("search", search, why))
    if recipe.sparse.wanted and state.request.pruned is None:
        why = Reason(
            "not-pruned", "nothing is pruned without a run on data: this is the plan of the model as it was given"
        )
        refusals.insert(0, Refusal("prune", "SPARSE", why))
    state = replace(state, prepared=replace(prepared, plan=planned))
    return _extended(state, (), refusals)


def needed_opset(prepared: Prepared) -> int:
    """Return the opset that the plan needs: 21 for 4-bit and 16-bit integers, 19 for scales in half precision.

    Raises:
        ModelError: the parser of the runtime does not read that opset, or that of the file.
    """
    tensors = query.tensors_by_name(prepared.graph)
    sites = [site for site in prepared.plan.sites if site.role != "bias"]
    half = any(query.dtype(tensors[site.tensor]) == np.dtype(np.float16) for site in sites)
    half = half or (prepared.plan.float_type != "fp32" and bool(sites))
    pairs = qdq.opset_needed([(site.role, site.spec) for site in sites], half=half)
    needed = max(BASE_OPSET, precision.OPSET[prepared.plan.float_type], pairs)
    info = prepared.graph.info
    prepared.backend.files.check_opset(str(info.path or "the model"), info.original_opset, needed=needed)
    return needed


def _applied(state: PipelineState, chosen: Any) -> PipelineState:
    done = patterns.apply(state.prepared.graph, tuple(chosen))
    return _extended(state, done.fired, done.refusals)


def _extended(state: PipelineState, fired: Iterable[Fired], refusals: Iterable[Refusal]) -> PipelineState:
    prepared = state.prepared
    return replace(
        state,
        prepared=replace(prepared, applied=(*prepared.applied, *fired), refusals=(*prepared.refusals, *refusals)),
    )


def _note_half_precision(graph: Graph, plan: Plan, backend: Backend) -> None:
    """Add a note that float16 has no integer kernels on onnxruntime's CPU, so that Q/DQ gain nothing there."""
    if not backend.numbers.any_bits:
        return  # onnxruntime's backend leaves float16 alone, and TensorRT computes it
    tensors = query.tensors_by_name(graph)
    half = plan.float_type == "fp16" and bool(plan.sites)
    if half or any(query.dtype(tensors[site.tensor]) == np.dtype(np.float16) for site in plan.sites):
        graph.info.notes.append(
            Note(
                "float16-model",
                "float16 behind Q/DQ: onnxruntime's CPU has no integer kernels for it and computes the codes of "
                "biases in half precision, which can lose them; quantize the float32 model",
            )
        )
