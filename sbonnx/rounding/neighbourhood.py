"""Descent on many codes at once: sets of columns that depend on one another are rounded anew, all others fixed."""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.moments import Moments
from sbonnx.rounding.base import Grid
from sbonnx.rounding.beam import Planes, columns, search
from sbonnx.rounding.descent import alive
from sbonnx.rounding.factor import damped, ordered_factor
from sbonnx.spec import Array

SIZE: Final = 192
"""Columns of a set: 96 and 192 gained alike on trained layers, 32 half as much."""

BLOCK: Final = 64
"""Columns that are rounded one by one before the others follow."""

DAMPING: Final = 1e-4
"""Of the moments of a set, as a share of their mean: keeps new values near the old where nothing depends on them."""

ENOUGH: Final = 0.005
"""A pass that takes off less than this share of the error is the last."""


def redo(grid: Grid, codes: Array, moments: Moments, beams: int, passes: int) -> Array:
    """`codes` after passes over all columns in sets of about 200, each set rounded anew with a beam.

    With all other codes fixed the error is quadratic in the values v of a set S:
    ``d A_SS d' + 2 d r_S``, ``d`` the change of v and ``r = v A - w B``. It is rounded as a layer of its own with the
    target ``v - r_S A_SS^-1``; an output takes the new codes where they are better by the undamped moments. A set is a
    column drawn at random (always the same ones) and those that correlate with it most.

    Layers with no more columns than a set has are left as they are: for them it would be the first search again.

    Args:
        grid: the weight and what it may become, (G, O, K).
        codes: whole numbers (G, O, K), within the grid's range.
        moments: of the layer's inputs.
        beams: see `sbonnx.rounding.beam`.
        passes: at most so many.

    Returns:
        float64 (G, O, K), a new array, never worse up to rounding.

    Source: large neighbourhood search (Shaw 1998) with Babai's nearest plane; measured here.
    """
    codes = np.array(codes, np.float64)
    if passes == 0 or codes.shape[2] <= SIZE:
        return codes
    rest = grid.values(codes) @ moments.a - grid.weight @ moments.b
    error = moments.error(grid.weight, grid.values(codes)).sum(axis=1) * moments.rows
    for group in range(len(codes)):
        state = _Group(grid, group, moments.a[group], codes[group], rest[group])
        generator = np.random.default_rng(0)
        for _ in range(passes):
            gain = sum(state.redo(chosen, beams) for chosen in state.sets(generator))
            if gain <= ENOUGH * error[group]:
                break
            error[group] -= gain
    return codes


class _Group:
    """One group: its codes (O, K) and the half gradient (O, K) are changed in place."""

    def __init__(self, grid: Grid, group: int, a: Array, codes: Array, rest: Array) -> None:
        self.scale, self.zero = grid.scale[group], grid.zero[group]
        self.qmin, self.qmax = grid.qmin, grid.qmax
        self.a, self.codes, self.rest = a, codes, rest
        self.square = np.diagonal(a)
        self.alive = alive(self.square[None])[0]
        self.inverse_rms = np.where(self.alive, 1.0 / np.sqrt(np.where(self.alive, self.square, 1.0)), 0.0)

    def sets(self, generator: np.random.Generator) -> list[Array]:
        """Every column that is not constant 0 in one of these."""
        left = self.alive.copy()
        found = []
        while left.any():
            seed = generator.choice(np.nonzero(left)[0])
            likeness = np.where(left, np.abs(self.a[seed]) * self.inverse_rms, -1.0)
            likeness[seed] = np.inf
            chosen = np.argsort(-likeness, kind="stable")[: min(SIZE, int(left.sum()))]
            left[chosen] = False
            found.append(np.sort(chosen))
        return found

    def redo(self, chosen: Array, beams: int) -> float:
        """Rounds the columns `chosen` anew; by how much the squared error of all outputs fell."""
        a = self.a[chosen[:, None], chosen]
        ridge = damped(a[None], DAMPING)
        scale, zero, old, rest = (each[:, chosen] for each in (self.scale, self.zero, self.codes, self.rest))
        value = (old - zero) * scale
        target = value - np.linalg.solve(ridge[0], rest.T).T
        part = Grid(target[None], scale[None], zero[None], self.qmin, self.qmax)
        order, factor = ordered_factor(a[None], DAMPING, "pivot")
        found, _ = search(Planes.of(part, order, factor), beams, BLOCK)
        new = columns(found, np.argsort(order, axis=1))[0]
        change = (new - zero) * scale - value
        gain = -np.einsum("ok,ok->o", change @ a + 2 * rest, change)
        better = gain > 0
        self.codes[np.ix_(better, chosen)] = new[better]
        self.rest[better] += change[better] @ self.a[chosen]
        return float(gain[better].sum())
