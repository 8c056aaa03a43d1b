"""Stages of pruning: from a float graph and samples to a smaller float model and its report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

import onnx

from sbonnx import graph as graphs
from sbonnx import patterns
from sbonnx import verify as proof
from sbonnx.backends.mode_limits import STATIC
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.held_out import divide
from sbonnx.graph import Graph, edit, query
from sbonnx.metrics.pairs import run_pairs
from sbonnx.options import RunOptions
from sbonnx.pruning.graph_pruning import Pruned, measure_graph, prune_graph
from sbonnx.pruning.result import report_of
from sbonnx.pruning.settings import Pruning, pruning_of
from sbonnx.report.codes import Problem
from sbonnx.report.comparison import Comparison
from sbonnx.stages.contract import stage
from sbonnx.stages.measure import divided
from sbonnx.stages.prepare import BATCH_NORM
from sbonnx.stages.state import PipelineState, PrunedModel
from sbonnx.stages.verify import check_outputs, limits_of
from sbonnx.stages.write import placed

HELD_OUT: Final = 0.1
"""Share of the samples on which the file is verified, and which pruning does not see."""

HELD_OUT_FOR_LOSS: Final = 0.25
"""Share of the samples with MAX_LOSS, on which trial networks are evaluated as well."""

SAME: Final = 1e-4
"""Difference of the removed from the masked network, relative to the largest output, that sums of other length make.

