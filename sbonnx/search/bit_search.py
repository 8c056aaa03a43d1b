"""Mixed precision search: bit widths by layer, chosen from isolated losses and verified end to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from sbonnx import recipe as recipes
from sbonnx.errors import RecipeError
from sbonnx.recipe import Recipe
from sbonnx.report import Note, Refusal
from sbonnx.report.searched import WidthChoice, WidthSearch
from sbonnx.search.bit_costs import CostName, Costs, costs_of
from sbonnx.search.bit_groups import WEIGHT, Choice, WidthGroup, with_choices
from sbonnx.search.loss_survey import SensitivitySurvey, survey
from sbonnx.search.pareto import Front, greedy, join_all
from sbonnx.search.trial_scores import Goal, Score
from sbonnx.search.trials import Trials


@dataclass(frozen=True)
class Tried:
    """A choice of bit widths.

    Attributes:
        what: display name.
        choices: (side, names, bits) for each layer or tensor group.
        cost: total cost of the chosen layers, in the unit of `Costs.of`.
        predicted: sum of the layers' losses: energy of the error divided by that of the outputs. None: unknown.
    """

    what: str
    choices: tuple[Choice, ...]
    cost: float
    predicted: float | None


@dataclass(frozen=True)
class Measured:
    """A choice of bit widths as a recipe, measured end to end on the hold-out set."""

    what: str
    recipe: Recipe
    choices: tuple[Choice, ...]
    cost: float
    predicted: float | None
    score: Score

    @property
    def widths(self) -> dict[str, int]:
        """Number of layers by weight width and of tensors by activation width, such as ``{"w4": 12}``."""
        counts = Counter(f"{side.lower()}{bits or 'f'}" for side, names, bits in self.choices for _ in names)
        return dict(sorted(counts.items()))


@dataclass(frozen=True)
class MixedOutcome:
    """The best choice and the alternatives.

    Attributes:
        recipe: the recipe with the chosen widths.
        best: the choice in the recipe; one of `tried`.
        unit: unit of costs: "bits", "size", "bit_operations" or "latency".
        target: the budget in that unit, or the text of the requested loss.
        met: whether the target was reached.
        figures: cost of each of `tried` in the unit of the budget.
        front: (cost, predicted loss) of the Pareto-optimal choices.
    """

    recipe: Recipe
    best: Measured
    tried: tuple[Measured, ...]
    unit: str
    target: float | str
    met: bool
    figures: tuple[float, ...]
    front: tuple[tuple[float, float], ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[Note, ...]

    @property
    def widths(self) -> WidthSearch:
        """The choices, for reports."""
        tried = (
            WidthChoice(row.what, cost, row.predicted, row.widths, row is self.best, row.score)
            for row, cost in zip(self.tried, self.figures, strict=True)
        )
        layers = {name: bits for side, names, bits in self.best.choices if side == WEIGHT for name in names}
        tensors = {name: bits for side, names, bits in self.best.choices if side != WEIGHT for name in names}
        return WidthSearch(self.unit, self.target, self.met, tuple(tried), layers, tensors, self.front)


PRUDENCE: Final = (1.5, 2.0, 3.0)
"""Penalty factors for losses at low widths, each giving one more choice that is measured besides the solver's."""

MOST_MEASURED: Final = 8
"""Maximum number of points of the front that are measured end to end for MAX_LOSS."""

MOST_RESIZED: Final = 4
"""Maximum number of retries when the file is larger than the packed size of the quantized values predicts."""

FRONT_ROWS: Final = 64
"""Maximum number of points of the front in the report."""


def choose(trials: Trials, recipe: Recipe) -> MixedOutcome:
    """Choose a bit width for each layer within the budget of the MIXED section of the recipe.

    Raises:
        RecipeError: there is nothing to choose, or the budget is below the cost of the cheapest choice.
    """
    here = survey(trials, recipe)
    name, budget = next(iter(recipe.mixed.budget.to_keys(empty=False).items()))
    return for_budget(trials, here, cast(CostName, name.lower()), float(budget), recipe.mixed.solver)


