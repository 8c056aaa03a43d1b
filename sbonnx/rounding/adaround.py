"""AdaRound by moments: each weight up or down, learned on the exact squared error of the layer's output."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, Literal, final

import numpy as np

from sbonnx.errors import NumericError
from sbonnx.moments import Moments
from sbonnx.rounding.adam import Adam
from sbonnx.rounding.base import Grid, Rounder
from sbonnx.rounding.descent import alive, descend
from sbonnx.rounding.gptq import Gptq
from sbonnx.spec import Array, QParams

Start = Literal["gptq", "nearest"]
Ramp = Literal["cosine", "linear"]

ZETA: Final = 1.1
GAMMA: Final = -0.1
"""How far the sigmoid is stretched beyond 1 and 0 before it is cut off there. Source: the paper, section 3.2."""

MARGIN: Final = 0.01
"""How near 0 or 1 a weight may begin: where the sigmoid is cut off it has no gradient to leave by."""

LOOK: Final = 25
"""Every so many steps it is asked whether any weight is still between two codes."""


@final
class AdaRound(Rounder):
    """Every weight to one of the two codes beside it, chosen by gradient descent on soft choices.

        v = (low + h(u) - zero) * scale,   h(u) = clip(1.2 sigmoid(u) - 0.1, 0, 1)
        minimise over u:   |w x - v x'|^2  +  weight * sum_k c_k (1 - |2 h(u_k) - 1|^beta),   c_k = scale_k^2 A_kk

    beta falls from ``beta_start`` to ``beta_end``, so that first the weights near a code and then all others are
    pulled to 0 or 1. The error is the quadratic form of the moments and its gradient ``2 (v A - w B)``: a step costs
    one product of (outputs, K) by (K, K), however many samples were seen, and nothing is drawn at random. At the end
    each weight goes to the nearer of its two codes, and coordinate descent between those two settles the rest.

    The two codes are those beside the weight (``start="nearest"``), or those beside the value that would be best for
    the weight if all others kept gptq's codes (``start="gptq"``), one of which is gptq's: that reaches codes further
    from the weight, which make up for errors of earlier layers, and the result is then never worse than gptq's.

    The ancestor's numbers (Adam at 0.001, 20,000 steps in batches of 32, weight 0.001 on the plain sum, linear) and
    the paper's (0.01, 10,000) need ten times the steps here for a larger error: ``weight`` is in units of each
    weight's own part c_k of the error, which makes it the same for every layer, and the larger rate is safe because
    the gradient has no noise.

    Args:
        iterations: steps of Adam.
        lr: its learning rate, in units of u.
        warmup: share of the steps before the pull to whole codes begins.
        weight: of that pull, against the error that one code makes in one weight alone.
        beta_start, beta_end: the exponent when the pull begins and at the end.
        schedule: how it goes from one to the other, "cosine" (half a wave) or "linear".
        start: whose codes to begin with.
        sweeps: at most so many of coordinate descent at the end, between the two codes.

    Source: Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization", equations 21 to 25.
    """

    def __init__(
        self,
        iterations: int = 1000,
        lr: float = 0.1,
        warmup: float = 0.2,
        weight: float = 0.2,
        beta_start: float = 20.0,
        beta_end: float = 2.0,
        schedule: Ramp = "cosine",
        start: Start = "gptq",
        sweeps: int = 20,
    ) -> None:
        if iterations < 1 or sweeps < 0 or not 0 <= warmup < 1:
            raise ValueError("iterations must be >= 1, sweeps >= 0 and warmup within [0, 1)")
        self.iterations = iterations
        self.lr = lr
        self.warmup = warmup
        self.weight = weight
        self.beta_start = beta_start
        self.beta_end = beta_end
        self.schedule = schedule
        self.start = start
        self.sweeps = sweeps

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """See `Rounder.solve`.

        Raises:
            NumericError: the moments hold NaN or Inf.
        """
        first = first_codes(self.start, grid, moments, qparams)
        value = grid.ratio() if self.start == "nearest" else best_alone(grid, first, moments)
        low = lower_codes(grid, first, value)
        # The same weights with 0 and 1 for the two codes.
        choice = replace(grid, zero=grid.zero - low, qmin=0, qmax=1)
        share = np.clip(value - low, MARGIN, 1.0 - MARGIN)
        soft = _Soft(choice, moments, share)
        for step in range(self.iterations):
            soft.step(self.lr, self.weight, self.beta(step))
            if step % LOOK == 0 and soft.is_settled():
                break
        codes = low + descend(choice, soft.choices(), moments, self.sweeps)
        if self.start == "nearest":
            return codes, qparams
        before, after = (moments.error(grid.weight, grid.values(each)) for each in (first, codes))
        return np.where((after < before)[..., None], codes, first), qparams

    def beta(self, step: int) -> float | None:
        """The exponent of the pull at `step`, None before it begins."""
        begin = self.warmup * self.iterations
        if step < begin:
            return None
        way = (step - begin) / (self.iterations - begin)
        left = 1.0 - way if self.schedule == "linear" else (1.0 + math.cos(math.pi * way)) / 2.0
        return self.beta_end + (self.beta_start - self.beta_end) * left


def first_codes(start: Start, grid: Grid, moments: Moments, qparams: QParams) -> Array:
    """The codes that learning starts from, (G, O, K).

    Raises:
        NumericError: the moments hold NaN or Inf.
    """
    if start == "gptq":
        return Gptq().solve(grid, moments, qparams)[0]
    if not (np.isfinite(moments.a).all() and np.isfinite(moments.b).all()):
        raise NumericError("the inputs of the layer hold NaN or infinite values")
    return np.clip(np.rint(grid.ratio()), grid.qmin, grid.qmax)


def best_alone(grid: Grid, codes: Array, moments: Moments) -> Array:
    """For each weight the code, not rounded, of least error while all others keep theirs: (G, O, K) of (G, O, K).

    At least half a code off for a code that coordinate descent would move; the weight itself where the input is
    constant 0.
    """
    rest = grid.values(codes) @ moments.a - grid.weight @ moments.b
    square = np.einsum("gkk->gk", moments.a)
    moves = alive(square)
    step = np.where(moves, 1.0 / np.where(moves, square, 1.0), 0.0)[:, None, :] * rest / grid.scale
    return np.where(moves[:, None, :], codes - step, grid.ratio())


def lower_codes(grid: Grid, codes: Array, value: Array) -> Array:
    """The lower one of the two codes beside `value` of which one is `codes`; both within the grid. (G, O, K)."""
    low = np.where(value < codes, codes - 1, codes)
    return np.clip(low, grid.qmin, grid.qmax - 1)


@final
class _Soft:
    """The soft choices of one layer, h(u) between codes 0 and 1, and their descent; float32, (G, O, K).

    Rows are divided by their own magnitude and each weight's gradient by the curvature c_k: Adam's steps do not
    depend on it, and the numbers stay near 1.
    """

    def __init__(self, choice: Grid, moments: Moments, share: Array) -> None:
        square = np.einsum("gkk->gk", moments.a)
        moves = alive(square)
        size = np.maximum(square.max(axis=1), np.finfo(np.float32).tiny)[:, None, None]
        # Without a divisor of its own the gradient of a dead input is 0, and so is its pull.
        curve = np.where(moves, size[:, :, 0] / np.where(moves, square, 1.0), 0.0)[:, None, :]
        rest = choice.values(np.zeros_like(share)) @ moments.a - choice.weight @ moments.b
        first = choice.scale[:, :, :1]
        ratio = choice.scale / first
        self._a = (2.0 * moments.a / size).astype(np.float32)
        self._rest = (2.0 * rest / size / first).astype(np.float32)
        self._ratio = None if (ratio == 1.0).all() else ratio.astype(np.float32)
        self._curve = (curve / ratio).astype(np.float32)
        self._moves = moves.astype(np.float32)[:, None, :]
        spread = ZETA - GAMMA
        self._u = (-np.log(spread / (share - GAMMA) - 1.0)).astype(np.float32)
        self._adam = Adam(share.shape)
        self._sigmoid, self._h, self._gradient, self._part = (np.empty(share.shape, np.float32) for _ in range(4))

    def step(self, rate: float, weight: float, beta: float | None) -> None:
        """One step of Adam, with the pull's exponent `beta`, or without it."""
        h, gradient, part = self._h, self._gradient, self._part
        self._look()
        if self._ratio is None:
            np.matmul(h, self._a, out=gradient)
        else:
            np.matmul(h * self._ratio, self._a, out=gradient)
        gradient += self._rest
        gradient *= self._curve
        if beta is not None:
            self._pull(weight, beta)
        # h'(u) = 1.2 sigmoid (1 - sigmoid), and 0 where h is cut off.
        np.subtract(1.0, self._sigmoid, out=part)
        part *= self._sigmoid
        part *= ZETA - GAMMA
        gradient *= part
        np.multiply(gradient, (h > 0.0) & (h < 1.0), out=gradient)
        self._adam.step(self._u, gradient, rate)

    def is_settled(self) -> bool:
        """Whether every weight was at one of its codes in the last step."""
        return not bool(((self._h > 0.0) & (self._h < 1.0)).any())

    def choices(self) -> Array:
        """0 or 1, the nearer one, (G, O, K)."""
        return (self._u >= 0.0).astype(np.float64)

    def _look(self) -> None:
        """h and the sigmoid of u."""
        np.negative(self._u, out=self._sigmoid)
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
