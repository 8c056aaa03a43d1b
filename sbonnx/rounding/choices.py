"""Soft choices between two codes, learned on the quadratic error of a layer's output: the steps of AdaRound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from sbonnx.cpu import cores
from sbonnx.moments import Moments
from sbonnx.native import address
from sbonnx.rounding.adam import TINY, factors
from sbonnx.rounding.base import Grid
from sbonnx.rounding.search import compiled as native
from sbonnx.rounding.search.compiled import over_rows
from sbonnx.rounding.search.descent import alive
from sbonnx.spec import Array

ZETA: Final = 1.1
GAMMA: Final = -0.1
"""How far the sigmoid is stretched beyond 1 and 0 before it is cut off there. Source: the paper, section 3.2."""

LOOK: Final = 25
"""Every so many steps weights that are at one of their codes are settled: they move no more."""

PANEL: Final = 16
"""Columns of the matrix that the compiled steps read together."""

SIDE_BY_SIDE: Final = 64
"""Outputs that step together there."""

STEPS_OF_A: Final = 2.0**-22
"""Twice the moments, 2 or less, are rounded to whole multiples of this, which float32 holds."""

MANTISSA: Final = 52
"""Sums of whole numbers below 2^52 are exact in float64, and so is the rounding by adding 1.5 * 2^52."""

AT_A_TIME: Final = 1 << 36
"""Products and sums of one call of the compiled steps, about: some seconds, after which Ctrl-C is heard."""


def learn_choices(
    choice: Grid, moments: Moments, share: Array, rate: float, weight: float, betas: Sequence[float | None]
) -> Array:
    """0 or 1 for every weight: the nearer end of h(u) after so many steps of Adam.

        minimise over u:   |w x - v x'|^2  +  weight * sum_k c_k (1 - |2 h(u_k) - 1|^beta),   c_k = scale_k^2 A_kk
        v = (h(u) - zero) * scale,   h(u) = clip(1.2 sigmoid(u) - 0.1, 0, 1)

    A choice that has come to 0 or 1 stays there: it is cut off and has no gradient, and its momentum leads further
    out. So the compiled steps multiply by ever fewer rows and columns, output by output. Those in numpy, which run
    where they were not compiled, give the same numbers, bit for bit: the factors of products are rounded so that sums
    are exact in any order, and everything else is done in the same operations of float32.

    Args:
        choice: a grid of the codes 0 and 1.
        moments: of the layer's inputs.
        share: h to begin with, within (0, 1), (G, O, K).
        rate: of Adam, in units of u.
        weight: of the pull to 0 and 1.
        betas: the exponent in each step; None: no pull.

    Returns:
        float64 (G, O, K).
    """
    problem = _Problem.of(choice, moments, share)
    u = problem.in_numpy(rate, weight, betas) if native.loops is None else problem.compiled(rate, weight, betas)
    return (u >= 0.0).astype(np.float64)


@final
@dataclass(frozen=True)
class _Problem:
    """The descent of one layer.

    Rows are divided by their own magnitude and each weight's gradient by the curvature c_k: Adam's steps do not
    depend on it, and the numbers stay near 1. Factors of products are whole multiples of powers of two, such that all
    sums of products are exact in float64.

    Attributes:
        a: twice the moments of the inputs, (G, K, K), float64, in steps of `STEPS_OF_A`.
        rest: the gradient where all choices are 0, (G, O, K), float64, in steps of ``unit * STEPS_OF_A``.
        curve: what gradients are multiplied by, 0 for an input that is constant 0; (G, 1, K) or (G, O, K), float32.
        ratio: scales against the first of their output, (G, O, K), float32; None where all are 1.
        u: to begin with, (G, O, K), float32.
        unit: steps of what choices mean, in units of the first scale.
    """

    a: Array
    rest: Array
    curve: Array
    ratio: Array | None
    u: Array
    unit: float

    @staticmethod
    def of(choice: Grid, moments: Moments, share: Array) -> _Problem:
        square = np.einsum("gkk->gk", moments.a)
        moves = alive(square)
        size = np.maximum(square.max(axis=1), np.finfo(np.float32).tiny)[:, None, None]
        # Without a divisor of its own the gradient of a dead input is 0, and so is its pull.
        curve = np.where(moves, size[:, :, 0] / np.where(moves, square, 1.0), 0.0)[:, None, :]
        rest = choice.values(np.zeros_like(share)) @ moments.a - choice.weight @ moments.b
        first = choice.scale[:, :, :1]
        ratio = choice.scale / first
        uniform = bool((ratio == 1.0).all())
        a, rest = _in_steps(2.0 * moments.a / size, STEPS_OF_A), 2.0 * rest / size / first
        unit = _unit(a, rest, 1.0 if uniform else float(ratio.max()))
        return _Problem(
            a,
            _in_steps(rest, unit * STEPS_OF_A),
            (curve if uniform else curve / ratio).astype(np.float32),
            None if uniform else ratio.astype(np.float32),
            (-np.log((ZETA - GAMMA) / (share - GAMMA) - 1.0)).astype(np.float32),
            unit,
        )

    @property
    def magic(self) -> float:
        """Added and taken off again, it rounds a float64 to whole multiples of `unit`."""
        return 1.5 * 2.0**MANTISSA * self.unit

    def in_numpy(self, rate: float, weight: float, betas: Sequence[float | None]) -> Array:
        """u at the end."""
        soft = _Soft(self)
        for step, (exponent, strength, pace, scale) in enumerate(_schedule(rate, weight, betas)):
            soft.look()
            if step % LOOK == LOOK - 1 and soft.settle():
                break
            soft.move(exponent, strength, pace, scale)
        return soft.u

    def compiled(self, rate: float, weight: float, betas: Sequence[float | None]) -> Array:
        """The same by the loop in C."""
        groups, outputs, columns = self.u.shape
        padded = columns + -columns % PANEL
        wide = np.pad(self.a, ((0, 0), (0, 0), (0, padded - columns)))
        panels = np.ascontiguousarray(wide.reshape(groups, columns, -1, PANEL).swapaxes(1, 2), np.float32)
        ratio = np.ones_like(self.curve) if self.ratio is None else self.ratio
        rest, curve, ratio, u = (self._row(each, padded) for each in (self.rest, self.curve, ratio, self.u))
        schedule = _schedule(rate, weight, betas)
        arrays = (address(each) for each in (panels, rest, curve, ratio, u, schedule))
        before = (*arrays, self.magic, outputs, columns, padded)
        rows, work = groups * outputs, columns * padded * len(betas)
        size = max(SIDE_BY_SIDE, AT_A_TIME // max(work, 1)) * cores()
        for first in range(0, rows, size):
            last = min(first + size, rows)
            over_rows("learn", before, last, (len(betas),), (last - first) * work, first=first)
        return np.asarray(u[:, :, :columns])

    def _row(self, values: Array, padded: int) -> Array:
        """One of the arrays for every output, filled up with zeros."""
        row = np.zeros((*self.u.shape[:2], padded), values.dtype)
        row[:, :, : values.shape[2]] = values
        return row


def _in_steps(values: Array, step: float) -> Array:
    """Whole multiples of a power of two."""
    return np.asarray(np.rint(values / step) * step)


def _unit(a: Array, rest: Array, largest: float) -> float:
    """Steps of what choices mean: the finest in which every sum of products, and of `rest`, is exact.

    Args:
        largest: scale against the first of its output.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        bound = float(np.abs(rest).max(initial=0.0) + a.shape[1] * np.abs(a).max(initial=0.0) * largest)
    if not 0.0 < bound < np.inf:
        bound = 1.0  # nothing to learn, or nothing to learn from
    return float(2.0 ** (np.ceil(np.log2(bound)) + 1 - MANTISSA) / STEPS_OF_A)


