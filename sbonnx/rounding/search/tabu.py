"""Tabu search: takes the cheapest single-code change even if the loss rises; changes are locked for `tenure` steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.moments import Moments
from sbonnx.rounding import base
from sbonnx.rounding.base import Grid, limit_rows, over_rows
from sbonnx.rounding.search.descent import alive
from sbonnx.spec import Array
from sbonnx.system.native import address

LANES: Final = 16
"""Rows are padded to a multiple of this."""

BARRED: Final = np.float32(3e38)
"""Penalty added to the cost of a locked step."""

MOST: Final = 1 << 22
"""Limit of values read for one output: layers with over 700 inputs get fewer steps per input."""

MOST_AFTER_DESCENT: Final = 1 << 21
"""Limit from a local minimum, which needs no steps to reach one."""

PART: Final = 1 << 22
"""Weights that are searched at a time; needs five arrays of this size with 4 bytes per entry."""


def tenure(columns: int) -> int:
    """Return for how many steps a change is locked; half and twice as many gained less on trained layers."""
    return max(min(columns, 10), math.isqrt(columns) // 2 + 2)


def tabu(grid: Grid, codes: Array, moments: Moments, steps: int, rest: Array | None = None) -> Array:
    """Improve `codes` by a tabu search of each output independently. Never worse than before.

    With the half gradient ``r = v A - w B`` changing code k by one up or down costs ``scale_k^2 A_kk +- 2 scale_k
    r_k``. The cheapest step is taken even if the cost is positive, which escapes local minima. Reverting it is locked
    for `tenure` steps, so that the search moves on. The best codes on the way are returned. A step takes one pass over
    K numbers.

    Args:
        grid: the weight and its quantization grid, (G, O, K).
        codes: integers (G, O, K) of any type, within the grid's range.
        moments: of the layer's inputs.
        steps: steps for each of the K inputs; fewer for large K, see `MOST`.
        rest: r if it is known, as after `descend_from`: then the codes are at a local minimum.

    Returns:
        integers in the type of the grid, (G, O, K), a new array. Identical with and without the compiled loop.

    Source: Glover 1989, "Tabu search, part I"; single-step tabu search is a leading method for binary quadratic
    problems (Palubeckis 2004, "Multistart tabu search strategies"). `docs/decisions` has the gain here.
    """
    before = np.array(codes, grid.weight.dtype)
    groups, outputs, columns = before.shape
    count = min(steps * columns, (MOST if rest is None else MOST_AFTER_DESCENT) // max(columns, 1))
    if count == 0 or before.size == 0:
        return before
    after = np.empty_like(before)
    if groups == 1:
        size = max(1, PART // columns)
        parts = [(slice(None), slice(at, at + size)) for at in range(0, outputs, size)]
    else:
        size = max(1, PART // (max(outputs, columns) * columns))
        parts = [(slice(at, at + size), slice(None)) for at in range(0, groups, size)]
    for part in parts:
        after[part] = _searched(grid, before, moments, part, count, None if rest is None else rest[part])
    return after


def _searched(
    grid: Grid, before: Array, moments: Moments, part: tuple[slice, slice], count: int, given: Array | None
) -> Array:
    """Return the codes of a part after `count` steps, and those of before where the error is not smaller.

    The change of the error is ``c A c' + 2 c r'`` with the change c of the values and the half gradient r before it. It
    is the sum of the costs of the steps, which is computed in float32: of few steps, from a given r, this is exact
    enough, and saves a product.
    """
    own, scale, codes = moments.part(part[0]), grid.scale[part], before[part]
    rest = own.gradient(grid.weight[part], (codes - grid.zero[part]) * scale) if given is None else given
    problem = _TabuProblem.of(grid, codes, own.a, rest.copy(), part)
    problem.search(count)
    if given is not None:
        return problem.codes
    change = ((problem.codes - codes) * scale).astype(own.a.dtype, copy=False)
    gained = np.einsum("gok,gok->go", change, change @ own.a + 2 * rest, dtype=np.float64)
    return np.where((gained < 0)[..., None], problem.codes, codes)


@dataclass(frozen=True)
class _TabuProblem:
    """A part of the problem: some outputs of the only group, or all outputs of some groups; rows padded with zeros.

    Attributes:
        a: float32 (G, K, P).
        rest: the half gradient, float32 (G, O, P), overwritten.
        scale: float32 (G, O, P).
        dead: float32 (G, P), 0 if the input is not constant 0, else `BARRED`.
        codes: int32 (G, O, K), changed in place.
        low, high: of the grid.
    """

    a: Array
    rest: Array
    scale: Array
    dead: Array
    codes: Array
    low: Array
    high: Array

    @staticmethod
    def of(grid: Grid, codes: Array, a: Array, rest: Array, part: tuple[slice, slice]) -> _TabuProblem:
        """Create it from the codes, moments and half gradient of the part."""
        moves = alive(np.einsum("gkk->gk", a))
        return _TabuProblem(
            _padded(a),
            _padded(rest),
            _padded(grid.scale[part]),
            _padded(np.where(moves, np.float32(0), BARRED)),
            np.array(codes, np.int32, order="C"),
            grid.qmin[part],
            grid.qmax[part],
        )

    def search(self, steps: int) -> None:
        """Write the best codes found to `codes`."""
        groups, outputs, columns = self.codes.shape
        if base.loops is None:
            for group in range(groups):
                _TabuState.of(self, group).go(steps, tenure(columns))
            return
        arrays = (address(array) for array in (self.a, self.rest, self.scale, self.dead, self.codes))
        (low, apart), (high, _) = (limit_rows(end, np.int32) for end in (self.low, self.high))
        before = (*arrays, address(low), address(high), outputs, columns, self.a.shape[2], apart)
        after = (steps, tenure(columns))
        rows = groups * outputs
        over_rows("tabu", before, rows, after, rows * steps * columns)


@dataclass
class _TabuState:
    """numpy fallback of the compiled loop: all outputs of a group at once, (O, P) float32, changed in place."""

    a: Array
    rest: Array
    slope: Array
    curve: Array
    up: Array
    down: Array
    codes: Array
    low: Array
    high: Array

    @staticmethod
    def of(problem: _TabuProblem, group: int) -> _TabuState:
        """Create the state of one group of a problem; shares its codes and half gradient."""
        a, scale, codes = problem.a[group], problem.scale[group], problem.codes[group]
        columns, padded = a.shape
        more = (0, padded - columns)
        there = np.pad(problem.dead[group, :columns] == 0, more)
        square = np.pad(np.diagonal(a), more)
        wide, low, high = (np.pad(array, ((0, 0), more)) for array in (codes, problem.low[group], problem.high[group]))
        up, down = (np.where(there & room, np.float32(0), BARRED) for room in (wide < high, wide > low))
        curve = np.where(there, scale * scale * square, np.float32(0))
        return _TabuState(a, problem.rest[group], np.float32(2) * scale, curve, up, down, codes, low, high)

    def go(self, steps: int, tenure: int) -> None:
        """Write the best codes found to `codes`."""
        rows = np.arange(len(self.codes))
        best, error, least = self.codes.copy(), np.zeros(len(rows)), np.zeros(len(rows))
        barred = np.full((tenure, len(rows)), -1)
        for step in range(steps):
            tilt = self.slope * self.rest
            above, below = self.curve + tilt + self.up, self.curve - tilt + self.down
            costs = np.where(above < below, above, below)
            costs = np.where(costs < BARRED, costs, BARRED)
            k = costs.argmin(axis=1)
            live = np.flatnonzero(costs[rows, k] < BARRED)
            if live.size == 0:
                break
            k = k[live]
            went_up = above[live, k] <= below[live, k]
            self._free(live, barred[step % tenure, live])
            barred[step % tenure, live] = 2 * k + went_up
            self._step(live, k, went_up)
            error[live] += costs[live, k]
            better = live[error[live] < least[live]]
            least[better] = error[better]
            best[better] = self.codes[better]
        self.codes[:] = best

    def _free(self, rows: Array, steps: Array) -> None:
        """Unlock the steps (2 k + went up) of `rows`; negative entries are ignored."""
        went_up = (steps & 1) == 1
        for side, end, these in ((self.down, self.low, went_up), (self.up, self.high, ~went_up)):
            row, k = rows[these & (steps >= 0)], steps[these & (steps >= 0)] >> 1
            side[row, k] = np.where(self.codes[row, k] != end[row, k], np.float32(0), BARRED)

    def _step(self, rows: Array, k: Array, went_up: Array) -> None:
        """Change one code of each of `rows`."""
        self.codes[rows, k] += np.where(went_up, 1, -1)
        code = self.codes[rows, k]
        self.up[rows, k] = np.where(went_up & (code < self.high[rows, k]), np.float32(0), BARRED)
        self.down[rows, k] = np.where(~went_up & (code > self.low[rows, k]), np.float32(0), BARRED)
        slope = self.slope[rows, k]
        half = np.float32(0.5) * np.where(went_up, slope, -slope)
        self.rest[rows] += half[:, None] * self.a[k]


def _padded(rows: Array) -> Array:
    """Convert to contiguous float32 with the last axis padded with zeros; `rows` itself if it is so."""
    more, short = -rows.shape[-1] % LANES, np.ascontiguousarray(rows, np.float32)
    return np.pad(short, [(0, 0)] * (rows.ndim - 1) + [(0, more)]) if more else short
