"""Soft choices between two codes, learned on the quadratic error of a layer's output: the steps of AdaRound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from sbonnx.cpu import cores
from sbonnx.loops import address
from sbonnx.moments import Moments
from sbonnx.rounding import native
from sbonnx.rounding.adam import Adam, factors
from sbonnx.rounding.base import Grid
from sbonnx.rounding.descent import alive
from sbonnx.rounding.native import over_rows
from sbonnx.spec import Array

ZETA: Final = 1.1
GAMMA: Final = -0.1
"""How far the sigmoid is stretched beyond 1 and 0 before it is cut off there. Source: the paper, section 3.2."""

LOOK: Final = 25
"""Every so many steps it is asked which weights are still between two codes."""

PANEL: Final = 32
"""Columns of the matrix that the compiled steps read together."""

SIDE_BY_SIDE: Final = 64
"""Outputs that step together there."""

AT_A_TIME: Final = 1 << 36
"""Products and sums of one call of the compiled steps, about: some seconds, after which Ctrl-C is heard."""


def learn_choices(
    choice: Grid, moments: Moments, share: Array, rate: float, weight: float, betas: Sequence[float | None]
) -> Array:
    """0 or 1 for every weight: the nearer end of h(u) after so many steps of Adam.

        minimise over u:   |w x - v x'|^2  +  weight * sum_k c_k (1 - |2 h(u_k) - 1|^beta),   c_k = scale_k^2 A_kk
        v = (h(u) - zero) * scale,   h(u) = clip(1.2 sigmoid(u) - 0.1, 0, 1)

    A choice that has come to 0 or 1 stays there: it is cut off and has no gradient, and its momentum leads further
    out. So the compiled steps multiply by ever fewer rows and columns, output by output. They and those in numpy,
    which run where they were not compiled, differ in the last bits of exponentials and sums.

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
    """The descent of one layer, float32.

    Rows are divided by their own magnitude and each weight's gradient by the curvature c_k: Adam's steps do not
    depend on it, and the numbers stay near 1.

    Attributes:
        a: twice the moments of the inputs, (G, K, K).
        rest: the gradient where all choices are 0, (G, O, K).
        curve: what gradients are multiplied by, 0 for an input that is constant 0; (G, 1, K) or (G, O, K).
        ratio: scales against the first of their output; None where all are 1.
        u: to begin with, (G, O, K).
    """

    a: Array
    rest: Array
    curve: Array
    ratio: Array | None
    u: Array

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
        return _Problem(
            (2.0 * moments.a / size).astype(np.float32),
            (2.0 * rest / size / first).astype(np.float32),
            (curve if uniform else curve / ratio).astype(np.float32),
            None if uniform else ratio.astype(np.float32),
            (-np.log((ZETA - GAMMA) / (share - GAMMA) - 1.0)).astype(np.float32),
        )

    def in_numpy(self, rate: float, weight: float, betas: Sequence[float | None]) -> Array:
        """u at the end."""
        soft = _Soft(self)
        for step, beta in enumerate(betas):
            soft.step(rate, weight, beta)
            if step % LOOK == 0 and soft.is_settled():
                break
        return soft.u

    def compiled(self, rate: float, weight: float, betas: Sequence[float | None]) -> Array:
        """The same by the loop in C."""
        groups, outputs, columns = self.u.shape
        padded = columns + -columns % PANEL
        wide = np.pad(self.a, ((0, 0), (0, 0), (0, padded - columns)))
        panels = np.ascontiguousarray(wide.reshape(groups, columns, -1, PANEL).swapaxes(1, 2))
        ratio = np.ones_like(self.curve) if self.ratio is None else self.ratio
        rest, curve, ratio, u = (self._row(each, padded) for each in (self.rest, self.curve, ratio, self.u))
        pulls = [(0.0, 0.0) if beta is None else (beta - 1.0, 2.0 * weight * beta) for beta in betas]
        schedule = np.ascontiguousarray(np.concatenate([pulls, factors(rate, len(betas))], axis=1), np.float32)
        before = (*(address(each) for each in (panels, rest, curve, ratio, u, schedule)), outputs, columns, padded)
        rows, work = groups * outputs, columns * padded * len(betas)
        size = max(SIDE_BY_SIDE, AT_A_TIME // max(work, 1)) * cores()
        for first in range(0, rows, size):
            last = min(first + size, rows)
            over_rows("learn", before, last, (len(betas),), (last - first) * work, first=first)
        return np.asarray(u[:, :, :columns])

    def _row(self, values: Array, padded: int) -> Array:
        """One of the arrays for every output, filled up with zeros."""
        row = np.zeros((*self.u.shape[:2], padded), np.float32)
        row[:, :, : values.shape[2]] = values
        return row


@final
class _Soft:
    """The soft choices of one layer and their descent in numpy; float32, (G, O, K)."""

    def __init__(self, problem: _Problem) -> None:
        self._problem = problem
        self.u: Array = problem.u.copy()
        self._moves = (problem.curve != 0.0).astype(np.float32)
        self._adam = Adam(self.u.shape)
        self._sigmoid, self._h, self._gradient, self._part = (np.empty(self.u.shape, np.float32) for _ in range(4))

    def step(self, rate: float, weight: float, beta: float | None) -> None:
        """One step of Adam, with the pull's exponent `beta`, or without it."""
        h, gradient, part, problem = self._h, self._gradient, self._part, self._problem
        self._look()
        if problem.ratio is None:
            np.matmul(h, problem.a, out=gradient)
        else:
            np.matmul(h * problem.ratio, problem.a, out=gradient)
        gradient += problem.rest
        gradient *= problem.curve
        if beta is not None:
            self._pull(weight, beta)
        # h'(u) = 1.2 sigmoid (1 - sigmoid), and 0 where h is cut off.
        np.subtract(1.0, self._sigmoid, out=part)
        part *= self._sigmoid
        part *= ZETA - GAMMA
        gradient *= part
        np.multiply(gradient, (h > 0.0) & (h < 1.0), out=gradient)
        self._adam.step(self.u, gradient, rate)

    def is_settled(self) -> bool:
        """Whether every weight was at one of its codes in the last step."""
        return not bool(((self._h > 0.0) & (self._h < 1.0) & (self._moves > 0.0)).any())

    def _look(self) -> None:
        """h and the sigmoid of u."""
        np.negative(self.u, out=self._sigmoid)
        np.exp(self._sigmoid, out=self._sigmoid)
        self._sigmoid += 1.0
        np.reciprocal(self._sigmoid, out=self._sigmoid)
        np.multiply(self._sigmoid, ZETA - GAMMA, out=self._h)
        self._h += GAMMA
        np.clip(self._h, 0.0, 1.0, out=self._h)

    def _pull(self, weight: float, beta: float) -> None:
        """Adds the gradient of ``weight * (1 - |2 h - 1|^beta)``: ``-2 weight beta |2 h - 1|^(beta - 1) sign``."""
        part = self._part
        np.multiply(self._h, 2.0, out=part)
        part -= 1.0
        sign = np.sign(part)
        np.abs(part, out=part)
        np.power(part, np.float32(beta - 1.0), out=part)
        part *= sign
        part *= self._moves
        part *= 2.0 * weight * beta
        self._gradient -= part
