"""Number of groups to remove from each dimension: the least added error for each unit saved, until a budget is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sbonnx.pruning.budgets.budget import Cost
from sbonnx.pruning.curves import SensitivityCurve
from sbonnx.spec import Array


@dataclass(frozen=True)
class CountLimits:
    """Limits on what remains of each dimension.

    Attributes:
        multiples: groups that remain are a multiple of this, or all of them remain; by dimension.
        removable: number of groups that can be removed together, by dimension.
        least: share of the groups that always remains.
        fixed: number of groups to remove, by dimension; others can be chosen.
    """

    multiples: tuple[int, ...]
    removable: tuple[int, ...]
    least: float = 0.1
    fixed: Mapping[int, int] = field(default_factory=dict)

    def counts(self, place: int, size: int) -> list[int]:
        """Return the numbers of groups that may be removed from a dimension of `size` groups, ascending.

        They begin with 0 unless the number is fixed.
        """
        if place in self.fixed:
            return [self.fixed[place]]
        multiple = max(self.multiples[place], 1)
        least = max(1, size - self.removable[place], int(np.ceil(self.least * size)))
        return [0, *sorted(size - left for left in range(multiple, size, multiple) if left >= least)]


def allocate(
    curves: Sequence[SensitivityCurve],
    sizes: Sequence[int],
    limits: CountLimits,
    cost: Cost,
    target: float,
    start: Array | None = None,
) -> Array:
    """Return the numbers of groups to remove, int64 (dimensions,), so that ``cost(removed) <= target``.

    Greedy on the lower convex hulls of the curves: each step takes the dimension and number with the least added
    error per unit of cost saved, given the groups removed so far. The last step is the smallest that meets the target.

    Args:
        curves: error of each dimension alone; errors add.
        sizes: groups of each dimension.
        limits: see `CountLimits`.
        cost: of the network.
        target: of the cost.
        start: groups that are removed in any case; None: none.

    Returns:
        If the target cannot be met: numbers from which no step reduces the cost.
    """
    choices = [np.array(limits.counts(place, size), np.int64) for place, size in enumerate(sizes)]
    errors = [np.array([curve.at(count) for count in counts]) for curve, counts in zip(curves, choices, strict=True)]
    removed = np.array([counts[0] for counts in choices], np.int64)
    removed = removed if start is None else np.maximum(removed, start)
    now = cost(removed)
    while now > target:
        steps: list[_Removal] = []
        last: list[_Removal] = []
        for place, counts in enumerate(choices):
            more = counts > removed[place]
            saved = cost.change(removed, place, counts[more])
            added = errors[place][more] - curves[place].at(removed[place])
            useful = saved > 0
            ratios = added / np.where(useful, saved, 1.0)
            for usable, rows, removals in (
                (useful, ratios, steps),
                (useful & (now - saved <= target), added, last),
            ):
                if usable.any():
                    i = int(np.flatnonzero(usable)[rows[usable].argmin()])
                    removals.append(_Removal(float(ratios[i]), place, int(counts[more][i]), float(added[i])))
        if not steps:
            break
        step = min(steps, key=lambda one: one.ratio)
        if last and not _misses(step, removed, cost, target):
            step = min(last, key=lambda one: one.added)
        removed[step.place] = step.groups
        now = cost(removed)
    return removed


class _Removal(NamedTuple):
    """Removal of more groups from one dimension: added error for each unit of cost saved, and added error."""

    ratio: float
    place: int
    groups: int
    added: float


def _misses(step: _Removal, removed: Array, cost: Cost, target: float) -> bool:
    """Return whether more steps are needed after this one."""
    tried = removed.copy()
    tried[step.place] = step.groups
    return cost(tried) > target
