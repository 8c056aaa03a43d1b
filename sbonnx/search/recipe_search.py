"""Recipe search: greedy trial of steps, each kept if the error on the hold-out set falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sbonnx import graph as graphs
from sbonnx.errors import SbonnxError
from sbonnx.recipe import Recipe
from sbonnx.recipe.backend_limits import sides
from sbonnx.recipe.names import FLOAT
from sbonnx.report import Refusal
from sbonnx.search.bit_search import choose, for_loss
from sbonnx.search.evaluation import Goal, Score
from sbonnx.search.outcome import Outcome
from sbonnx.search.recipe_steps import Situation, Step, steps_for
from sbonnx.search.sensitivity import survey
from sbonnx.search.trials import Trials, changed, settled

WORTH: Final = 0.02
"""Minimum share of the error energy that a step must save to be kept; see `Score.beats`."""

MORE_WEIGHTS: Final = (4, 8, 16, FLOAT)
MORE_INPUTS: Final = (8, 16, FLOAT)
"""Candidate widths for layers that need more bits than requested, limited to those of the backend."""


@dataclass(frozen=True)
class Attempt:
    """One trial of a step.

    Attributes:
        what: name of the step.
        keys: values by key path.
        before, score: best score so far, and the score with this step; None if the step could not be tried.
        kept: whether the step was kept.
        why: if the step could not be tried, the reason.
    """

    what: str
    keys: Mapping[str, Any]
    before: Score
    score: Score | None
    kept: bool
    why: str = ""

    @property
    def gain_db(self) -> float | None:
        """Reduction of the error energy in decibel; None if the step was not measured."""
        if self.score is None:
            return None
        if self.score.error == self.before.error:
            return 0.0
        if self.score.error == 0:
            return math.inf
        return 10 * math.log10(self.before.error / self.score.error) if self.before.error else -math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        figures = {} if self.score is None else self.score.to_dict()
        return {
            "what": self.what,
            "keys": dict(self.keys),
            "kept": self.kept,
            "gain_db": self.gain_db,
            "why": self.why,
            **figures,
        }


@dataclass(frozen=True)
class Found:
    """Result of the search.

    Attributes:
        recipe: the final recipe, to be run on all feeds and saved.
        plain, best: scores of the given recipe and of `recipe` on the hold-out set; `plain` is None if not measured.
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
    attempts: tuple[Attempt, ...]
    outcome: Outcome | None
    trials: int
    judged: int
    divided: bool
    goal: Goal
    loss: str

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why the result misses the goal."""
        if self.goal.reached(self.best):
            return ()
        widest = "" if self.outcome is None else " with the widest types that the backend takes"
        return (
            f"{self.goal.text} was asked for on the feeds held out, and is not reached{widest}: "
            f"{self.goal.figures(self.best)}",
        )

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Steps that could not be tried, with the reasons."""
        mine = [Refusal(f"try {one.what}", "the model", one.why) for one in self.attempts if one.why]
        return (*mine, *(() if self.outcome is None else self.outcome.refusals))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the report, one sentence each."""
        where = f"{self.judged} feeds held out" if self.divided else f"the {self.judged} feeds that it calibrated on"
        notes = [f"search: {self.trials} trials, judged on {where}"]
        if self.plain is not None:
            kept = [one for one in self.attempts if one.kept]
            said = "; ".join(f"{one.what} (+{one.gain_db:.2f} dB)" for one in kept) or "no step gained"
            notes.append(
                f"auto: {self.plain.sqnr_db:.2f} dB -> {self.best.sqnr_db:.2f} dB at the outputs, on {where}: {said}"
            )
        return (*notes, *(() if self.outcome is None else self.outcome.notes))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "trials": self.trials,
            "judged_on": self.judged,
            "held_out": self.divided,
            "loss": self.loss,
            "plain": None if self.plain is None else self.plain.to_dict(),
            "best": self.best.to_dict(),
            "steps": [one.to_dict() for one in self.attempts],
            "mixed": None if self.outcome is None else self.outcome.to_dict(),
        }


def search(trials: Trials, recipe: Recipe, decided: frozenset[str]) -> Found:
    """Run the search that AUTO and MIXED of a recipe request.

    Args:
        decided: key paths that no step may change.

    Raises:
        SbonnxError: the given recipe cannot be run on the model; see `sbonnx.search.choose`.
    """
    goal = goal_of(recipe, trials)
    attempts: list[Attempt] = []
    plain: Score | None = None
    best = recipe
    if recipe.auto.enable:
        plain = trials.score(recipe, "plain recipe")
        best = _stepped(trials, recipe, plain, decided, attempts)
    outcome = _mixed(trials, best, goal, searched=recipe.auto.enable)
    final = settled(best) if outcome is None else outcome.recipe
    score = trials.score(best, "result") if outcome is None else outcome.best.score
    if plain is not None and recipe.mixed.max_loss is None and not _budgeted(recipe) and score.error > plain.error:
        final, score = settled(recipe), plain
    return Found(
        recipe=final,
        plain=plain,
        best=score,
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
    return any(value is not None for _, value in recipe.mixed.budget)


def _stepped(trials: Trials, recipe: Recipe, plain: Score, decided: frozenset[str], attempts: list[Attempt]) -> Recipe:
    """Return the recipe with all steps that gain; each trial is appended to `attempts`."""
    steps = steps_for(Situation.of(recipe, graphs.load(trials.model)), decided)
    best, score = recipe, plain
    for number, step in enumerate(steps):
        made, attempt = _try(trials, best, score, step, f"trial {number + 1} of {len(steps)}: {step.name}")
        attempts.append(attempt)
        if attempt.kept and attempt.score is not None:
            best, score = made, attempt.score
    return best


def _try(trials: Trials, best: Recipe, score: Score, step: Step, what: str) -> tuple[Recipe, Attempt]:
    """Try one more step on top of a recipe."""
    try:
        made = changed(best, dict(step.keys))
        found = trials.score(made, what)
    except SbonnxError as error:
        return best, Attempt(step.name, step.keys, score, None, kept=False, why=str(error))
    return made, Attempt(step.name, step.keys, score, found, kept=found.beats(score, WORTH))


def _mixed(trials: Trials, recipe: Recipe, goal: Goal, *, searched: bool) -> Outcome | None:
    """Choose widths layer by layer if requested, or if the goal is not reached without."""
    if _budgeted(recipe):
        return choose(trials, recipe)
    if not searched:
        return for_loss(trials, survey(trials, recipe), goal)
    if not goal.asked or goal.reached(trials.score(recipe, "result of the steps")):
        return None
    limits = sides(recipe.backend, recipe.mode)
    weights = recipe.mixed.weights or _more(recipe.w.quantizer.bit, MORE_WEIGHTS, limits["W"].bits)
    inputs = recipe.mixed.activations or _more(recipe.a.quantizer.bit, MORE_INPUTS, limits["A"].bits)
    return for_loss(trials, survey(trials, recipe, weights, inputs if recipe.mode == "static" else ()), goal)


def _more(now: int, wider: tuple[int, ...], allowed: tuple[int, ...]) -> tuple[int, ...]:
    """Return a width and the wider ones of a list that the backend supports."""
    if now == FLOAT:
        return (FLOAT,)
    return (now, *(bits for bits in wider if bits == FLOAT or (bits > now and bits in allowed)))


__all__ = ["Attempt", "Found", "goal_of", "search"]
