"""Advice for a result whose accuracy is lost or uncertain, or that gains nothing: the cheapest change, tried.

The changes against the causes of the worst layers come first. Others are ordered by what they cost the user at run
time: other numbers at the same widths, then single layers in float, then wider codes. What to widen follows from the
error of weights and of activations alone.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

from sbonnx import graph as graphs
from sbonnx import pipeline, verify
from sbonnx import recipe as recipes
from sbonnx.errors import ModelError, RecipeError, SbonnxError
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.heads import Quantized
from sbonnx.heads.losses import EndError, RegionTrials
from sbonnx.options import RunOptions
from sbonnx.recipe import Recipe
from sbonnx.report.codes import Problem
from sbonnx.report.comparison import Comparison
from sbonnx.report.figures import FigureName
from sbonnx.report.searched import Advice, Cause, ScoreFigures
from sbonnx.report.verdict import AS_LARGE, verdict_of
from sbonnx.search.actions import RecipeChange, remedies, repairs, wider
from sbonnx.search.error_sources import blame, width_of
from sbonnx.search.latency_advice import ALTERNATIVES, faster
from sbonnx.search.recipe_search import SearchResult
from sbonnx.stages.changed_recipe import simulated
from sbonnx.stages.measure import read_data
from sbonnx.stages.prepare import needed_opset
from sbonnx.stages.state import PipelineState, run_options
from sbonnx.stages.verify import PROFILE_FEEDS, limits_of, reference_of
from sbonnx.verify import Depth
from sbonnx.verify.ort_options import VerifyOptions

SECONDS: Final = 20.0
"""A trial is started while all trials together took less than this, or less than the run that is advised on."""

UNCERTAIN_SHARE: Final = 0.5
"""Share of that time within which trials start if no output is lost."""

GAIN_DB: Final = 1.0
"""Minimum gain of the worst output for advice that does not reach the line."""

SIMULATION_DB: Final = 0.5
"""Difference of the gains with the weights of the run and with those of another: a change whose simulated gain is not
that much above `GAIN_DB` is no advice. Gains of four networks differ by up to that; FastestDet's simulated gain of 1.0
is 0.4 in a run."""

LATENCY: Final = "time relative to float"
GAIN: Final = "size relative to float"


_Gain = tuple[float, RecipeChange]
"""Reduction in dB of the error of the outputs that decided about the result, and the change that it is of."""


@dataclass(frozen=True)
class _ActionTrial:
    """A change that was tried.

    Attributes:
        change: of the recipe.
        comparison: of its file with the float model, on the samples of the result.
        gain_db: reduction of the error of the outputs that decided about the result.
        repaired: whether the accuracy is kept, or not lost where it was lost.
    """

    change: RecipeChange
    comparison: Comparison
    gain_db: float
    repaired: bool

    @property
    def helps(self) -> bool:
        """Whether the change is worth advising."""
        return self.repaired or self.gain_db >= GAIN_DB


def with_advice(state: PipelineState, seconds: float) -> PipelineState:
    """Search for the cheapest change that repairs a lost or uncertain accuracy; then, for one that is not slower.

    Where none is faster, or nothing is gained at all, other forms are tried: weights alone, dynamic, half precision.

    Args:
        state: of a finished run, whose report has the causes of the worst layers.
        seconds: time that the run took.

    Returns:
        The state whose report has the advice, if there is any: the first change that repairs the result, else the best
        measured one if it gains at least `GAIN_DB`, else, of a lost output, the first that was not tried. The causes
        have the gain of their change if it was measured, alone or with the others.
    """
    before = state.comparison
    if state.data is None or before is None:
        return state
    lost = bool(problems_of(state, before))
    advice: Advice | None = None
    if lost or state.report.verdict.repairable:
        trials, gains, untried = _tried(state, before, max(SECONDS, seconds), lost=lost)
        advice = _best(before, trials, untried if lost else None)
        gains = [*((trial.gain_db, trial.change) for trial in trials), *gains]
        causes = tuple(_with_gain(cause, gains) for cause in state.report.causes)
        state = replace(state, report=replace(state.report, causes=causes))
    own = before.runtime == state.prepared.backend.name  # times in another runtime say nothing
    if advice is None and not lost and before.slower and own:
        advice = _faster(state, before)
    if advice is None and not lost and own and (before.slower or not state.report.verdict.gained):
        advice = _alternative(state, before)
    return replace(state, report=replace(state.report, advice=advice))


def _tried(
    state: PipelineState, before: Comparison, budget: float, *, lost: bool
) -> tuple[list[_ActionTrial], list[_Gain], RecipeChange | None]:
    """Measure changes until one repairs the result or the time is over.

    If no output is lost, changes are simulated, and the file of the best of them is compared with float if it gains
    enough: its weights are those of the run, which takes the time of a verification in place of that of a run.

    Args:
        budget: seconds within which trials start.
        lost: whether an output is lost. Otherwise only remedies of causes are tried, in a part of the time.

    Returns:
        The trials, the gains of simulations, and the first change that was not tried, if any.
    """
    begin, trials = time.perf_counter(), list[_ActionTrial]()
    changes = repairs(state) if lost else remedies(state.report.causes)
    budget *= 1.0 if lost else UNCERTAIN_SHARE
    simulation = None if lost or not changes else _Simulation.of(state, _deciding(before))
    gains: list[_Gain] = []
    networks: list[Quantized] = []
    for change in changes:
        recipe = _changed(state.prepared.recipe, change)
        if recipe is None:
            continue
        if not _can_try(state) or time.perf_counter() - begin > budget:
            return trials, gains, change
        best = None if simulation is None else simulation.best(recipe)
        if best is not None:
            gains.append((best[0], change))
            networks.append(best[1])
            continue
        comparison = _measured(state, recipe)
        if comparison is None:
            continue
        trials.append(_trial(state, before, change, comparison, lost=lost))
        if trials[-1].repaired:
            break
    (best_db, change), network = max(
        zip(gains, networks, strict=True), key=lambda row: row[0][0], default=((0.0, RecipeChange("", {})), None)
    )
    recipe = None if network is None or best_db < GAIN_DB + SIMULATION_DB else _changed(state.prepared.recipe, change)
    comparison = None if recipe is None or network is None else comparison_of_simulated(state, recipe, network)
    if comparison is not None:
        trials.append(_trial(state, before, change, comparison, lost=lost))
    return trials, gains, None


def _trial(
    state: PipelineState, before: Comparison, change: RecipeChange, comparison: Comparison, *, lost: bool
) -> _ActionTrial:
    """Return the trial of a change with this comparison."""
    names = _deciding(before)
    repaired = not problems_of(state, comparison)
    if not lost:  # without the labels of the result, outputs prove nothing about its metric
        repaired = repaired and before.evaluation is None and verdict_of(comparison).accuracy == "kept"
    return _ActionTrial(change, comparison, worst_db(comparison, names) - worst_db(before, names), repaired)


def _best_of(trials: Sequence[_ActionTrial]) -> _ActionTrial | None:
    return max(trials, key=lambda trial: (trial.repaired, trial.gain_db), default=None)


def _best(before: Comparison, trials: Sequence[_ActionTrial], untried: RecipeChange | None) -> Advice | None:
    """Return advice for the change that repairs the result, else for the best one, else for the one not tried."""
    best = _best_of(trials)
    if best is not None and best.helps:
        advice = _advice(before, trials, best.change, best)
        return advice if untried is None else replace(advice, untried=untried.name)
    return None if untried is None else _advice(before, trials, untried)


def _with_gain(cause: Cause, gains: Sequence[_Gain]) -> Cause:
    """Return a cause with the gain of its remedy, alone if that was measured."""
    own = [(gain_db, len(change.causes)) for gain_db, change in gains if cause in change.causes]
    if not own:
        return cause
    gain_db, together = min(own, key=lambda row: row[1])
    return replace(cause, gain_db=gain_db, together=together > 1)


def _deciding(before: Comparison) -> frozenset[str]:
    """Return the names of the outputs that are lost, else of those whose accuracy is uncertain, else of all."""
    lost = {row.name for row in before.quality if row.problem} | set(before.collapsed())
    uncertain = {row.name for row in before.quality if row.state == "uncertain"}
    return frozenset(lost or uncertain or {error.name for error in before.outputs})


def after_search(state: PipelineState, search: SearchResult) -> Advice | None:
    """Return what a search tried, the best result, and the next thing to try; None if the result is good enough.

    Nothing runs here but the errors of weights and of activations alone: the search has had its trials.
    """
    before, recipe, mixed = state.comparison, state.prepared.recipe, search.outcome
    if state.data is None or before is None or not (search.problems or problems_of(state, before)):
        return None
    rows: list[tuple[str, ScoreFigures]] = [] if search.plain is None else [("the plain recipe", search.plain)]
    rows += [(trial.what, trial.score) for trial in search.attempts if trial.score is not None]
    rows += [] if mixed is None else [(trial.what, trial.score) for trial in mixed.tried]
    tried = tuple((what, f"{score.sqnr_db:.1f} dB") for what, score in rows)
    kept = [trial.what for trial in search.attempts if trial.kept] + ([] if mixed is None else [mixed.best.what])
    best = f"the best, {' + '.join(kept) or 'the plain recipe'}, has {search.best.sqnr_db:.1f} dB on its samples"
    told = f"the search tried {', '.join(f'{what}: {figure}' for what, figure in tried)}; {best}"
    change = RecipeChange("", {})
    if mixed is None:
        weights, activations = width_of(recipe, "w"), width_of(recipe, "a")
        widened = wider(recipe, blame(state, weights, activations)[0], weights, activations)
        change = next((step for step in widened if _changed(recipe, step) is not None), change)
    elif isinstance(mixed.target, float):
        change = RecipeChange(f"raise MIXED.BUDGET.{mixed.unit.upper()}, {mixed.target:g}", {})
    elif search.plain is None and not mixed.met:
        change = RecipeChange("let the search widen inputs too: set MIXED.ACTIVATIONS", {})
    elif mixed.met:
        change = RecipeChange("ask for less loss (MIXED.MAX_LOSS), or for a signal to noise (VERIFY.MIN_SQNR_DB)", {})
    figure, (value,) = _figures(before, [before])
    return Advice(change.name, change.texts, False, False, figure, value, tried=tried, search=told)


def _faster(state: PipelineState, before: Comparison) -> Advice | None:
    """Return the first change whose file is measured not to be slower than float; None if there is none."""
    tried: list[tuple[str, str]] = []
    for change in faster(state, before):
        recipe = _changed(state.prepared.recipe, change)
        comparison = None if recipe is None or not _can_try(state) else _measured(state, recipe, latency=True)
        if comparison is None or problems_of(state, comparison):
            continue
        tried.append((change.name, comparison.latency_figure()))
        if not comparison.slower:
            figures = LATENCY, before.latency_figure(), comparison.latency_figure()
            return Advice(change.name, change.texts, True, True, *figures, tuple(tried))
    return None


def _alternative(state: PipelineState, before: Comparison) -> Advice | None:
    """Return the first other form whose file is smaller than float and not slower; None if there is none."""
    tried: list[tuple[str, str]] = []
    begin = time.perf_counter()
    for change in ALTERNATIVES:
        recipe = _changed(state.prepared.recipe, change)
        if recipe is None or not _can_try(state) or time.perf_counter() - begin > SECONDS:
            continue
        comparison = _measured(state, recipe, latency=True)
        if comparison is None or problems_of(state, comparison):
            continue
        tried.append((change.name, _gain_figure(comparison)))
        if comparison.size_ratio is not None and comparison.size_ratio < AS_LARGE[0] and not comparison.slower:
            return Advice(change.name, change.texts, True, True, GAIN, _gain_figure(before), tried[-1][1], tuple(tried))
    return None


def _gain_figure(comparison: Comparison) -> str:
    """Return size and latency relative to float, as text."""
    size = "unknown" if comparison.size_ratio is None else f"{comparison.size_ratio:.2f}"
    return f"{size}, time {comparison.latency_figure()}"


def problems_of(state: PipelineState, comparison: Comparison) -> tuple[Problem, ...]:
    """List the outputs that are lost, or below a limit; if labels prove a loss, by their figures."""
    evaluation = comparison.evaluation
    if evaluation is not None and evaluation.problems():
        comparison = replace(comparison, evaluation=None)
    return limits_of(state.prepared.recipe).below(comparison)


def _changed(recipe: Recipe, change: RecipeChange) -> Recipe | None:
    """Return the changed recipe, or None if the backend cannot run it."""
    try:
        return recipes.load(recipe, overrides=list(change.texts))
    except RecipeError:
        return None


def _can_try(state: PipelineState) -> bool:
    """Whether a trial measures what the command will: the file runs, and the data can be read again."""
    recipe, readable = state.prepared.recipe, isinstance(state.request.data, (str, os.PathLike))
    return state.prepared.plan.float_type != "bf16" and (readable or not recipe.calibration.feedback)


def _measured(state: PipelineState, recipe: Recipe, *, latency: bool = False) -> Comparison | None:
    """Quantize with a recipe as the pipeline does, and compare the file on the samples of the result.

    None if the change cannot be done on this model.
    """
    request, data = state.request, state.data
    assert data is not None
    given = request.data if isinstance(request.data, (str, os.PathLike)) else data.every
    split = request.split if given is request.data else None
    request = replace(
        request, recipe=recipe, data=given, split=split, output=None, trt_cache=None, write_overrides=None
    )
    options: RunOptions = run_options(recipe)
    stages = (*pipeline.PREPARE, read_data, *pipeline.MEASURE, *pipeline.INSERT)
    try:
        done = pipeline.run(stages, PipelineState.of(request), options)
    except SbonnxError:
        return None
    with temporary_folder() as folder:
        path = folder / "tried.onnx"
        graphs.save(done.quantized, path)
        return compared(state, done, path, latency=latency)


@dataclass(frozen=True)
class _Simulation:
    """The network of a finished run and its error at the outputs, to compare changed recipes with.

    Attributes:
        state: of the run.
        trials: runs networks with other quantization.
        error: of the run.
    """

    state: PipelineState
    trials: RegionTrials
    error: EndError

    @classmethod
    def of(cls, state: PipelineState, names: Collection[str]) -> _Simulation | None:
        """Run the network of a finished run on `PROFILE_FEEDS` samples; None if that is not possible.

        Args:
            names: outputs to judge by.
        """
        prepared, data = state.prepared, state.data
        ends = [tensor.name for tensor in prepared.graph.outputs if tensor.name in names]
        if data is None or not ends:
            return None
        feeds = list(islice(iter(data.judged), PROFILE_FEEDS))
        try:
            trials = RegionTrials(prepared.graph, ends, feeds, prepared.recipe.device)
            return cls(state, trials, trials.error(trials.run(Quantized(prepared.plan, state.solution))))
        except SbonnxError:
            return None

    def best(self, recipe: Recipe) -> tuple[float, Quantized] | None:
        """Return the network of a changed recipe with the weights of the run, and its gain in dB.

        None if only a run shows the change.
        """
        try:
            networks = [
                (self.error.gain_db(self.trials.error(self.trials.run(network))), network)
                for network in simulated(self.state, recipe)
            ]
        except SbonnxError:
            return None
        return max(networks, key=lambda row: row[0], default=None)


def comparison_of_simulated(state: PipelineState, recipe: Recipe, network: Quantized) -> Comparison | None:
    """Write the network of a changed recipe, and compare the file on the samples of the result.

    None if the graph cannot be converted to the opset that the change needs.
    """
    prepared = replace(state.prepared, recipe=recipe, plan=network.plan)
    try:
        needed = needed_opset(prepared)
        if prepared.graph.opset < needed:
            prepared = replace(prepared, graph=graphs.at_opset(prepared.graph, needed))
    except ModelError:
        return None
    with temporary_folder() as folder:
        path = folder / "tried.onnx"
        graphs.save(pipeline.quantized_graph(prepared, network.solution), path)
        return compared(state, replace(state, prepared=prepared), path)


def compared(state: PipelineState, done: PipelineState, path: Path, *, latency: bool = False) -> Comparison:
    """Compare the file of a trial with the float model, on the samples of the result.

    Args:
        state: has the float model and the samples.
        done: the trial, up to its quantized graph; `path`: its file.
    """
    data, recipe = state.data, done.prepared.recipe
    assert data is not None
    options = VerifyOptions.of(done.prepared.plan, done.prepared.backend)
    judged = replace(
        options,
        device=recipe.device,
        task=recipe.verify.task,
        head=recipe.verify.head,
    )
    depth = Depth(latency=latency, limit=recipe.verify.feeds)
    with reference_of(state) as reference:
        return verify.compare(reference, path, data.judged, timed=next(iter(data.every)), depth=depth, options=judged)


def worst_db(comparison: Comparison, names: Collection[str] | None = None) -> float:
    """Return the signal-to-noise ratio of the worst of these outputs; None: of all."""
    outputs = (error for error in comparison.outputs if names is None or error.name in names)
    return min((error.sqnr_db for error in outputs), default=-math.inf)


def _figures(before: Comparison, found: Iterable[Comparison]) -> tuple[str, list[str]]:
    """Return the name of the figure that decided that `before` is lost or uncertain, else the SQNR, and its values."""
    names = _deciding(before)
    bad = next((quality for quality in before.quality if quality.problem), None)
    if bad is None and before.evaluation is None:
        bad = next((quality for quality in before.quality if quality.state == "uncertain"), None)
    outputs = [error for error in before.outputs if error.name in names]
    worst = min(outputs, key=lambda error: error.sqnr_db, default=None)
    output = bad.name if bad is not None else "" if worst is None else worst.name
    decided_by = None if bad is None or bad.name in before.collapsed() else bad.decided_by
    kind: FigureName = decided_by or "SQNR"
    several = f" of '{output}'" if len(before.quality) > 1 else ""
    values = []
    for comparison in found:
        row = next((quality for quality in comparison.quality if quality.name == output), None)
        figure = None if row is None else row.figure(kind)
        values.append("unknown" if figure is None else figure.text())
    return f"{kind}{several}", values


def _advice(
    before: Comparison, trials: Sequence[_ActionTrial], change: RecipeChange, trial: _ActionTrial | None = None
) -> Advice:
    """Return advice for a change, measured if its trial is given."""
    figure, values = _figures(before, [before, *(row.comparison for row in trials)])
    return Advice(
        change.name,
        change.texts,
        trial is not None,
        trial is not None and trial.repaired,
        figure,
        values[0],
        "" if trial is None else _figures(before, [trial.comparison])[1][0],
        tuple(zip((row.change.name for row in trials), values[1:], strict=True)),
        gain_db=None if trial is None else trial.gain_db,
    )
