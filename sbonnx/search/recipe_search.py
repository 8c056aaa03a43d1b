"""Recipe search: greedy trial of steps by target and bit width, each kept if the error on the hold-out set falls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from sbonnx import graph as graphs
from sbonnx.errors import SbonnxError
from sbonnx.metrics import Metric, ratio_db
from sbonnx.pipeline import pruned
from sbonnx.progress import Progress
from sbonnx.recipe import Recipe
from sbonnx.recipe.backend_limits import sides
from sbonnx.recipe.names import FLOAT
from sbonnx.recipe.sections.stages import Budget
from sbonnx.report import Note, Problem, Reason, Refusal, Report
from sbonnx.report.searched import SearchFigures, SearchStep
from sbonnx.search.actions import Situation, steps_for
from sbonnx.search.bit_search import MixedOutcome, choose, for_loss
from sbonnx.search.loss_survey import survey
from sbonnx.search.trial_scores import Goal, Score
from sbonnx.search.trials import Trials, changed, open_trials, settled
from sbonnx.stages.state import Request

WORTH: Final = 0.02
"""Minimum share of the error energy that a step must save to be kept; see `Score.beats`."""

PATIENCE: Final = 3
"""Steps in a row without gain after which no other is tried."""

MORE_WEIGHTS: Final = (4, 8, 16, FLOAT)
MORE_INPUTS: Final = (8, 16, FLOAT)
"""Candidate widths for layers that need more bits than requested, limited to those of the backend."""


def gain_db(before: Score, after: Score) -> float:
    """Return the reduction of the error energy in decibel."""
    return 0.0 if after.error == before.error else ratio_db(before.error, after.error)


@dataclass(frozen=True)
class SearchResult:
    """Result of the search.

    Attributes:
        recipe: the final recipe, to be run on all feeds and saved.
        plain, best: scores of the given recipe and of `recipe` on the hold-out set; `plain` is None if not measured.
        stepped: whether steps were tried.
        attempts: the trials of steps, in order.
        outcome: result of the mixed precision search, if there was one.
        trials: number of networks that were calibrated and evaluated.
        judged: number of feeds for evaluation.
        divided: whether these are disjoint from the calibration feeds.
        goal: the required quality.
        loss: kind of `Score.loss`.
    """

    recipe: Recipe
    plain: Score | None
    best: Score
    stepped: bool
    attempts: tuple[SearchStep, ...]
    outcome: MixedOutcome | None
    trials: int
    judged: int
    divided: bool
    goal: Goal
    loss: str

    def added_to(self, report: Report) -> Report:
        """Return the report of the final recipe, with this result."""
        return replace(
            report,
            search=self.figures,
            notes=(*self.notes, *report.notes),
            refusals=(*report.refusals, *self.refusals),
            problems=(*report.problems, *self.problems),
        )

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Reasons why the result misses the goal."""
        if self.goal.reached(self.best):
            return ()
        widest = ""
        if self.outcome is not None and self.plain is not None:
            widest = " with the widest types that the backend takes"
        elif self.outcome is not None:  # widths were chosen from the candidates of MIXED alone
            widest = " with the widest candidates (MIXED.WEIGHTS, MIXED.ACTIVATIONS)"
        return (
            Problem(
                "goal-missed",
                f"{self.goal.text} was asked for on the feeds held out, and is not reached{widest}: "
                f"{self.goal.figures(self.best)}",
            ),
        )

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Steps that could not be tried, with the reasons."""
        mine = [
            Refusal(f"try {attempt.what}", "the model", Reason("not-tried", attempt.why))
            for attempt in self.attempts
            if attempt.why
        ]
        return (*mine, *(() if self.outcome is None else self.outcome.refusals))

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes for the report, one sentence each."""
        where = f"{self.judged} feeds held out" if self.divided else f"the {self.judged} feeds that it calibrated on"
        notes = [Note("search-trials", f"search: {self.trials} trials, judged on {where}")]
        if self.plain is not None and not self.stepped and self.outcome is None:
            notes.append(
                Note(
                    "search-reached",
                    f"{self.goal.text}: reached at the widths of the recipe, {self.goal.figures(self.plain)}",
                )
            )
        if self.plain is not None and self.stepped:
            kept = [attempt for attempt in self.attempts if attempt.kept]
            said = "; ".join(f"{attempt.what} (+{attempt.gain_db:.2f} dB)" for attempt in kept) or "no step gained"
            notes.append(
                Note(
                    "search-gain",
                    f"auto: {self.plain.sqnr_db:.2f} dB -> {self.best.sqnr_db:.2f} dB at the outputs, on {where}: "
                    f"{said}",
                )
            )
        return (*notes, *(() if self.outcome is None else self.outcome.notes))

    @property
    def figures(self) -> SearchFigures:
        """Scores of the trials, for reports."""
        widths = None if self.outcome is None else self.outcome.widths
        return SearchFigures(
            self.trials, self.judged, self.divided, self.loss, self.plain, self.best, self.attempts, widths
        )