def for_budget(trials: Trials, here: SensitivitySurvey, name: CostName, budget: float, solver: str) -> MixedOutcome:
    """Return the best choice within a budget among the solver's, more conservative ones and a uniform one.

    Losses of layers are additive only if errors are small. So the solver's choice and the alternatives are measured
    end to end, and the one with the smallest error on the hold-out set is taken.
    """
    costs = costs_of(name, here.base.graph, here.layers, here.kept, here.recipe, trials.rules)
    limit = costs.limit(budget)
    for _ in range(MOST_RESIZED):
        picks = _picks(here, costs, limit, solver)
        if not picks:
            cheapest = costs.figure(sum(float(front.costs[0]) for front in here.fronts(costs)))
            raise RecipeError(
                f"MIXED.BUDGET.{name.upper()} is {budget:g}, and the cheapest choice takes {cheapest:.4g}: "
                "raise it, or name lower widths in MIXED.WEIGHTS"
            )
        if name != "size":
            break
        ratios = [trials.size_ratio(recipes.load(with_choices(here.recipe, pick.choices))) for pick in picks]
        small = [pick for pick, ratio in zip(picks, ratios, strict=True) if ratio <= budget]
        if small:
            picks = small
            break
        limit -= (min(ratios) - budget) * costs.whole
    else:
        raise RecipeError(
            f"MIXED.BUDGET.SIZE is {budget:g}, and the smallest file that was tried has {min(ratios):.4g} of the float "
            "one: raise it, or name lower widths in MIXED.WEIGHTS"
        )
    tried = [_measured(trials, here, pick) for pick in picks]
    best = min(tried, key=lambda one: one.score.error)
    front = join_all(here.fronts(costs))
    notes = [
        Note(
            "widths-chosen",
            f"widths by MIXED.BUDGET.{name.upper()}: {best.what}, {costs.figure(best.cost):.4g} of {budget:g}",
        )
    ]
    return _outcome(here, costs, front, tried, best, notes, target=budget)


def _picks(here: SensitivitySurvey, costs: Costs, limit: float, solver: str) -> list[Tried]:
    """List the choices within a limit that are worth measuring, the solver's first. Empty if none is within it.

    The others are a uniform one, and choices for which losses at widths below the uniform one are scaled up: at few
    bits a layer loses more if other layers have few bits too, and downstream layers compensate less of it.
    """
    widths = sorted({bits for layer in here.free for bits in layer.losses if bits})
    uniform = next(
        (
            uniform_pick
            for bits in reversed(widths)
            if (uniform_pick := _uniform(here, costs, bits)) and uniform_pick.cost <= limit
        ),
        None,
    )
    picks = [_pick(here, costs, limit, solver, here.groups, f"{solver} choice")]
    if uniform is not None and len(widths) > 1:
        bits = max(bits for _, _, bits in uniform.choices)
        for factor in PRUDENCE:
            groups = []
            for group in here.groups:
                layers = [
                    replace(layer, losses={b: x * (factor if 0 < b < bits else 1) for b, x in layer.losses.items()})
                    for layer in group.layers
                ]
                groups.append(replace(group, layers=tuple(layers)))
            what = f"{solver} choice, losses below {bits} bits counted {factor} times"
            picks.append(_pick(here, costs, limit, solver, groups, what))
    picks.append(uniform)
    some: dict[tuple[Choice, ...], Tried] = {}
    for pick in picks:
        if pick is not None:
            some.setdefault(pick.choices, replace(pick, predicted=here.predicted(pick.choices)))
    return list(some.values())


def _uniform(here: SensitivitySurvey, costs: Costs, bits: int) -> Tried | None:
    choices = here.uniform(bits)
    every = [layer for group in here.groups for layer in group.layers]
    cost = sum(
        costs.of(
            layer_of_group.counts, next(iter(layer_of_group.losses)) if layer_of_group.fixed else bits, here.activation
        )
        for layer_of_group in every
    )
    return None if choices is None else Tried(f"{bits} bits everywhere", tuple(choices), cost, None)


