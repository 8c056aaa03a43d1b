"""Multiple-choice knapsack by Pareto fronts: all non-dominated choices of one option each, by cost and loss.

Costs and losses are additive. A front is joined with the next one point by point, and dominated points are dropped: a
dynamic program over the Pareto front (Nemhauser & Ullmann 1969; Kellerer, Pferschy & Pisinger 2004, chapter 11). It is
exact while a front has at most `MOST_POINTS` points. Above that, the cost axis is divided into as many cells and the
best point of each is kept, at its true cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

MOST_POINTS: Final = 20_000
"""Maximum number of points of a front. A join with a front of four options sorts four times as many, in about 10 ms."""

CHUNK: Final = 1_000_000
"""Points that a join holds in memory before it drops the dominated ones."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Option:
    """One option: its cost, its loss and a label."""

    cost: float
    loss: float
    label: Any


@final
class Front:
    """Pareto front: non-dominated choices in order of rising cost and falling loss.

    Attributes:
        costs, losses: (n,) float64.
    """

    def __init__(self, costs: Floats, losses: Floats, source: _Source) -> None:
        self.costs = costs
        self.losses = losses
        self._source = source

    def __len__(self) -> int:
        return len(self.costs)

    def labels(self, place: int) -> list[Any]:
        """Return the labels of the options chosen at a point, in the order of the joins."""
        return list(self._source.labels(place))

    def within(self, limit: float) -> int | None:
        """Return the point of least loss with a cost of at most `limit`, or None if there is none."""
        place = int(np.searchsorted(self.costs, limit, side="right")) - 1
        return None if place < 0 else place

    def hull(self) -> list[int]:
        """Return the points on the lower convex hull, cheapest first: the cost per saved loss rises with each step."""
        corners: list[int] = []
        for place in range(len(self)):
            while len(corners) >= 2 and self._above(corners[-2], corners[-1], place):
                corners.pop()
            corners.append(place)
        return corners

    def _above(self, a: int, b: int, c: int) -> bool:
        costs, losses = self.costs, self.losses
        there = (losses[b] - losses[a]) * (costs[c] - costs[a])
        return bool(there >= (losses[c] - losses[a]) * (costs[b] - costs[a]))


class _Source(ABC):
    """Provenance of a front's points, to recover the chosen options."""

    @abstractmethod
    def labels(self, place: int) -> Iterator[Any]:
        """Yield the labels of a point."""


@final
@dataclass(frozen=True)
class _Leaf(_Source):
    options: Sequence[Option]

    def labels(self, place: int) -> Iterator[Any]:
        yield self.options[place].label


@final
@dataclass(frozen=True)
class _Join(_Source):
    first: Front
    second: Front
    places: tuple[Ints, Ints]

    def labels(self, place: int) -> Iterator[Any]:
        chain: list[tuple[Front, int]] = []
        here: _Source = self
        while isinstance(here, _Join):  # iterative, because there are as many joins as layers
            chain.append((here.second, int(here.places[1][place])))
            place, here = int(here.places[0][place]), here.first._source
        yield from here.labels(place)
        for front, at in reversed(chain):
            yield from front._source.labels(at)


@final
@dataclass(frozen=True)
class _Either(_Source):
    fronts: Sequence[Front]
    which: Ints
    places: Ints

    def labels(self, place: int) -> Iterator[Any]:
        yield from self.fronts[int(self.which[place])]._source.labels(int(self.places[place]))


def leaf(options: Sequence[Option]) -> Front:
    """Build the front of one choice from its options.

    Raises:
        ValueError: `options` is empty.
    """
    if not options:
        raise ValueError("a choice has no options")
    costs = np.array([option.cost for option in options], np.float64)
    losses = np.array([option.loss for option in options], np.float64)
    keep = undominated(costs, losses)
    return Front(costs[keep], losses[keep], _Leaf([options[place] for place in keep]))


def join(first: Front, second: Front) -> Front:
    """Combine two independent choices: all pairwise sums of their points, without dominated ones."""
    parts: list[tuple[Floats, Floats, Ints, Ints]] = []
    step = max(1, CHUNK // len(first))
    for start in range(0, len(second), step):
        some = np.arange(start, min(start + step, len(second)))
        costs = (first.costs[:, None] + second.costs[some]).ravel()
        losses = (first.losses[:, None] + second.losses[some]).ravel()
        left = np.repeat(np.arange(len(first)), len(some))
        right = np.tile(some, len(first))
        parts.append(_kept(costs, losses, left, right))
        if len(parts) > 1:
            parts = [_kept(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))]
    costs, losses, left, right = parts[0]
    return Front(costs, losses, _Join(first, second, (left, right)))