def searched(
    request: Request, *, metric: Metric | None = None, progress: Progress | None = None
) -> tuple[Request, SearchResult | None]:
    """Run the search if the recipe of a request has one. Return the request with the recipe to run.

    Args:
        metric: the loss that MIXED.MAX_LOSS limits.

    Raises:
        SbonnxError: a subclass; see `open_trials` and `search`.
    """
    recipe = request.recipe
    if not (recipe.auto.enable or recipe.mixed.wanted):
        return request, None
    request = pruned(request, progress)
    trials = open_trials(request, metric=metric, progress=progress)
    result = search(trials, recipe, recipe.decided)
    trials.progress.what = ""
    return replace(request, recipe=result.recipe), result


def search(trials: Trials, recipe: Recipe, decided: frozenset[str]) -> SearchResult:
    """Run the search that AUTO and MIXED of a recipe request.

    Args:
        decided: key paths that no step may change.

    Raises:
        SbonnxError: the given recipe cannot be run on the model; see `sbonnx.search.choose`.
    """
    goal = goal_of(recipe, trials)
    attempts: list[SearchStep] = []
    plain: Score | None = None
    best = recipe
    only_wider = recipe.mixed.max_loss is not None and recipe.mixed.minimize == "none"
    if recipe.auto.enable or only_wider:
        plain = trials.score(recipe, "plain recipe")
    if recipe.auto.enable and plain is not None:
        best = _stepped(trials, recipe, plain, decided, attempts)
    outcome = _mixed(trials, best, goal)
    final = settled(best) if outcome is None else outcome.recipe
    score = trials.score(best, "result") if outcome is None else outcome.best.score
    if plain is not None and recipe.mixed.max_loss is None and not _budgeted(recipe) and score.error > plain.error:
        final, score = settled(recipe), plain
    return SearchResult(
        recipe=final,
        plain=plain,
        best=score,
        stepped=recipe.auto.enable,
        attempts=tuple(attempts),
        outcome=outcome,
        trials=trials.count,
        judged=len(trials.samples.held),
        divided=trials.samples.divided,
        goal=goal,
        loss=trials.judge.kind,
    )


def goal_of(recipe: Recipe, trials: Trials) -> Goal:
    """Return the goal of a recipe: MIXED.MAX_LOSS and VERIFY.MIN_SQNR_DB."""
    least = recipe.verify.min_sqnr_db
    floor = max(least.values(), default=None) if isinstance(least, Mapping) else least
    return Goal(recipe.mixed.max_loss, floor, trials.judge.kind)


def _budgeted(recipe: Recipe) -> bool:
    return recipe.mixed.budget != Budget()


def _stepped(
    trials: Trials, recipe: Recipe, plain: Score, decided: frozenset[str], attempts: list[SearchStep]
) -> Recipe:
    steps = steps_for(Situation.of(recipe, graphs.load(trials.request.float_model)), decided)
    best, score = recipe, plain
    idle = 0
    for number, step in enumerate(steps):
        if idle == PATIENCE:
            break
        try:
            trial_recipe = changed(best, dict(step.keys))
            trial_score = trials.score(trial_recipe, f"trial {number + 1} of {len(steps)}: {step.name}")
        except SbonnxError as error:
            attempts.append(SearchStep(step.name, step.keys, kept=False, why=str(error)))
            continue
        kept = trial_score.beats(score, WORTH)
        attempts.append(SearchStep(step.name, step.keys, kept, gain_db(score, trial_score), score=trial_score))
        idle = 0 if kept else idle + 1
        if kept:
            best, score = trial_recipe, trial_score
    return best


def _mixed(trials: Trials, recipe: Recipe, goal: Goal) -> MixedOutcome | None:
    """Choose widths within a budget, the fewest bits within a loss, or wider ones if the goal is missed."""
    if _budgeted(recipe):
        return choose(trials, recipe)
    if recipe.mixed.minimize != "none":
        return for_loss(trials, survey(trials, recipe), goal)
    if not goal.asked or goal.reached(trials.score(recipe, "result of the steps")):
        return None
    limits = sides(trials.rules, recipe.mode)
    weights = recipe.mixed.weights or _more(recipe.w.quantizer.bit, MORE_WEIGHTS, limits["W"].bits)
    inputs = recipe.mixed.activations or _more(recipe.a.quantizer.bit, MORE_INPUTS, limits["A"].bits)
    return for_loss(trials, survey(trials, recipe, weights, inputs if recipe.mode == "static" else ()), goal)


def _more(now: int, wider: tuple[int, ...], allowed: tuple[int, ...]) -> tuple[int, ...]:
    """Return a width and the wider ones of a list that the backend supports."""
    if now == FLOAT:
        return (FLOAT,)
    return (now, *(bits for bits in wider if bits == FLOAT or (bits > now and bits in allowed)))
