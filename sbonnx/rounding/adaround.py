"""AdaRound by moments: each weight up or down, learned on the exact squared error of the layer's output."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, Literal, final

import numpy as np

from sbonnx.errors import NumericError
from sbonnx.moments import Moments
from sbonnx.rounding.base import Grid, Rounder
from sbonnx.rounding.choices import learn_choices
from sbonnx.rounding.gptq import Gptq
from sbonnx.rounding.search.descent import alive, descend
from sbonnx.spec import Array, QParams

Start = Literal["gptq", "nearest"]
Ramp = Literal["cosine", "linear"]

MARGIN: Final = 0.01
"""How near 0 or 1 a weight may begin: where the sigmoid is cut off it has no gradient to leave by."""


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
        betas = [self.beta(step) for step in range(self.iterations)]
        chosen = learn_choices(choice, moments, share, self.lr, self.weight, betas)
        codes = low + descend(choice, chosen, moments, self.sweeps)
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