It is 1e-6 on trained networks; a wrong slice makes 1e-2 and more.
"""

PROVED_ON: Final = 4
"""Feeds on which removed and masked network are compared."""


@stage(needs=("graph",), sets=("graph",))
def fuse_before_pruning(state: PipelineState, options: RunOptions) -> PipelineState:
    """Apply the fusing patterns, in place. Batch norms stay if SPARSE.FUSE_BN is false."""
    graph, folds = state.prepared.graph, state.prepared.recipe.sparse.fuse_bn
    patterns.apply(graph, [pattern for pattern in patterns.FUSE if folds or not pattern.name.startswith(BATCH_NORM)])
    edit.sort(graph)
    return state


@stage(needs=("graph",), sets=("data",))
def read_pruning_data(state: PipelineState, options: RunOptions) -> PipelineState:
    """Read the samples, if there are any, and split off those that the pruned network is judged on.

    Before a quantization they are those that the quantized file is judged on. MAX_LOSS is judged on others, which
    neither pruning nor that verification sees.

    Raises:
        DataError: see `divided`.
        RecipeError: see `check_outputs` and `pruning_of`.
    """
    request, prepared = state.request, state.prepared
    check_outputs(prepared, request.data)
    _settings(state)  # what is wrong is said before data is read
    if request.data is None:
        return state
    share = HELD_OUT if prepared.recipe.sparse.max_loss is None else HELD_OUT_FOR_LOSS
    if request.pruning is not None:
        return replace(state, data=divided(request.data, prepared, request.split, options, share))
    data = divided(request.data, prepared, request.split, options, prepared.recipe.verify.held_out)
    if data is not None and prepared.recipe.sparse.max_loss is not None:
        data = divide(data.fit, share)
    return replace(state, data=data)


@stage(needs=("graph", "data"))
def measure_for_pruning(state: PipelineState, options: RunOptions) -> PipelineState:
    """Measure what `prune` reads from the cache of the recipe: it is the same for budgets of different size."""
    if state.data is not None and state.prepared.recipe.sparse.max_loss is None:
        measure_graph(state.prepared.graph, state.data.fit, _settings(state))
    return state


@stage(needs=("graph", "data"), sets=("removed",))
def prune(state: PipelineState, options: RunOptions) -> PipelineState:
    """Choose and remove channels, and refit the remaining weights.

    Raises:
        SbonnxError: a subclass; see `prune_graph`.
    """
    request, settings, data = state.request, _settings(state), state.data
    if request.evaluation is not None and settings.max_loss is not None and request.pruning is not None:
        labelled = proof.LabelledLoss(request.source, request.evaluation, device=options.device)
        settings = replace(settings, labelled=labelled)
    fit, judged = (None, None) if data is None else (data.fit, data.judged)
    removed = prune_graph(state.prepared.graph, fit, settings, judged)
    for graph in (removed.graph, removed.masked):
        patterns.apply(graph, patterns.FUSE)
        edit.sort(graph)
    return replace(state, removed=removed)


@stage(needs=("graph", "data", "removed"), sets=("pruned",))
def save_pruned(state: PipelineState, options: RunOptions) -> PipelineState:
    """Save the pruned model and verify it. Before a quantization, it takes the place of the original in memory.

    Raises:
        SbonnxError: a subclass. No partial file is left.
    """
    request, graph, removed = state.request, state.prepared.graph, state.removed
    assert removed is not None and state.original is not None
    output = None if request.pruning is None else request.output
    masked = request.pruning is not None and request.pruning.masked
    with placed(output, graph.info.files, force=request.force) as path:
        graphs.save(removed.masked if masked else removed.graph, path)
        comparison, problems = _verified(state, removed, path, options)
        model: onnx.ModelProto | None = graphs.read_proto(path) if output is None else None
    labelled = None if request.pruning is None else request.evaluation
    report = report_of(
        request.label,
        None if output is None else str(Path(output)),
        removed,
        _settings(state),
        comparison,
        notes=tuple(dict.fromkeys((*graph.info.notes, *(() if labelled is None else labelled.notes(graph))))),
        problems=problems,
        pruned=model,
    )
    return replace(state, request=replace(request, pruned=PrunedModel(report, state.original)))


def _settings(state: PipelineState) -> Pruning:
    """Return the pruning settings of the recipe for the model."""
    asked, recipe = state.request.pruning, state.prepared.recipe
    if asked is None:
        return pruning_of(recipe, state.prepared.graph, integers=recipe.mode == STATIC)
    return pruning_of(recipe, state.prepared.graph, integers=asked.integers, metric=asked.metric)


def _verified(
    state: PipelineState, removed: Pruned, path: Path, options: RunOptions
) -> tuple[Comparison | None, tuple[Problem, ...]]:
    """Check the file, compare it with the original, and compare removed with masked channels."""
    request, data = state.request, state.data
    graphs.check_file(path)
    if data is None:
        return None, ()
    section = state.prepared.recipe.verify
    depth = proof.Depth(latency=True, levels=True, strict=True)
    comparison = proof.compare(
        request.source,
        path,
        data.judged,
        seen=data.seen,
        depth=depth,
        options=proof.VerifyOptions(device=options.device, task=section.task, head=section.head),
    )
    comparison = replace(comparison, held_out=data.count)
    # before a quantization, limits are those of its result
    least = None if request.pruning is None else limits_of(state.prepared.recipe).min_sqnr_db
    asked = (
        dict(least) if isinstance(least, Mapping) else dict.fromkeys((row.name for row in comparison.outputs), least)
    )
    problems = [
        Problem(
            "limit-missed", f"output '{row.name}' has {row.sqnr_db:.1f} dB signal to error, and {bound:g} are asked for"
        )
        for row in comparison.outputs
        if (bound := asked.get(row.name)) is not None and row.sqnr_db < bound
    ]
    problems += [
        Problem(
            "output-unusable",
            f"output '{row.name}' holds {row.not_finite} values that are not finite, or has another shape",
        )
        for row in comparison.outputs
        if row.lost
    ]
    worst = 0.0 if removed.masked is removed.graph else removal_error(removed, data.judged)
    if worst > SAME:
        text = (
            f"removing channels differs from masking them by {worst:.1e} of the largest output: the file computes "
            "something else than was fitted; please report this model"
        )
        problems.append(Problem("removal-differs", text))
    if request.evaluation is not None and request.pruning is not None:
        models = {"float": request.source, "pruned": path}
        comparison = replace(comparison, evaluation=proof.evaluate(models, request.evaluation, device=options.device))
    return comparison, tuple(problems)


def removal_error(removed: Pruned, data: Dataset) -> float:
    """Return the largest difference of the removed from the masked network, relative to the largest output value.

    It is inf after a total loss, see `sbonnx.metrics.ErrorSum`. Only float outputs are compared.
    """
    names = [tensor.name for tensor in removed.graph.outputs if getattr(query.dtype(tensor), "kind", "f") == "f"]
    with _runner(removed.masked) as masked, _runner(removed.graph) as small:
        (compared,) = run_pairs(masked, (small,), islice(data.items(), PROVED_ON), names)
    outputs = compared.result()
    if any(output.lost for output in outputs):
        return math.inf
    return max((output.max_abs / (max(-output.low, output.high) or 1.0) for output in outputs), default=0.0)


def _runner(graph: Graph) -> LayerRunner:
    return LayerRunner(graph, threads=1, optimisation="off", name="the pruned model")