def _schedule(rate: float, weight: float, betas: Sequence[float | None]) -> Array:
    """Of each step: exponent and strength of the pull's gradient, and `factors`; float32 (steps, 4)."""
    pulls = [(0.0, 0.0) if beta is None else (beta - 1.0, 2.0 * weight * beta) for beta in betas]
    return np.ascontiguousarray(np.concatenate([pulls, factors(rate, len(betas))], axis=1), np.float32)


@final
class _Soft:
    """The soft choices of one layer and their descent in numpy: the operations of `_learn.c`, one after another."""

    def __init__(self, problem: _Problem) -> None:
        shape = problem.u.shape
        self._problem = problem
        self.u: Array = problem.u.copy()
        self._curve = np.array(np.broadcast_to(problem.curve, shape))
        self._mean, self._square = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._sigmoid = self._h = self.u

    def look(self) -> None:
        """h and the sigmoid of u."""
        self._sigmoid = ONE / (ONE + _exponential(-self.u))
        self._h = np.clip(self._sigmoid * SPREAD + np.float32(GAMMA), 0.0, 1.0)

    def settle(self) -> bool:
        """Weights that are at one of their codes move no more; whether all are."""
        done = ~((self._h > 0.0) & (self._h < 1.0)) | (self._curve == 0.0)
        self._curve[done] = self._mean[done] = 0.0
        return bool(done.all())

    def move(self, exponent: np.float32, strength: np.float32, rate: np.float32, scale: np.float32) -> None:
        """One step of Adam."""
        slope = self._slope(exponent, strength)
        self._mean += DECAYED * (slope - self._mean)
        self._square += DECAYED_SQUARE * (slope * slope - self._square)
        self.u -= rate * (self._mean / (np.sqrt(self._square * scale) + np.float32(TINY)))

    def _slope(self, exponent: np.float32, strength: np.float32) -> Array:
        """Of the error and of the pull, along u; h'(u) = 1.2 sigmoid (1 - sigmoid), and 0 where h is cut off."""
        problem, h, sigmoid = self._problem, self._h, self._sigmoid
        values = (h if problem.ratio is None else h * problem.ratio).astype(np.float64)
        values += problem.magic
        values -= problem.magic
        slope = (values @ problem.a + problem.rest).astype(np.float32) * self._curve
        if strength:
            off = TWO * h - ONE
            slope -= np.copysign(strength * _exponential(exponent * _logarithm(np.abs(off))), off)
        moves = (h > 0.0) & (h < 1.0) & (self._curve != 0.0)
        return np.asarray(slope * np.where(moves, sigmoid * (ONE - sigmoid) * SPREAD, np.float32(0)))


