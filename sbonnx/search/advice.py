"""Advice for a result below its quality lines, or slower than float: the cheapest change that repairs it, tried.

Candidates are ordered by what they cost the user at run time: first other numbers at the same widths, then single
layers in float, then wider codes. What to widen follows from the error of weights and of activations alone.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from sbonnx import graph as graphs
from sbonnx import pipeline, verify
from sbonnx import recipe as recipes
from sbonnx.errors import RecipeError, SbonnxError
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.options import RunOptions
from sbonnx.recipe import Recipe
from sbonnx.report.codes import Problem
from sbonnx.report.comparison import Comparison
from sbonnx.report.figures import FigureName
from sbonnx.report.searched import Advice, ScoreFigures
from sbonnx.search.actions import RecipeChange, repairs, wider
from sbonnx.search.error_sources import blame, width_of
from sbonnx.search.latency_advice import faster
from sbonnx.search.recipe_search import SearchResult
from sbonnx.stages.measure import read_data
from sbonnx.stages.state import PipelineState, run_options
from sbonnx.stages.verify import limits_of, reference_of
from sbonnx.verify import Depth
from sbonnx.verify.ort_options import VerifyOptions

SECONDS: Final = 20.0
"""A trial is started while all trials together took less than this, or less than the run that is advised on."""

GAIN_DB: Final = 1.0
"""Minimum gain of the worst output for advice that does not reach the line."""

LATENCY: Final = "time relative to float"


def advise(state: PipelineState, seconds: float) -> Advice | None:
    """Search for the cheapest change that brings all outputs above their lines; then, for one that is not slower.

    Args:
        state: of a finished run.
        seconds: time that the run took.

    Returns:
        The first change that repairs it, else the best measured one if it gains at least `GAIN_DB`, else the first
        that was not tried; None if there is nothing to try.
    """
    before = state.comparison
    if state.data is None or before is None:
        return None
    if not problems_of(state, before):
        own = before.runtime == state.prepared.backend.name  # times in another runtime say nothing
        return _faster(state, before) if before.slower and own else None
    begin, tried = time.perf_counter(), list[tuple[RecipeChange, Comparison]]()
    untried: RecipeChange | None = None
    for change in repairs(state):
        recipe = _changed(state.prepared.recipe, change)
        if recipe is None:
            continue
        spent = time.perf_counter() - begin
        if not _can_try(state) or spent > max(SECONDS, seconds):
            untried = change
            break
        comparison = _measured(state, recipe)
        if comparison is None:
            continue
        tried.append((change, comparison))
        if not problems_of(state, comparison):
            return _advice(before, tried, change, comparison, repaired=True)
    best = max(tried, key=lambda one: _worst_db(one[1]), default=None)
    if untried is None and best is not None and _worst_db(best[1]) - _worst_db(before) >= GAIN_DB:
        return _advice(before, tried, *best)
    return None if untried is None else _advice(before, tried, untried)


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
    judged = replace(
        VerifyOptions.of(done.prepared.plan, done.prepared.backend), device=recipe.device, task=recipe.verify.task
    )
    depth = Depth(latency=latency, limit=recipe.verify.feeds)
    with temporary_folder() as folder, reference_of(state) as reference:
        path = folder / "tried.onnx"
        graphs.save(done.quantized, path)
        return verify.compare(
            reference,
            path,
            data.judged,
            timed=next(iter(data.every)),
            depth=depth,
            options=judged,
        )


def _worst_db(comparison: Comparison) -> float:
    """Return the signal-to-noise ratio of the worst output."""
    return min((error.sqnr_db for error in comparison.outputs), default=-math.inf)


def _figures(before: Comparison, found: Iterable[Comparison]) -> tuple[str, list[str]]:
    """Return the name of the figure that decided that `before` is lost, else the SQNR, and its values."""
    bad = next((quality for quality in before.quality if quality.problem), None)
    worst = min(before.outputs, key=lambda error: error.sqnr_db, default=None)
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
    before: Comparison,
    tried: Sequence[tuple[RecipeChange, Comparison]],
    change: RecipeChange,
    after: Comparison | None = None,
    *,
    repaired: bool = False,
) -> Advice:
    """Return advice for a change, measured if `after` is given."""
    figure, values = _figures(before, [before, *(comparison for _, comparison in tried)])
    return Advice(
        change.name,
        change.texts,
        after is not None,
        repaired,
        figure,
        values[0],
        "" if after is None else _figures(before, [after])[1][0],
        tuple(zip((step.name for step, _ in tried), values[1:], strict=True)),
    )
