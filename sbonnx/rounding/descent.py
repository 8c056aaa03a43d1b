"""Coordinate descent: one code at a time to the whole number that is best given all the others."""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.moments import Moments
from sbonnx.rounding.base import Grid
from sbonnx.spec import Array

BLOCK: Final = 64
"""Columns that are kept in step one by one; the others follow by one product of matrices a block."""

DEAD: Final = 1e-10
"""An input whose mean square is below this share of the largest one of its group is read as constant 0."""


def alive(square: Array) -> Array:
    """Which inputs are not constant 0, (G, K), from their mean squares (G, K)."""
    return np.asarray(square > DEAD * square.max(axis=1, keepdims=True))


def descend(grid: Grid, codes: Array, moments: Moments, sweeps: int) -> Array:
    """`codes` after descending the squared output error; never worse than before, up to rounding.

    The error is quadratic in each code: ``v A v' - 2 w B v'`` with the gradient ``2 r``, ``r = v A - w B``, has its
    least over v_k at ``v_k - r_k / A_kk``. Every output takes that step, rounded to its own codes, one column after
    another; sweeps end when no code changes.

    Args:
        grid: the weight and what it may become, (G, O, K).
        codes: whole numbers (G, O, K) of any type, within the grid's range.
        moments: of the layer's inputs.
        sweeps: at most so many passes over the columns.

    Returns:
        float64 whole numbers (G, O, K), a new array.
    """
    codes = np.array(codes, np.float64)
    if sweeps == 0:
        return codes
    rest = grid.values(codes) @ moments.a - grid.weight @ moments.b
    diagonal = np.einsum("gkk->gk", moments.a)
    moves = alive(diagonal)
    step = np.where(moves, -1.0 / np.where(moves, diagonal, 1.0), 0.0)[:, None, :] / grid.scale
    state = _State(
        codes.astype(np.float32),
        rest.astype(np.float32),
        step.astype(np.float32),
        np.ascontiguousarray(grid.scale, np.float32),
        moments.a.astype(np.float32),
    )
    # Outputs that no longer move are left out: rows where there is one group, else whole groups.
    axis = 1 if len(codes) == 1 else 0
    moving = np.arange(codes.shape[axis])
    for _ in range(sweeps):
        moved = np.asarray(state.sweep(grid.qmin, grid.qmax).any(axis=1 - axis))
        codes[(slice(None), moving) if axis else moving] = state.codes
        if not moved.any():
            break
        if moved.mean() < 0.8:
            state, moving = state.only(moved, axis), moving[moved]
    return codes


class _State:
    """The codes that still move, and what the next step needs: all float32, (G, O, K), but for `a`, (G, K, K)."""

    def __init__(self, codes: Array, rest: Array, step: Array, scale: Array, a: Array) -> None:
        self.codes = codes
        self.rest = rest
        self.step = step
        self.scale = scale
        self.a = a

    def only(self, moved: Array, axis: int) -> _State:
        """The rows (axis 1) or the groups (axis 0) that `moved` says."""
        codes, rest, step, scale = (
            np.compress(moved, part, axis) for part in (self.codes, self.rest, self.step, self.scale)
        )
        return _State(codes, rest, step, scale, self.a if axis else self.a[moved])

    def sweep(self, qmin: int, qmax: int) -> Array:
        """One pass over all columns; which outputs (G, O) changed."""
        moved = np.zeros(self.codes.shape[:2], bool)
        for start in range(0, self.codes.shape[2], BLOCK):
            part = slice(start, start + BLOCK)
            change = self._block(part, qmin, qmax)
            if change is not None:
                moved |= change.any(axis=2)
                self.rest += change @ self.a[:, part]
        return moved

    def _block(self, part: slice, qmin: int, qmax: int) -> Array | None:
        """Moves the codes of the columns `part`; by how much values changed, (G, O, B), or None for nowhere."""
        rest = self.rest[:, :, part].copy()
        corner = self.a[:, part, part]
        change = np.zeros_like(rest)
        anywhere = False
        for k in range(rest.shape[2]):
            at = part.start + k
            old = self.codes[:, :, at]
            new = np.clip(np.rint(old + rest[:, :, k] * self.step[:, :, at]), qmin, qmax)
            delta = (new - old) * self.scale[:, :, at]
            where = np.nonzero(delta)
            if where[0].size == 0:
                continue
            anywhere = True
            self.codes[:, :, at] = new
            change[:, :, k] = delta
            rest[where] += delta[where][:, None] * corner[where[0], k]
        return change if anywhere else None
