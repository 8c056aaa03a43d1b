"""Adam, and its steps in AdaRound: soft rounding choices, optimized on the quadratic output error of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from sbonnx.moments import Moments
from sbonnx.rounding.base import Grid
from sbonnx.rounding.search.descent import alive
from sbonnx.spec import Array

DECAY: Final = 0.9
DECAY_SQUARE: Final = 0.999
TINY: Final = 1e-8
"""Hyperparameters of the paper, which are also torch's defaults."""


def factors(rate: float, steps: int) -> Array:
    """Return the bias-corrected step factors ``rate / (1 - 0.9^t)`` and ``1 / (1 - 0.999^t)``, t from 1, (steps, 2)."""
    t = np.arange(1.0, steps + 1.0)
    return np.stack([rate / (1.0 - DECAY**t), 1.0 / (1.0 - DECAY_SQUARE**t)], axis=1)


@final
class Adam:
    """Adam optimizer with per-element step sizes.

        m = 0.9 m + 0.1 g,   v = 0.999 v + 0.001 g^2,   x -= rate * (m / (1 - 0.9^t)) / (sqrt(v / (1 - 0.999^t)) + 1e-8)

    Source: Kingma & Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 1.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._mean = np.zeros(shape, np.float32)
        self._square = np.zeros(shape, np.float32)
        self._part = np.empty(shape, np.float32)
        self._steps = 0

    def step(self, values: Array, gradient: Array, rate: float) -> None:
        """Update `values`, float32, in place. `gradient`, float32 of the same shape, is overwritten."""
        self._steps += 1
        part = self._part
        np.subtract(gradient, self._mean, out=part)
        part *= 1.0 - DECAY
        self._mean += part
        np.multiply(gradient, gradient, out=gradient)
        gradient -= self._square
        gradient *= 1.0 - DECAY_SQUARE
        self._square += gradient
        np.multiply(self._square, 1.0 / (1.0 - DECAY_SQUARE**self._steps), out=part)
        np.sqrt(part, out=part)
        part += TINY
        np.divide(self._mean, part, out=part)
        part *= rate / (1.0 - DECAY**self._steps)
        values -= part


ZETA: Final = 1.1
GAMMA: Final = -0.1
"""Stretch limits of the sigmoid, which is then clipped to [0, 1]. Source: the AdaRound paper, section 3.2."""

LOOK: Final = 25
"""Interval in steps at which weights that have reached 0 or 1 are frozen."""

STEPS_OF_A: Final = 2.0**-22
"""Step to which twice the moments (at most 2) are rounded, so that float32 represents them exactly."""

MANTISSA: Final = 52
"""Sums of integers below 2^52 are exact in float64, and so is rounding by adding 1.5 * 2^52."""


def learn_choices(
    choice: Grid, moments: Moments, share: Array, rate: float, weight: float, betas: Sequence[float | None]
) -> Array:
    """Optimize soft choices by Adam and return 0 or 1 for every weight: h(u) rounded after the last step.

            minimise over u:   |w x - v x'|^2  +  weight * sum_k c_k (1 - |2 h(u_k) - 1|^beta),   c_k = scale_k^2 A_kk
            v = (h(u) - zero) * scale,   h(u) = clip(1.2 sigmoid(u) - 0.1, 0, 1)

    A choice that has reached 0 or 1 stays there: it is clipped, its gradient is 0, and its momentum points further out.
    The same quantized weights result with any BLAS and any number of threads: factors of products are rounded so that
    sums are exact in any order, and all other operations are elementwise in float32.

    Args:
        choice: grid with the codes 0 and 1.
        moments: of the layer's inputs.
        share: initial h, within (0, 1), (G, O, K).
        rate: learning rate of Adam, in units of u.
        weight: weight of the regularizer that pulls choices to 0 or 1.
        betas: exponent of the regularizer in each step; None: no regularizer.

    Returns:
        float64 (G, O, K).
    """
    u = _SoftProblem.of(choice, moments, share).solve(rate, weight, betas)
    return (u >= 0.0).astype(np.float64)


@final
@dataclass(frozen=True)
class _SoftProblem:
    """The optimization problem of one layer.

    Rows are divided by their magnitude and each weight's gradient by the curvature c_k, so that numbers stay near 1;
    Adam's steps do not depend on this scaling. Factors of products are multiples of powers of two, such that all sums
    of products are exact in float64.

    Attributes:
        a: twice the moments of the inputs, (G, K, K), float64, in steps of `STEPS_OF_A`.
        rest: the gradient if all choices are 0, (G, O, K), float64, in steps of ``unit * STEPS_OF_A``.
        curve: factor of the gradients, 0 for an input that is constant 0; (G, 1, K) or (G, O, K), float32.
        ratio: scales relative to the first one of their output, (G, O, K), float32; None if all are 1.
        u: initial value, (G, O, K), float32.
        unit: rounding step of dequantized choices, in units of the first scale.
    """

    a: Array
    rest: Array
    curve: Array
    ratio: Array | None
    u: Array
    unit: float

    @staticmethod
    def of(choice: Grid, moments: Moments, share: Array) -> _SoftProblem:
        square = np.einsum("gkk->gk", moments.a)
        moves = alive(square)
        size = np.maximum(square.max(axis=1), np.finfo(np.float32).tiny)[:, None, None]
        # Dead inputs get the factor 0, so that their gradient and their regularizer are 0.
        curve = np.where(moves, size[:, :, 0] / np.where(moves, square, 1.0), 0.0)[:, None, :]
        rest = moments.gradient(choice.weight, choice.values(np.zeros_like(share)))
        first = choice.scale[:, :, :1]
        ratio = choice.scale / first
        uniform = bool((ratio == 1.0).all())
        a, rest = _in_steps(2.0 * moments.a / size, STEPS_OF_A), 2.0 * rest / size / first
        unit = _unit(a, rest, 1.0 if uniform else float(ratio.max()))
        return _SoftProblem(
            a,
            _in_steps(rest, unit * STEPS_OF_A),
            (curve if uniform else curve / ratio).astype(np.float32),
            None if uniform else ratio.astype(np.float32),
            (-np.log((ZETA - GAMMA) / (share - GAMMA) - 1.0)).astype(np.float32),
            unit,
        )

    @property
    def magic(self) -> float:
        """Constant that rounds a float64 to multiples of `unit` when added and subtracted."""
        return 1.5 * 2.0**MANTISSA * self.unit

    def solve(self, rate: float, weight: float, betas: Sequence[float | None]) -> Array:
        """Run Adam and return the final u."""
        soft = _Soft(self)
        for step, (exponent, strength, pace, scale) in enumerate(_schedule(rate, weight, betas)):
            soft.look()
            if step % LOOK == LOOK - 1 and soft.settle():
                break
            soft.move(exponent, strength, pace, scale)
        return soft.u


def _in_steps(values: Array, step: float) -> Array:
    return np.asarray(np.rint(values / step) * step)


def _unit(a: Array, rest: Array, largest: float) -> float:
    """Return the finest step of dequantized choices for which every sum of products, plus `rest`, is exact.

    Args:
        largest: largest scale relative to the first one of its output.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        bound = float(np.abs(rest).max(initial=0.0) + a.shape[1] * np.abs(a).max(initial=0.0) * largest)
    if not 0.0 < bound < np.inf:
        bound = 1.0  # nothing to learn, or nothing to learn from
    return float(2.0 ** (np.ceil(np.log2(bound)) + 1 - MANTISSA) / STEPS_OF_A)