ONE, TWO = np.float32(1), np.float32(2)
SPREAD: Final = np.float32(ZETA) - np.float32(GAMMA)
DECAYED, DECAYED_SQUARE = np.float32(0.1), np.float32(0.001)
"""As in `_learn.c`."""

TAYLOR: Final = tuple(ONE / np.float32(each) for each in (720, 120, 24, 6, 2, 1, 1))
"""Of the exponential, the highest power first."""

ODD: Final = tuple(ONE / np.float32(each) for each in (7, 5, 3, 1))
"""Of the logarithm, likewise."""


def _exponential(x: Array) -> Array:
    """e^x, float32, as in `_learn.c`."""
    magic = np.float32(12582912.0)
    x = np.fmin(np.fmax(x, np.float32(-87)), np.float32(88))
    n = (x * np.float32(1.44269504) + magic) - magic
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    p = np.full_like(r, TAYLOR[0])
    for factor in TAYLOR[1:]:
        p *= r
        p += factor
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    return np.asarray(p * power)


def _logarithm(x: Array) -> Array:
    """The natural logarithm of x in [0, 1], float32, as in `_learn.c`."""
    shifted = x.view(np.int32) - 0x3F3504F3
    n = (shifted >> 23).astype(np.float32)
    m = ((shifted & 0x007FFFFF) + 0x3F3504F3).view(np.float32)
    s = (m - ONE) / (m + ONE)
    z = s * s
    p = np.full_like(z, ODD[0])
    for factor in ODD[1:]:
        p *= z
        p += factor
    return np.asarray(n * np.float32(0.693147181) + TWO * s * p)