def _pick(
    here: SensitivitySurvey, costs: Costs, limit: float, solver: str, groups: Iterable[WidthGroup], what: str
) -> Tried | None:
    fronts = replace(here, groups=tuple(groups)).fronts(costs)
    if solver == "greedy":
        places = greedy(fronts, limit)
        if places is None:
            return None
        labels = [label for front, place in zip(fronts, places, strict=True) for label in front.labels(place)]
        pairs = list(zip(fronts, places, strict=True))
        cost = sum(float(front.costs[place]) for front, place in pairs)
        return Tried(what, tuple(labels), cost, sum(float(front.losses[place]) for front, place in pairs))
    whole = join_all(fronts)
    at = whole.within(limit)
    return None if at is None else _point(whole, at, what)


def _point(front: Front, place: int, what: str) -> Tried:
    return Tried(what, tuple(front.labels(place)), float(front.costs[place]), float(front.losses[place]))


def _measured(trials: Trials, here: SensitivitySurvey, pick: Tried) -> Measured:
    recipe = recipes.load(with_choices(here.recipe, pick.choices))
    return Measured(pick.what, recipe, pick.choices, pick.cost, pick.predicted, trials.score(recipe, pick.what))


def for_loss(trials: Trials, here: SensitivitySurvey, goal: Goal, *, name: CostName = "bit_operations") -> MixedOutcome:
    """Return the cheapest choice on the Pareto front that reaches a goal, measured end to end.

    Binary search over the convex hull of the front. It assumes that a more expensive choice loses less; each step is
    measured. If even the most expensive choice misses the goal, the best measured one is returned with ``met=False``.
    """
    costs = costs_of(name, here.base.graph, here.layers, here.kept, here.recipe, trials.rules)
    front = join_all(here.fronts(costs))
    places = front.hull()
    tried = [_measured(trials, here, _point(front, places[-1], "dearest choice"))]
    low, high = 0, len(places) - 1
    if goal.reached(tried[0].score):
        while low < high and len(tried) < MOST_MEASURED:
            middle = (low + high) // 2
            what = f"choice {middle + 1} of {len(places)}"
            tried.append(_measured(trials, here, _point(front, places[middle], what)))
            low, high = (low, middle) if goal.reached(tried[-1].score) else (middle + 1, high)
    good = [trial for trial in tried if goal.reached(trial.score)]
    best = min(good, key=lambda trial: trial.cost) if good else min(tried, key=lambda trial: trial.score.error)
    notes = [
        Note(
            "widths-chosen",
            f"widths for {goal.text}: {best.what}, {'' if good else 'which is not reached, '}"
            f"{goal.figures(best.score)}, {costs.figure(best.cost):.4g} of the bit operations of w8a8",
        )
    ]
    return _outcome(here, costs, front, tried, best, notes, target=goal.text, met=bool(good))


def _outcome(
    here: SensitivitySurvey,
    costs: Costs,
    front: Front,
    tried: Sequence[Measured],
    best: Measured,
    notes: Sequence[Note],
    *,
    target: float | str,
    met: bool = True,
) -> MixedOutcome:
    step = max(1, -(-len(front) // FRONT_ROWS))
    places = sorted({*range(0, len(front), step), len(front) - 1})
    where = "the network's outputs" if here.network else "each layer's outputs (the network's would have taken long)"
    return MixedOutcome(
        recipe=best.recipe,
        best=best,
        tried=tuple(tried),
        unit=costs.name,
        target=target,
        met=met,
        figures=tuple(costs.figure(trial.cost) for trial in tried),
        front=tuple((costs.figure(float(front.costs[place])), float(front.losses[place])) for place in places),
        refusals=(*here.refusals, *costs.refusals),
        notes=(*notes, Note("widths-measured", f"losses of layers measured on {here.feeds} feeds at {where}")),
    )
