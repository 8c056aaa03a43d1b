"""Number of groups to remove from each dimension: the least added error for each unit saved, until a budget is met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sbonnx.pruning.curves import SensitivityCurve
from sbonnx.spec import Array


@dataclass(frozen=True)
class CountLimits:
    """CountLimits on what remains of each dimension.

    Attributes:
        multiples: groups that remain are a multiple of this, or all of them remain; by dimension.
        least: share of the groups that always remains.
    """

    multiples: tuple[int, ...]
    least: float = 0.1

    def counts(self, place: int, size: int) -> list[int]:
        """Return the numbers of groups that may be removed from a dimension of `size` groups, ascending from 0."""
        multiple = max(self.multiples[place], 1)
        least = max(1, int(np.ceil(self.least * size)))
        return [0, *sorted(size - left for left in range(multiple, size, multiple) if left >= least)]


def allocate(
    curves: Sequence[SensitivityCurve],
    sizes: Sequence[int],
    limits: CountLimits,
    cost: Callable[[Array], float],
    target: float,
) -> Array | None:
    """Return the numbers of groups to remove, int64 (dimensions,), so that ``cost(removed) <= target``.

    Greedy on the lower convex hulls of the curves: each step takes the dimension and number with the least added
    error per unit of cost saved, given the groups removed so far. The last step is the smallest that meets the target.

    Args:
        curves: error of each dimension alone; errors add.
        sizes: groups of each dimension.
        limits: see `CountLimits`.
        cost: of the network with so many groups removed.
        target: of the cost.

    Returns:
        None if the target cannot be met.
    """
    choices = [limits.counts(place, size) for place, size in enumerate(sizes)]
    removed = np.zeros(len(sizes), np.int64)
    now = cost(removed)
    while now > target:
        best: tuple[float, int, int] | None = None
        last: tuple[float, int, int] | None = None
        for place, counts in enumerate(choices):
            error = curves[place].at(removed[place])
            for count in counts:
                if count <= removed[place]:
                    continue
                tried = removed.copy()
                tried[place] = count
                left = cost(tried)
                if left >= now:
                    continue
                added = curves[place].at(count) - error
                ratio = added / (now - left)
                if best is None or ratio < best[0]:
                    best = (ratio, place, count)
                if left <= target and (last is None or added < last[0]):
                    last = (added, place, count)
        if best is None:
            return None
        _, place, count = best if last is None or _misses(best, removed, cost, target) else last
        removed[place] = count
        now = cost(removed)
    return removed


def _misses(step: tuple[float, int, int], removed: Array, cost: Callable[[Array], float], target: float) -> bool:
    """Return whether more steps are needed after this one."""
    tried = removed.copy()
    tried[step[1]] = step[2]
    return cost(tried) > target