def _schedule(rate: float, weight: float, betas: Sequence[float | None]) -> Array:
    """Tabulate for each step exponent and strength of the regularizer's gradient, and `factors`; float32 (steps, 4)."""
    pulls = [(0.0, 0.0) if beta is None else (beta - 1.0, 2.0 * weight * beta) for beta in betas]
    return np.ascontiguousarray(np.concatenate([pulls, factors(rate, len(betas))], axis=1), np.float32)


@final
class _Soft:
    """Soft choices of one layer and their optimization."""

    def __init__(self, problem: _SoftProblem) -> None:
        shape = problem.u.shape
        self._problem = problem
        self.u: Array = problem.u.copy()
        self._curve = np.array(np.broadcast_to(problem.curve, shape))
        self._mean, self._square = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._sigmoid = self._h = self.u

    def look(self) -> None:
        """Update h and the sigmoid of u."""
        self._sigmoid = ONE / (ONE + _exponential(-self.u))
        self._h = np.clip(self._sigmoid * SPREAD + np.float32(GAMMA), 0.0, 1.0)

    def settle(self) -> bool:
        """Freeze weights that have reached 0 or 1. Return whether all are frozen."""
        done = ~((self._h > 0.0) & (self._h < 1.0)) | (self._curve == 0.0)
        self._curve[done] = self._mean[done] = 0.0
        return bool(done.all())

    def move(self, exponent: np.float32, strength: np.float32, rate: np.float32, scale: np.float32) -> None:
        """Perform one step of Adam."""
        slope = self._slope(exponent, strength)
        self._mean += DECAYED * (slope - self._mean)
        self._square += DECAYED_SQUARE * (slope * slope - self._square)
        self.u -= rate * (self._mean / (np.sqrt(self._square * scale) + np.float32(TINY)))

    def _slope(self, exponent: np.float32, strength: np.float32) -> Array:
        """Return the gradient of error and regularizer by u.

        h'(u) = 1.2 sigmoid (1 - sigmoid), and 0 where h is clipped.
        """
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

TAYLOR: Final = tuple(ONE / np.float32(each) for each in (720, 120, 24, 6, 2, 1, 1))
"""Taylor coefficients of the exponential, highest power first."""

ODD: Final = tuple(ONE / np.float32(each) for each in (7, 5, 3, 1))
"""Coefficients of the logarithm's odd series, highest power first."""


def _exponential(x: Array) -> Array:
    """Compute e^x in float32 by elementary operations: the same bits with every numpy and processor."""
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
    """Compute the natural logarithm of x in [0, 1] in float32, as `_exponential`."""
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
