"""Choosing one option for each of many: all choices that no other beats in both cost and loss.

Costs and losses add up over what is chosen for (multiple-choice knapsack). A front of choices is joined with the next
one point by point, and what is dominated is dropped: a dynamic programme over the Pareto front (Nemhauser & Ullmann
1969; Kellerer, Pferschy & Pisinger 2004, chapter 11). It is exact while a front has at most `MOST_POINTS` points;
past that the cost axis is cut into as many cells and the best point of each is kept, at its true cost.
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
"""Points of a front. A join with one that has four options sorts four times as many, in about 10 ms."""

CHUNK: Final = 1_000_000
"""Points that a join holds at a time before it drops the dominated ones."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Option:
    """One way to choose: what it costs, what it loses, and what it is called."""

    cost: float
    loss: float
    label: Any


@final
class Front:
    """Choices of which none is dominated: costs rise, losses fall.

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
        """What point number `place` chooses: the labels of its options, in the order of the joins."""
        return list(self._source.labels(place))

    def within(self, limit: float) -> int | None:
        """The point of least loss that costs at most `limit`; None where even the cheapest costs more."""
        place = int(np.searchsorted(self.costs, limit, side="right")) - 1
        return None if place < 0 else place

    def hull(self) -> list[int]:
        """Points on the lower convex hull, cheapest first: each step costs more for the loss it saves than the last."""
        found: list[int] = []
        for place in range(len(self)):
            while len(found) >= 2 and self._above(found[-2], found[-1], place):
                found.pop()
            found.append(place)
        return found

    def _above(self, a: int, b: int, c: int) -> bool:
        """Whether point b lies on or above the line from a to c."""
        costs, losses = self.costs, self.losses
        there = (losses[b] - losses[a]) * (costs[c] - costs[a])
        return bool(there >= (losses[c] - losses[a]) * (costs[b] - costs[a]))


class _Source(ABC):
    """Where the points of a front come from."""

    @abstractmethod
    def labels(self, place: int) -> Iterator[Any]:
        """Labels of a point."""


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
        while isinstance(here, _Join):  # not by recursion: there are as many joins as layers
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
    """The front of the options of one choice.

    Raises:
        ValueError: there are none.
    """
    if not options:
        raise ValueError("a choice has no options")
    costs = np.array([option.cost for option in options], np.float64)
    losses = np.array([option.loss for option in options], np.float64)
    keep = undominated(costs, losses)
    return Front(costs[keep], losses[keep], _Leaf([options[place] for place in keep]))


def join(first: Front, second: Front) -> Front:
    """Every point of one with every point of the other, added up."""
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
    """The points of several fronts, of which one is chosen."""
    costs = np.concatenate([front.costs for front in fronts])
    losses = np.concatenate([front.losses for front in fronts])
    which = np.repeat(np.arange(len(fronts)), [len(front) for front in fronts])
    places = np.concatenate([np.arange(len(front)) for front in fronts])
    keep = _thinned(costs, undominated(costs, losses))
    return Front(costs[keep], losses[keep], _Either(fronts, which[keep], places[keep]))


def join_all(fronts: Sequence[Front]) -> Front:
    """The front of one choice from each.

    Raises:
        ValueError: there are none.
    """
    if not fronts:
        raise ValueError("there is nothing to choose")
    return reduce(join, fronts)


def undominated(costs: Floats, losses: Floats) -> Ints:
    """Positions of the points that cost less than any of at most their loss, cheapest first."""
    order = np.lexsort((losses, costs))
    best = np.minimum.accumulate(losses[order])
    keep = np.ones(len(order), bool)
    keep[1:] = losses[order][1:] < best[:-1]
    return order[keep].astype(np.int64)


def _thinned(costs: Floats, places: Ints) -> Ints:
    """At most about `MOST_POINTS` of the points: of each cell of the cost axis the one of least loss, and the ends."""
    if len(places) <= MOST_POINTS:
        return places
    here = costs[places]
    cells = ((here - here[0]) / (here[-1] - here[0]) * MOST_POINTS).astype(np.int64)
    last = np.ones(len(places), bool)  # losses fall with costs: the last of a cell loses least
    last[:-1] = cells[1:] != cells[:-1]
    last[0] = True
    return places[last]


def greedy(fronts: Sequence[Front], limit: float) -> list[int] | None:
    """One point of each front, step by step: that which loses least for what it saves, until all cost `limit` at most.

    Begins with the best of everything and goes down the convex hulls, the order of the relaxed problem (Sinha &
    Zoltners 1979); what is left of the budget then goes to whatever still fits and gains most.

    Returns:
        Positions in the fronts, or None where even the cheapest cost more.
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
    """`places` with what is left of the budget spent where it gains most, while anything fits."""
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


__all__ = ["Front", "Option", "either", "greedy", "join", "join_all", "leaf", "undominated"]