def _kept(costs: Floats, losses: Floats, left: Ints, right: Ints) -> tuple[Floats, Floats, Ints, Ints]:
    keep = _thinned(costs, undominated(costs, losses))
    return costs[keep], losses[keep], left[keep], right[keep]


def either(fronts: Sequence[Front]) -> Front:
    """Return the union of several fronts, of which one is chosen, without dominated points."""
    costs = np.concatenate([front.costs for front in fronts])
    losses = np.concatenate([front.losses for front in fronts])
    which = np.repeat(np.arange(len(fronts)), [len(front) for front in fronts])
    places = np.concatenate([np.arange(len(front)) for front in fronts])
    keep = _thinned(costs, undominated(costs, losses))
    return Front(costs[keep], losses[keep], _Either(fronts, which[keep], places[keep]))


def join_all(fronts: Sequence[Front]) -> Front:
    """Join fronts: one choice from each.

    Raises:
        ValueError: `fronts` is empty.
    """
    if not fronts:
        raise ValueError("there is nothing to choose")
    return reduce(join, fronts)


def undominated(costs: Floats, losses: Floats) -> Ints:
    """Return the positions of the non-dominated points, cheapest first."""
    order = np.lexsort((losses, costs))
    best = np.minimum.accumulate(losses[order])
    keep = np.ones(len(order), bool)
    keep[1:] = losses[order][1:] < best[:-1]
    return order[keep].astype(np.int64)


def _thinned(costs: Floats, places: Ints) -> Ints:
    """Reduce to about `MOST_POINTS` points: the one of least loss in each cell of the cost axis, and the end points."""
    if len(places) <= MOST_POINTS:
        return places
    here = costs[places]
    cells = ((here - here[0]) / (here[-1] - here[0]) * MOST_POINTS).astype(np.int64)
    last = np.ones(len(places), bool)  # losses fall with costs: the last of a cell loses least
    last[:-1] = cells[1:] != cells[:-1]
    last[0] = True
    return places[last]


def greedy(fronts: Sequence[Front], limit: float) -> list[int] | None:
    """Choose one point of each front greedily, so that the total cost is at most `limit`.

    Starts with the most expensive points and walks down the convex hulls, each time taking the step with the smallest
    loss per saved cost: the solution of the relaxed problem (Sinha & Zoltners 1979). Remaining budget is then spent on
    the fitting step with the largest gain.

    Returns:
        Positions in the fronts, or None if even the cheapest points exceed the limit.
    """
    hulls = [front.hull() for front in fronts]
    at = [len(hull) - 1 for hull in hulls]
    spent = sum(float(front.costs[hull[-1]]) for front, hull in zip(fronts, hulls, strict=True))

    def worth(number: int) -> float:
        front, hull, here = fronts[number], hulls[number], at[number]
        saved = front.costs[hull[here]] - front.costs[hull[here - 1]]
        return float((front.losses[hull[here - 1]] - front.losses[hull[here]]) / saved)

    while spent > limit:
        able = [number for number, here in enumerate(at) if here > 0]
        if not able:
            return None
        number = min(able, key=worth)
        front, hull = fronts[number], hulls[number]
        spent -= float(front.costs[hull[at[number]]] - front.costs[hull[at[number] - 1]])
        at[number] -= 1
    return _filled(fronts, [hull[here] for hull, here in zip(hulls, at, strict=True)], limit - spent)


def _filled(fronts: Sequence[Front], places: list[int], left: float) -> list[int]:
    """Spend the remaining budget greedily on the step with the largest gain that fits, until none fits."""
    while True:
        best: tuple[float, int, int] | None = None
        for number, (front, here) in enumerate(zip(fronts, places, strict=True)):
            there = front.within(float(front.costs[here]) + left)
            gain = 0.0 if there is None else float(front.losses[here] - front.losses[there])
            if there is not None and gain > 0 and (best is None or gain > best[0]):
                best = (gain, number, there)
        if best is None:
            return places
        _, number, there = best
        left -= float(fronts[number].costs[there] - fronts[number].costs[places[number]])
        places[number] = there
