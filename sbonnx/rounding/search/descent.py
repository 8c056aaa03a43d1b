"""Coordinate descent: sets one code at a time to its optimum given all others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from sbonnx.moments import Moments
from sbonnx.rounding import base
from sbonnx.rounding.base import Grid, limit_rows, over_rows
from sbonnx.spec import Array
from sbonnx.system.native import address

DEAD: Final = 1e-10
"""Inputs with a mean square below this share of the largest one of their group are treated as constant 0 (dead)."""


def alive(square: Array) -> Array:
    """Return which inputs are not constant 0, (G, K), from their mean squares (G, K)."""
    return np.asarray(square > DEAD * square.max(axis=1, keepdims=True))


def descend(grid: Grid, codes: Array, moments: Moments, sweeps: int) -> Array:
    """Minimize the squared output error by coordinate descent. Never worse than `codes`, up to float rounding.

    The error is quadratic in each code: ``v A v' - 2 w B v'`` with the gradient ``2 r``, ``r = v A - w B``, has its
    minimum over v_k at ``v_k - r_k / A_kk``. Every output takes this step, rounded to its grid, one column after
    another. Sweeps end when no code changes.

    Args:
        grid: the weight and its quantization grid, (G, O, K).
        codes: integers (G, O, K) of any type, within the grid's range.
        moments: of the layer's inputs.
        sweeps: maximum number of passes over the columns.

    Returns:
        integers in the type of the grid, (G, O, K), a new array.
    """
    before = np.array(codes, grid.weight.dtype)
    return before if sweeps == 0 or before.size == 0 else descend_from(grid, before, moments, sweeps)[0]


def descend_from(grid: Grid, codes: Array, moments: Moments, sweeps: int) -> tuple[Array, Array]:
    """Return the codes of `descend`, and half the gradient there by the dequantized values, float32 (G, O, K)."""
    rest = moments.gradient(grid.weight, grid.values(codes))
    diagonal = np.einsum("gkk->gk", moments.a)
    moves = alive(diagonal)
    step = np.where(moves, -1.0 / np.where(moves, diagonal, 1.0), 0.0)[:, None, :] / grid.scale
    short = partial(np.ascontiguousarray, dtype=np.float32)
    state = _State(short(codes), short(rest), short(step), short(grid.scale), short(moments.a), grid.qmin, grid.qmax)
    moved, rest = state.in_numpy(sweeps) if base.loops is None else state.compiled(sweeps)
    return moved.astype(grid.weight.dtype, copy=False), rest


@dataclass(frozen=True)
class _State:
    """Codes and intermediate results of the descent, float32 (G, O, K), except `a`, (G, K, K); limits of the grid."""

    codes: Array
    rest: Array
    step: Array
    scale: Array
    a: Array
    low: Array
    high: Array

    def compiled(self, sweeps: int) -> tuple[Array, Array]:
        """Return the codes after `sweeps` sweeps, and `rest`. Processes one output after another."""
        groups, outputs, columns = self.codes.shape
        arrays = (address(array) for array in (self.a, self.rest, self.step, self.scale, self.codes))
        rows = groups * outputs
        (low, apart), (high, _) = (limit_rows(end, np.float32) for end in (self.low, self.high))
        before = (*arrays, address(low), address(high), outputs, columns, apart)
        over_rows("descend", before, rows, (sweeps,), rows * columns * sweeps)
        return self.codes, self.rest

    def in_numpy(self, sweeps: int) -> tuple[Array, Array]:
        """Fallback of `compiled` without the compiled loop, column by column. Bit-identical."""
        # Converged outputs are left out: rows if there is one group, else whole groups.
        codes, rest = self.codes.copy(), self.rest.copy()
        axis = 1 if len(codes) == 1 else 0
        state, moving = self, np.arange(codes.shape[axis])
        for _ in range(sweeps):
            moved = np.asarray(state.sweep().any(axis=1 - axis))
            where = (slice(None), moving) if axis else moving
            codes[where], rest[where] = state.codes, state.rest
            if not moved.any():
                break
            if moved.mean() < 0.8:
                state, moving = state.only(moved, axis), moving[moved]
        return codes, rest

    def only(self, moved: Array, axis: int) -> _State:
        """Select the rows (axis 1) or the groups (axis 0) given by the mask `moved`."""
        codes, rest, step, scale, low, high = (
            np.compress(moved, part, axis)
            for part in (self.codes, self.rest, self.step, self.scale, self.low, self.high)
        )
        a = self.a if axis else self.a[moved]
        return replace(self, codes=codes, rest=rest, step=step, scale=scale, a=a, low=low, high=high)

    def sweep(self) -> Array:
        """Perform one pass over all columns. Return which outputs (G, O) changed."""
        changed = np.zeros(self.codes.shape[:2], bool)
        for k in range(self.codes.shape[2]):
            old = self.codes[:, :, k]
            new = np.rint(old + self.rest[:, :, k] * self.step[:, :, k])
            new = np.clip(new, self.low[:, :, k], self.high[:, :, k]).astype(np.float32)
            delta = (new - old) * self.scale[:, :, k]
            where = np.nonzero(delta)
            if where[0].size:
                self.codes[:, :, k] = new
                self.rest[where] += delta[where][:, None] * self.a[where[0], k]
                changed[where] = True
        return changed
