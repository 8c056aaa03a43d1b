"""The whole program: the stages from a float model to a verified quantized file, in order.

Each stage is one function ``(state, options) -> state`` that declares what it needs and what it sets. `quantize` runs
them all; planning, pruning, searches, QAT and `QuantModel` run a part of them. docs/architecture.md describes the
stages in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

from sbonnx.backends import Backend, backend_for
from sbonnx.calib.held_out import HeldOutSplit
from sbonnx.graph import Graph
from sbonnx.options import RunOptions
from sbonnx.planning import Solution
from sbonnx.progress import Progress
from sbonnx.recipe import Recipe
from sbonnx.report import Report
from sbonnx.report.pruned import PruningReport
from sbonnx.report.simplified import SimplifyReport
from sbonnx.stages.channel_pruning import (
    fuse_before_pruning,
    measure_for_pruning,
    prune,
    read_pruning_data,
    save_pruned,
)
from sbonnx.stages.contract import S, Stage, stage
from sbonnx.stages.measure import (
    bind_data,
    calibrate,
    choose_accuracy_levels,
    correct_biases,
    equalize_activations,
    measure_magnitudes,
    protect_heads,
    read_data,
    reconstruct,
    tune_batchnorms,
    wide_activations,
)
from sbonnx.stages.prepare import (
    add_biases,
    equalize_weights,
    fuse,
    load,
    needed_opset,
    plan,
    record_norms,
    resolve,
    simplify,
)
from sbonnx.stages.simplification import save_simplified
from sbonnx.stages.state import ABSENT, PipelineState, Prepared, PrunedModel, PruneOptions, Request, Source, run_options
from sbonnx.stages.write import (
    check_targets,
    convert_float,
    convert_format,
    insert,
    legalise,
    save,
    write_calibration_cache,
    write_overrides,
)

PLAN: Final[tuple[Stage, ...]] = (
    load,  # file → graph
    resolve,  # recipe → settings of the layers of this file; a quantized file → float
    simplify,  # patterns that shorten the graph
    record_norms,  # for corrections by their statistics
    fuse,  # patterns that fold batch norms and join operators
    add_biases,
    equalize_weights,  # cross-layer equalization, bias absorption
    plan,  # graph, recipe, backend → which tensor gets which integers
)
"""From a file to a graph with a plan, at the opset of the file."""


@stage(needs=("graph", "plan"), sets=("graph", "plan"))
def raise_opset(state: PipelineState, options: RunOptions) -> PipelineState:
    """Prepare the model again at a newer opset if the integer types of the plan need one.

    Raises:
        ModelError: the parser of the runtime does not read that opset.
    """
    needed = needed_opset(state.prepared)
    if state.prepared.graph.opset >= needed:
        return state
    return run(PLAN, replace(state, opset=needed), options)


SIMPLIFY: Final[tuple[Stage, ...]] = (check_targets, load, simplify, fuse, save_simplified)
"""From a file to an equal one with fewer nodes."""

PREPARE_PRUNING: Final[tuple[Stage, ...]] = (load, resolve, simplify, fuse_before_pruning)
"""From a file to a graph whose channels can be removed. No data is read."""

MEASURE_PRUNING: Final[tuple[Stage, ...]] = (*PREPARE_PRUNING, read_pruning_data, measure_for_pruning)
"""From a file and samples to the measurements that several budgets share."""

PRUNE: Final[tuple[Stage, ...]] = (
    *PREPARE_PRUNING,
    read_pruning_data,
    prune,  # groups of channels and their order, sensitivities, removal, refit, fine-tuning
    save_pruned,  # and verify
)
"""From a request to a pruned float model and its report."""


@stage()
def prune_first(state: PipelineState, options: RunOptions) -> PipelineState:
    """Prune the model if the recipe has SPARSE: the following stages read the pruned model, unless there is one.

    Raises:
        RecipeError: SPARSE has no goal, or several.
    """
    recipe = state.request.recipe
    if recipe.sparse.problem is not None:
        raise recipe.origin.error(recipe.sparse.problem)
    if not recipe.sparse.wanted or state.request.pruned is not None:
        return state
    return run(PRUNE, state, options)


PREPARE: Final[tuple[Stage, ...]] = (*PLAN, raise_opset)
"""From a file to a graph with a plan. No data is read."""

SCALES: Final[tuple[Stage, ...]] = (
    equalize_activations,  # SmoothQuant, outlier splitting, AWQ
    calibrate,  # ranges of activations in the float network
    reconstruct,  # ranges → scales; weights → integers, layer by layer or block by block
    protect_heads,  # regions of detectors that are worth their time in float
)
"""From a plan and data to scales, zero points and quantized weights."""


@stage(needs=("graph", "plan", "data", "solution"), sets=("graph", "plan", "ranges", "solution"))
def widen_activations(state: PipelineState, options: RunOptions) -> PipelineState:
    """Plan and solve again with a few activations in 16 bits, if the outputs would be lost without (WIDE_ACTIVATIONS).

    Raises: as the stages of `PREPARE` and `SCALES`.
    """
    chosen = wide_activations(state)
    if chosen is None:
        return state
    again = replace(state, overrides=chosen.overrides, ranges=None, solution=ABSENT)
    again = run((*PREPARE, bind_data, *SCALES), again, options)
    return replace(again, solution=replace(again.solution, notes=(*again.solution.notes, chosen.note)))


MEASURE: Final[tuple[Stage, ...]] = (
    *SCALES,
    widen_activations,  # 16 bits for the few that would lose the outputs
    measure_magnitudes,  # for half precision
    correct_biases,  # analytically, by batch-norm statistics
    tune_batchnorms,  # statistics of the quantized network
)
"""From a plan and data to a solution: scales, zero points, quantized weights."""

INSERT: Final[tuple[Stage, ...]] = (
    insert,  # Q/DQ pairs into a copy of the graph
    convert_float,  # the remaining float part to half precision
    legalise,  # the form that the runtime's kernels accept
    convert_format,  # QOperator, dynamic or weight-only operators in place of Q/DQ
)
"""From a solution to the quantized graph."""

SOLVE: Final[tuple[Stage, ...]] = (
    prune_first,  # SPARSE: a smaller float model takes the place of the original
    *PREPARE,
    read_data,
    *MEASURE,
)
"""From a request to a solution."""

WRITE: Final[tuple[Stage, ...]] = (
    *INSERT,
    save,  # and verify, before the file is moved to its place
)
"""From a solution to a verified file and its report."""

STAGES: Final[tuple[Stage, ...]] = (
    check_targets,
    *SOLVE,
    choose_accuracy_levels,  # of block-wise products, by the data
    write_calibration_cache,
    write_overrides,
    *WRITE,
)
"""From a request to a verified file and its report."""


def run(stages: Iterable[Stage], state: S, options: RunOptions) -> S:
    """Run stages in order.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix.
    """
    for step in stages:
        state = step(state, options)
    return state


def quantize(request: Request, progress: Progress | None = None) -> PipelineState:
    """Quantize a model with a fixed recipe (no search), write it and verify it. The state has the report.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial file is left.
    """
    options = run_options(request.recipe, progress)
    with closing(options.progress):
        return run(STAGES, PipelineState.of(request), options)


def pruned(request: Request, progress: Progress | None = None) -> Request:
    """Return the request with the pruned model if its recipe has SPARSE, else the request.

    Raises:
        SbonnxError: a subclass; see `sbonnx.prune`.
    """
    return prune_first(PipelineState.of(request), run_options(request.recipe, progress)).request


def prepare_pruning(model: Source, recipe: Recipe) -> PipelineState:
    """Load, simplify and fuse a model to prune. The state has its graph, and the recipe resolved for it.

    Raises:
        ModelError: the file cannot be used, or is quantized.
        RecipeError: a pattern of the recipe matches nothing.
    """
    backend = backend_for(recipe.backend, recipe.version)
    request = Request(model, recipe, backend, pruning=PruneOptions())
    return run(PREPARE_PRUNING, PipelineState.of(request), run_options(recipe))


def simplify_only(request: Request, progress: Progress | None = None) -> SimplifyReport:
    """Simplify and fuse a model, write it and verify it.

    Raises:
        SbonnxError: a subclass; see `sbonnx.simplify`.
    """
    simplified = run(SIMPLIFY, PipelineState.of(request), run_options(request.recipe, progress)).simplified
    assert simplified is not None
    return simplified


def prune_only(request: Request, progress: Progress | None = None) -> PruningReport:
    """Prune a model, write it and verify it.

    Raises:
        SbonnxError: a subclass; see `sbonnx.prune`.
    """
    options = run_options(request.recipe, progress)
    pruned = run((check_targets, *PRUNE), PipelineState.of(request), options).request.pruned
    assert pruned is not None
    return pruned.report


def measure_pruning(request: Request, progress: Progress | None = None) -> None:
    """Measure what `prune_first` reads from the cache of the recipe, if pruning measures anything.

    Raises:
        SbonnxError: a subclass; see `sbonnx.prune`.
    """
    run(MEASURE_PRUNING, PipelineState.of(request), run_options(request.recipe, progress))


def prepare(
    model: Source,
    recipe: Recipe,
    backend: Backend,
    *,
    fusions: Sequence[str] | None = None,
    pruned: PrunedModel | None = None,
) -> Prepared:
    """Load `model`, simplify and fuse it, and plan. The file is not modified.

    Args:
        fusions: names of the patterns of `sbonnx.patterns.FUSE` to apply, or prefixes of them; None: all.
        pruned: the model in place of `model`.

    Raises:
        ModelError: the file cannot be used, is quantized already, or is newer than the runtime reads.
        RecipeError: a pattern of the recipe matches nothing, or asks for something that does not exist.
    """
    return run(
        PREPARE, PipelineState.of(Request(model, recipe, backend, fusions=fusions, pruned=pruned)), RunOptions()
    ).prepared


def solve(request: Request, progress: Progress | None = None) -> PipelineState:
    """Run the stages up to the solution; nothing is written.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix.
    """
    options = run_options(request.recipe, progress)
    with closing(options.progress):
        return run(SOLVE, PipelineState.of(request), options)


def quantized_graph(prepared: Prepared, solution: Solution) -> Graph:
    """Return the quantized graph of a solution, as it is written to a file."""
    request = Request("", prepared.recipe, prepared.backend)
    return run(INSERT, PipelineState(request, prepared, solution=solution), RunOptions()).quantized


def write(request: Request, prepared: Prepared, solution: Solution, samples: HeldOutSplit | None) -> Report:
    """Write and verify a solution that is known, such as a trained one.

    Args:
        request: the float model to compare with, and the output.
        prepared, solution: of one calibration.
        samples: feeds to compare on; None: the file is only checked and opened.

    Raises:
        SbonnxError: a subclass. No partial file is left.
    """
    state = PipelineState(request, prepared, solution=solution, data=samples)
    return run(WRITE, state, RunOptions()).report
