"""Stages that run data: equalize by activations, calibrate, reconstruct weights, correct biases, tune batch norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import log10
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.calib import calibrator
from sbonnx.calib.cache.sketch_cache import PRUNING
from sbonnx.calib.calibrator import MeasuredRanges
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.held_out import HeldOutSplit, divide, divide_sequences
from sbonnx.calib.input_check import check_inputs, constant_data
from sbonnx.calib.observers import OBSERVERS
from sbonnx.calib.qparams.solve import united, weights_alone
from sbonnx.calib.recurrent import read_steps, unroll
from sbonnx.correct.analytic import correct_analytically
from sbonnx.correct.batchnorm_tuning import tune_norms
from sbonnx.equalize import channel_ranges, equalize_measured, wanted_ranges
from sbonnx.equalize.awq import scale_by_activations
from sbonnx.errors import DataError, ModelError
from sbonnx.graph import Graph
from sbonnx.graph.digests import outputs_digest
from sbonnx.graph.extract import copy
from sbonnx.graph.storage.model_file import open_model
from sbonnx.heads import Quantized, protect, protect_layers
from sbonnx.heads.losses import Values
from sbonnx.heads.protect import SAMPLES as HEAD_SAMPLES
from sbonnx.options import RunOptions
from sbonnx.patterns.simplify.infer import infer_shapes
from sbonnx.planning import Plan, Planner, Solution, costs_of, make, plan_times
from sbonnx.precision.kernel_levels import with_accuracy_levels
from sbonnx.precision.tensor_magnitudes import float_observer, magnitudes, measured_magnitudes
from sbonnx.precision.wide_activations import WideActivations, choose_wide
from sbonnx.recipe.names import FULL_BITS
from sbonnx.reconstruct.solution import reconstruct as solved
from sbonnx.report import Fired, Note, Reason, Refusal
from sbonnx.report.comparison import Comparison
from sbonnx.report.verdict import verdict_of
from sbonnx.spec import Bounds
from sbonnx.stages.contract import stage
from sbonnx.stages.state import (
    PipelineState,
    Prepared,
    equalization_of,
    reconstruction_of,
    round_by_site,
    rounding_of,
)
from sbonnx.stages.verify import check_outputs
from sbonnx.verify.quality import QualitySamples

UNSEEN: Final = Note(
    "rounding-without-data",
    "no data was given: weights are rounded to nearest, without second moments of their inputs",
)
"""Note if input-aware rounding has no data: weights are rounded to nearest."""


NARROWER: Final = 1.5
"""Factor by which a range must become narrower for scales to be solved again after heads are protected: 3.5 dB."""


@stage(needs=("graph", "plan"), sets=("data",))
def read_data(state: PipelineState, options: RunOptions) -> PipelineState:
    """Read the calibration feeds and split off the hold-out set.

    Raises:
        DataError: see `divided`; or the data is constant.
        RecipeError: see `check_outputs`.
    """
    prepared = state.prepared
    check_outputs(prepared, state.request.data)
    data = divided(state.request.data, prepared, state.request.split, options)
    doubts: tuple[Note, ...] = ()
    if data is not None:
        constant = constant_data(data.every)
        if constant:
            raise DataError(constant)
        if prepared.first_layer is not None:
            doubts = check_inputs(prepared.first_layer, data.every)
        if prepared.recipe.heads != "none" and prepared.recipe.mode == "static":
            data = replace(data, fit=replace(data.fit, kept=HEAD_SAMPLES))  # for `protect_heads`
    prepared.graph.info.notes.extend(doubts)
    # what is kept, such as in a module for training, has no second graph
    return replace(state, data=data, doubts=doubts, prepared=replace(prepared, first_layer=None))


@stage(needs=("graph", "data"), sets=("data",))
def bind_data(state: PipelineState, options: RunOptions) -> PipelineState:
    """Bind the samples that were read to a graph that was prepared again."""
    if state.data is None:
        return state
    return replace(state, data=divided(state.data, state.prepared, None, options))


def divided(
    data: Any, prepared: Prepared, split: int | None, options: RunOptions, share: float | None = None
) -> HeldOutSplit | None:
    """Read the calibration feeds and split off the hold-out set; a recurrent model is unrolled. None if not needed.

    Args:
        data: any reader of `sbonnx.calib.data.dataset.read`, or a split, which is returned.
        split: cut arrays with a long leading axis into batches of this many samples.
        options: of the runs of the samples.
        share: of the samples, to hold out; None: VERIFY.HELD_OUT if anything is measured.

    Raises:
        DataError: there is no data and the recipe measures something.
    """
    recipe, calibration, graph = prepared.recipe, prepared.recipe.calibration, prepared.graph
    if isinstance(data, HeldOutSplit):
        return replace(data, fit=Samples.of(data.fit.data, graph, options))
    if data is None:
        if prepared.needs_data:
            why = "HIGH_PRECISION wants ranges" if recipe.mode != "static" else "MODE: static measures activations"
            raise DataError(f"calibration data is missing: {why}. Give some; MODE: weight_only at fp32 needs none")
        return None
    if share is None:
        rounds = reconstruction_of(prepared) is not None
        measures = prepared.needs_data or rounds or recipe.equalize.awq or recipe.sparse.wanted
        share = recipe.verify.held_out if measures else 0.0
    limit, pick, seed = recipe.samples, calibration.pick, calibration.seed
    if not calibration.feedback:
        feeds = datasets.read(data, graph, split=split, limit=limit, pick=pick, seed=seed)
        graph.info.notes.extend(feeds.notes)
        return divide(Samples.of(feeds, graph, options), share)
    first = limit if pick == "first" else None
    steps = read_steps(data, graph, calibration.feedback, split=split, limit=first)

    def unrolled(some: Any, part: float) -> datasets.Dataset:
        # random picking comes after the states were computed through all steps
        count = first if limit is None or first is not None else max(1, round(limit * part))
        return unroll(some, graph, calibration.feedback, device=recipe.device, limit=count, pick=pick, seed=seed)

    return divide_sequences(Samples.of(steps, graph, options), calibration.feedback.values(), share, unrolled)


def equalizes_by_data(prepared: Prepared) -> bool:
    """Return whether `equalize_activations` changes the graph: statistics of the prepared one then do not fit it."""
    return prepared.recipe.equalize.awq or _equalizes_ranges(prepared)


def _equalizes_ranges(prepared: Prepared) -> bool:
    settings = equalization_of(prepared.recipe)
    if settings.only_after_norms and not settings.absorb_bias:
        return bool(wanted_ranges(prepared.graph, settings))
    return settings.needs_ranges


@stage(needs=("graph", "plan", "data"), sets=("graph", "plan"))
def equalize_activations(state: PipelineState, options: RunOptions) -> PipelineState:
    """Equalize by measured activations, in place, and plan the changed graph again.

    Raises: as `channel_ranges` and `scale_by_activations`.
    """
    prepared = state.prepared
    settings = equalization_of(prepared.recipe)
    if prepared.measured:
        return state
    if not settings.needs_ranges:
        return _scale_by_activations(state, options)
    if state.data is None and settings.only_after_norms and not settings.absorb_bias:
        return _scale_by_activations(state, options)
    if state.data is None:
        return state.refused(
            Refusal("equalize", "EQUALIZE", Reason("no-data", "there are no data to measure the ranges of channels on"))
        )
    if not _equalizes_ranges(prepared):
        return _scale_by_activations(state, options)
    graph = prepared.graph
    ranges = channel_ranges(graph, wanted_ranges(graph, settings), state.data.fit)
    done = equalize_measured(graph, settings, ranges)
    observers = frozenset(OBSERVERS)
    plan = make(graph, prepared.recipe, prepared.backend, observers=observers, overrides=state.overrides)
    kept = [refusal for refusal in prepared.refusals if refusal not in prepared.plan.refusals]
    prepared = replace(
        prepared,
        measured=True,
        plan=plan,
        applied=(*prepared.applied, *done.fired),
        refusals=(*kept, *done.refusals, *plan.refusals),
    )
    return _scale_by_activations(replace(state, prepared=prepared, ranges=None), options)


def _scale_by_activations(state: PipelineState, options: RunOptions) -> PipelineState:
    """Scale the inputs of matrix products before their weights are rounded (EQUALIZE.AWQ), in place."""
    prepared = state.prepared
    if not prepared.recipe.equalize.awq:
        return state
    if state.data is None:
        return state.refused(
            Refusal("scale by activations", "EQUALIZE.AWQ", Reason("no-data", "input activations are measured on data"))
        )
    done, refusals = scale_by_activations(prepared.graph, prepared.plan, state.data.fit)
    fired = [Fired("awq_mul" if product.multiplied else "awq", product.tensor) for product in done]
    if done:
        shares = [product.share for product in done]
        text = Note(
            "products-scaled",
            f"products scaled by inputs: output errors {min(shares):.0%} to {max(shares):.0%} of before",
        )
        prepared.graph.info.notes.append(text)
    prepared = replace(
        prepared,
        measured=True,
        applied=(*prepared.applied, *fired),
        refusals=(*prepared.refusals, *refusals),
    )
    return replace(state, prepared=prepared, ranges=None)


@stage(needs=("graph", "plan", "data"), sets=("ranges",))
def calibrate(state: PipelineState, options: RunOptions) -> PipelineState:
    """Measure the ranges of activations, unless they were measured already or nothing needs data."""
    prepared, data = state.prepared, state.data
    reconstruction = reconstruction_of(prepared)
    if state.ranges is not None or data is None or not (prepared.needs_data or reconstruction is not None):
        return state
    if not prepared.plan.of_role("activation") and reconstruction is not None:
        return replace(state, ranges=MeasuredRanges({}))
    graph, plan, samples = prepared.graph, prepared.plan, _with_own_cache(state, data.fit)
    if plan.float_type == "fp32":
        return replace(state, ranges=calibrator.calibrate(graph, plan, samples))
    with float_observer(graph, samples) as floats:
        ranges = calibrator.calibrate(graph, plan, samples, floats)
        return replace(state, ranges=ranges, magnitudes=measured_magnitudes(floats))


def _with_own_cache(state: PipelineState, samples: Samples) -> Samples:
    """Return the samples with a folder inside the cache for a pruned model: each budget makes another model."""
    options = samples.options
    if options.cache is None or state.request.pruned is None:
        return samples
    inside = Path(options.cache) / PRUNING
    inside.mkdir(parents=True, exist_ok=True)
    return replace(samples, options=replace(options, cache=inside / outputs_digest(state.prepared.graph)))


@stage(needs=("graph", "plan", "data", "ranges"), sets=("solution",))
def reconstruct(state: PipelineState, options: RunOptions) -> PipelineState:
    """Round the weights, with the input activations of their layers where the recipe says so."""
    prepared = state.prepared
    rounding = state.rounding or rounding_of(prepared)
    if state.ranges is None or state.data is None:
        solution = weights_alone(prepared.graph, prepared.plan, round_by_site)
        if rounding.reconstruction is not None:
            solution = replace(solution, notes=(*solution.notes, UNSEEN))
    else:
        samples = _with_own_cache(state, state.data.fit)
        solution = solved(prepared.graph, prepared.plan, samples, state.ranges, rounding)
    return replace(state, solution=solution)


@stage(needs=("graph", "plan", "data", "solution"), sets=("plan", "solution"))
def protect_heads(state: PipelineState, options: RunOptions) -> PipelineState:
    """Leave regions in float whose quantization costs more at the outputs than it saves (HEADS: auto).

    Regions of detectors, and the costliest layers of other networks whose outputs are lost by the rule of the verdict.
    Scales are solved again if tensors that are float now widened the range of others.
    """
    prepared, data = state.prepared, state.data
    recipe, backend, graph = prepared.recipe, prepared.backend, prepared.graph
    if recipe.heads == "none" or recipe.mode != "static" or data is None or backend.numbers.any_bits:
        return state
    if recipe.float_nodes is not None:
        return state  # what stays float was measured

    costs = costs_of(recipe, backend)
    costs = None if costs is None else costs.slowed(costs.margin)
    time_of = plan_times(graph, costs)
    replan = Planner(graph, recipe, backend, observers=frozenset(OBSERVERS), overrides=state.overrides).plan
    network = Quantized(prepared.plan, state.solution)

    def solve(plan: Plan) -> Solution:
        return reconstruct(_with_plan(state, plan), options).solution

    def times_of(feed: Values) -> Callable[[Plan], Sequence[float]]:
        """Two estimates: the table has no convolutions along one axis, and no recurrent layers."""
        shaped = _with_shapes(graph, feed)
        estimates = [plan_times(shaped, table) for table in (costs, None)]
        floats = [(estimate, time) for estimate in estimates if (time := estimate(Plan(()))) > 0]
        return lambda plan: [estimate(plan) / time for estimate, time in floats]

    try:
        done = protect(graph, network, data.fit, replan, time_of)
        repaired = recipe.bias_correction == "analytic" or recipe.schedule.bn_tuning  # by the stages that follow
        bits = {recipe.w.quantizer.bit, recipe.a.quantizer.bit}
        if done is None and bits == {FULL_BITS} and not repaired:
            done = protect_layers(graph, network, data.fit, replan, times_of, solve, partial(_missing_db, state))
    except ModelError as error:  # a part of the network does not run alone: it stays as planned
        return state.refused(Refusal("measure the head", "HEADS", Reason("head-not-alone", str(error))))
    if done is None:
        return state
    ranges, state = state.ranges, replace(_with_plan(state, done.plan), solution=done.solution)
    if ranges is not None and _narrows(ranges, network.plan, done.plan):
        state = reconstruct(state, options)
    return replace(state, solution=replace(state.solution, notes=(*state.solution.notes, done.note)))


def _with_shapes(graph: Graph, feed: Values) -> Graph:
    """Return a copy of a graph with the shapes of a sample in place of symbolic ones."""
    copied = copy(graph)
    for tensor in copied.inputs:
        tensor.shape = feed[tensor.name].shape if tensor.name in feed else tensor.shape
    infer_shapes(copied)
    return copied


def _with_plan(state: PipelineState, plan: Plan) -> PipelineState:
    """Return the state with another plan of the same graph, and the measured ranges grouped by it."""
    prepared = state.prepared
    others = [refusal for refusal in prepared.refusals if refusal not in prepared.plan.refusals]
    groups = {site.key: site.group for site in plan.of_role("activation")}
    ranges = None if state.ranges is None else replace(state.ranges, groups=groups)
    return replace(state, prepared=replace(prepared, plan=plan, refusals=(*others, *plan.refusals)), ranges=ranges)


def _missing_db(state: PipelineState, floats: Sequence[Values], quantized: Sequence[Values]) -> float:
    """Return by how many dB outputs miss the limit of their relative error; 0 if a verdict on them asks for nothing."""
    names, task = tuple(floats[0]), state.prepared.recipe.verify.task
    tasks = {name: task[name] for name in names if name in task} if isinstance(task, Mapping) else task
    samples = QualitySamples(names, open_model(state.request.source).model, tasks)
    for reference, values in zip(floats, quantized, strict=True):
        samples.add([reference[name] for name in names], [values[name] for name in names], values)
    quality = samples.result()
    if not verdict_of(Comparison(quality=quality, feeds=len(floats))).repairable:
        return 0.0
    errors = (figure for row in quality if row.state != "unjudged" and (figure := row.figure("relative error")))
    return max((20 * log10(error.value / error.kept) for error in errors if error.value and error.kept), default=0.0)


def _narrows(ranges: MeasuredRanges, before: Plan, after: Plan) -> bool:
    """Whether a range becomes narrower by `NARROWER` because others that shared its scale are float now."""
    old, new = (united(plan.of_role("activation"), ranges.bounds, {}) for plan in (before, after))
    widths = [(_width(bounds), _width(old[key])) for key, bounds in new.items() if key in old]
    return any(NARROWER * narrow < wide for narrow, wide in widths)


def _width(bounds: Bounds) -> float:
    return float(np.max(bounds.hi - bounds.lo))


def wide_activations(state: PipelineState) -> WideActivations | None:
    """Choose the activations that get 16 bits because the outputs would be lost; None if nothing is to be changed.

    The backend has operators for both widths, the recipe asks for 8 bits and for no types of single tensors, and the
    choice was not made before.
    """
    prepared, data = state.prepared, state.data
    recipe, wide = prepared.recipe, prepared.backend.numbers.wide
    activations = recipe.a.quantizer
    if wide is None or data is None or recipe.mode != "static" or not recipe.wide_activations or state.overrides:
        return None
    if recipe.tensor_overrides is not None or activations.disable or activations.bit != FULL_BITS:
        return None
    return choose_wide(
        prepared.graph, prepared.plan, state.solution, data.fit, wide=wide, share=recipe.wide_activations
    )


@stage(needs=("graph", "plan", "data", "solution"), sets=("solution",))
def measure_magnitudes(state: PipelineState, options: RunOptions) -> PipelineState:
    """Measure the magnitudes of float tensors for half precision, unless `calibrate` did in its pass over the data."""
    prepared, seen = state.prepared, state.magnitudes
    if prepared.plan.float_type == "fp32" or state.data is None:
        return state
    if seen is None:
        seen = magnitudes(prepared.graph, state.data.fit)
    return replace(state, solution=replace(state.solution, magnitudes=seen))


@stage(needs=("graph", "plan", "data", "solution"), sets=("solution",))
def choose_accuracy_levels(state: PipelineState, options: RunOptions) -> PipelineState:
    """Choose the accuracy level of each block-wise product by its errors on the data (ACCURACY_LEVEL: auto)."""
    prepared, recipe = state.prepared, state.prepared.recipe
    blockwise = recipe.mode == "weight_only" and prepared.backend.files.integer_operators
    if recipe.accuracy_level != "auto" or not blockwise or state.data is None:
        return state
    solution = with_accuracy_levels(state.solution, prepared.graph, prepared.plan, state.data.fit)
    return replace(state, solution=solution)


@stage(needs=("graph", "plan", "solution"), sets=("solution",))
def correct_biases(state: PipelineState, options: RunOptions) -> PipelineState:
    """Correct biases by batch-norm statistics if the recipe asks for it (by measured errors: see `reconstruct`)."""
    prepared = state.prepared
    if prepared.recipe.bias_correction != "analytic":
        return state
    return replace(state, solution=correct_analytically(prepared.graph, prepared.plan, state.solution))


@stage(needs=("graph", "plan", "data", "solution"), sets=("solution",))
def tune_batchnorms(state: PipelineState, options: RunOptions) -> PipelineState:
    """Re-estimate batch-norm statistics in the quantized network if the recipe asks for it."""
    prepared, solution = state.prepared, state.solution
    if not prepared.recipe.schedule.bn_tuning:
        return state
    if state.data is None:
        refusal = Refusal(
            "tune batch norms", "SCHEDULE.BN_TUNING", Reason("no-data", "there are no data to measure their inputs on")
        )
        return replace(state, solution=replace(solution, refusals=(*solution.refusals, refusal)))
    tuned = tune_norms(prepared.graph, prepared.plan, solution, state.data.fit)
    return replace(state, solution=tuned)
