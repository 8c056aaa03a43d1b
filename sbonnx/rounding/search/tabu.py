"""Tabu search: always the cheapest step of one code, uphill too, and none is taken back for a while."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.moments import Moments
from sbonnx.native import address
from sbonnx.rounding.base import Grid
from sbonnx.rounding.search import compiled as native
from sbonnx.rounding.search.compiled import over_rows
from sbonnx.rounding.search.descent import alive
from sbonnx.spec import Array

LANES: Final = 16
"""Rows are padded to a multiple of it."""

BARRED: Final = np.float32(3e38)
"""Added to the cost of a step that may not be taken."""

MOST: Final = 1 << 22
"""Numbers that an output's steps may read in all: layers with over 700 inputs get fewer steps an input."""

PART: Final = 1 << 22
"""Weights that are searched at a time: five arrays of that many numbers of four bytes."""


def tenure(columns: int) -> int:
    """For how many steps no step is taken back; half and twice as many gained less on trained layers."""
    return max(min(columns, 10), math.isqrt(columns) // 2 + 2)


def tabu(grid: Grid, codes: Array, moments: Moments, steps: int) -> Array:
    """`codes` after a tabu search of each output on its own; never worse than before.

    With the half gradient ``r = v A - w B`` the step of code k by one up or down costs
    ``scale_k^2 A_kk +- 2 scale_k r_k``. The cheapest step is taken even where it costs something, which leads out of
    codes that no single step betters; taking it back is barred for `tenure` steps, so that the search goes somewhere
    else. The best codes that were met are kept. A step takes one pass over K numbers.

    Args:
        grid: the weight and what it may become, (G, O, K).
        codes: whole numbers (G, O, K) of any type, within the grid's range.
        moments: of the layer's inputs.
        steps: for each of the K inputs; for large K fewer, see `MOST`.

    Returns:
        float64 whole numbers (G, O, K), a new array. The same with and without the compiled loop.

    Source: Glover 1989, "Tabu search, part I"; with one step at a time it leads on binary quadratic problems
    (Palubeckis 2004, "Multistart tabu search strategies"). `docs/decisions` has what it gains here.
    """
    before = np.array(codes, np.float64)
    groups, outputs, columns = before.shape
    count = min(steps * columns, MOST // max(columns, 1))
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
        problem = _Problem.of(grid, before, moments, part)
        problem.search(count)
        after[part] = problem.codes
    fell = moments.error(grid.weight, grid.values(after)) < moments.error(grid.weight, grid.values(before))
    return np.where(fell[..., None], after, before)


@dataclass(frozen=True)
class _Problem:
    """Some outputs of all groups, or all outputs of some groups; rows padded with zeros.

    Attributes:
        a: float32 (G, K, P).
        rest: the half gradient, float32 (G, O, P), used up.
        scale: float32 (G, O, P).
        dead: float32 (G, P), 0 where the input is not constant 0, `BARRED` elsewhere.
        codes: int32 (G, O, K), changed in place.
        qmin, qmax: of the grid.
    """

    a: Array
    rest: Array
    scale: Array
    dead: Array
    codes: Array
    qmin: int
    qmax: int

    @staticmethod
    def of(grid: Grid, codes: Array, moments: Moments, part: tuple[slice, slice]) -> _Problem:
        a, b = moments.a[part[0]], moments.b[part[0]]
        rest = (codes[part] - grid.zero[part]) * grid.scale[part] @ a - grid.weight[part] @ b
        moves = alive(np.einsum("gkk->gk", a))
        return _Problem(
            _padded(a),
            _padded(rest),
            _padded(grid.scale[part]),
            _padded(np.where(moves, np.float32(0), BARRED)),
            np.ascontiguousarray(codes[part], np.int32),
            grid.qmin,
            grid.qmax,
        )

    def search(self, steps: int) -> None:
        """Leaves the best codes in `codes`."""
        groups, outputs, columns = self.codes.shape
        if native.loops is None:
            for group in range(groups):
                _Walk.of(self, group).go(steps, tenure(columns))
            return
        arrays = (address(each) for each in (self.a, self.rest, self.scale, self.dead, self.codes))
        before = (*arrays, outputs, columns, self.a.shape[2])
        after = (self.qmin, self.qmax, steps, tenure(columns))
        rows = groups * outputs
        over_rows("tabu", before, rows, after, rows * steps * columns)


@dataclass
class _Walk:
    """What the compiled loop does, in numpy: all outputs of a group at once, (O, P) float32, and changed in place."""

    a: Array
    rest: Array
    slope: Array
    curve: Array
    up: Array
    down: Array
    codes: Array
    qmin: int
    qmax: int

    @staticmethod
    def of(problem: _Problem, group: int) -> _Walk:
        """One group of a problem, whose codes and half gradient are used."""
        a, scale, codes = problem.a[group], problem.scale[group], problem.codes[group]
        columns, padded = a.shape
        more = (0, padded - columns)
        there = np.pad(problem.dead[group, :columns] == 0, more)
        square = np.pad(np.diagonal(a), more)
        wide = np.pad(codes, ((0, 0), more))
        up, down = (np.where(there & (wide != end), np.float32(0), BARRED) for end in (problem.qmax, problem.qmin))
        curve = np.where(there, scale * scale * square, np.float32(0))
        return _Walk(a, problem.rest[group], np.float32(2) * scale, curve, up, down, codes, problem.qmin, problem.qmax)

    def go(self, steps: int, tenure: int) -> None:
        """Leaves the best codes in `codes`."""
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
        """Steps (2 k + went up) of `rows` may be taken back; none where negative."""
        went_up = (steps & 1) == 1
        for side, end, these in ((self.down, self.qmin, went_up), (self.up, self.qmax, ~went_up)):
            row, k = rows[these & (steps >= 0)], steps[these & (steps >= 0)] >> 1
            side[row, k] = np.where(self.codes[row, k] != end, np.float32(0), BARRED)

    def _step(self, rows: Array, k: Array, went_up: Array) -> None:
        """One code of each of `rows`."""
        self.codes[rows, k] += np.where(went_up, 1, -1)
        code = self.codes[rows, k]
        self.up[rows, k] = np.where(went_up & (code < self.qmax), np.float32(0), BARRED)
        self.down[rows, k] = np.where(~went_up & (code > self.qmin), np.float32(0), BARRED)
        slope = self.slope[rows, k]
        half = np.float32(0.5) * np.where(went_up, slope, -slope)
        self.rest[rows] += half[:, None] * self.a[k]


def _padded(rows: Array) -> Array:
    """float32, contiguous, the last axis filled up with zeros."""
    more = -rows.shape[-1] % LANES
    return np.pad(np.ascontiguousarray(rows, np.float32), [(0, 0)] * (rows.ndim - 1) + [(0, more)])
