"""AdaRound: rounds each weight up or down by gradient descent on a soft choice between its two neighbouring codes.

`AdaRound` minimizes the exact squared output error of a layer, by second moments.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, final

import numpy as np

from sbonnx.errors import NumericError
from sbonnx.moments import Moments
from sbonnx.recipe.sections.quantizers import AdaRoundKeys
from sbonnx.recipe.value_types import Start
from sbonnx.rounding.base import Grid, Rounder
from sbonnx.rounding.choices import learn_choices
from sbonnx.rounding.gptq import Gptq
from sbonnx.rounding.search.descent import alive, descend
from sbonnx.spec import Array, QParams

MARGIN: Final = 0.01
"""Minimum initial distance from 0 and 1: where the sigmoid is clipped, the gradient is 0."""

LEAN: Final = 0.49
"""Maximum initial distance of a weight from its initial code, in codes: at 0.5 the other code would be as near."""


@final
class AdaRound(AdaRoundKeys, Rounder):
    """AdaRound: rounds every weight to one of its two neighbouring codes, chosen by gradient descent on soft choices.

        v = (low + h(u) - zero) * scale,   h(u) = clip(1.2 sigmoid(u) - 0.1, 0, 1)
        minimise over u:   |w x - v x'|^2  +  weight * sum_k c_k (1 - |2 h(u_k) - 1|^beta),   c_k = scale_k^2 A_kk

    beta falls from ``beta_start`` to ``beta_end``, so that first the weights near a code and then all others are pulled
    to 0 or 1. The error is the quadratic form of the moments and its gradient ``2 (v A - w B)``: a step costs one
    product of (outputs, K) by (K, K), independent of the number of samples, and nothing is random. At the end each
    weight is rounded to the nearer of its two codes, followed by coordinate descent between these two codes.

    With ``start="nearest"`` the two codes are the neighbours of the weight. With ``start="gptq"`` they are the
    neighbours of the weight's optimal value if all others keep GPTQ's codes; one of the two is GPTQ's code. This
    reaches codes further from the weight, which compensate errors of earlier layers, and the result is never worse than
    GPTQ's.

    The ancestor's settings (Adam at 0.001, 20,000 steps in batches of 32, weight 0.001 on the plain sum, linear) and
    the paper's (0.01, 10,000) need ten times the steps here and give a larger error. ``weight`` is in units of each
    weight's own part c_k of the error, so the same value fits every layer. The larger learning rate is safe because the
    gradient has no noise.

    Source: Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization", equations 21 to 25.
    """

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.sweeps < 0 or not 0 <= self.warmup < 1:
            raise ValueError("iterations must be >= 1, sweeps >= 0 and warmup within [0, 1)")

    def beta(self, step: int) -> float | None:
        """Return the exponent of the regularizer at `step`, None before it starts."""
        begin = self.warmup * self.iterations
        if step < begin:
            return None
        way = (step - begin) / (self.iterations - begin)
        left = 1.0 - way if self.schedule == "linear" else (1.0 + math.cos(math.pi * way)) / 2.0
        return self.beta_end + (self.beta_start - self.beta_end) * left

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """Compute codes by AdaRound; see `Rounder.solve`.

        Raises:
            NumericError: the moments contain NaN or Inf.
        """
        first = first_codes(self.start, grid, moments, qparams)
        value = grid.ratio() if self.start == "nearest" else best_alone(grid, first, moments)
        low = lower_codes(grid, first, value)
        # The same weights on a grid with the codes 0 and 1.
        lower, upper = (np.broadcast_to(float(end), low.shape) for end in (0, 1))
        choice = replace(grid, zero=grid.zero - low, qmin=lower, qmax=upper)
        share = np.clip(value - low, MARGIN, 1.0 - MARGIN)
        betas = [self.beta(step) for step in range(self.iterations)]
        chosen = learn_choices(choice, moments, share, self.lr, self.weight, betas)
        codes = low + descend(choice, chosen, moments, self.sweeps)
        if self.start == "nearest":
            return codes, qparams
        before, after = (moments.error(grid.weight, grid.values(rounded)) for rounded in (first, codes))
        return np.where((after < before)[..., None], codes, first), qparams


def first_codes(start: Start, grid: Grid, moments: Moments, qparams: QParams) -> Array:
    """Return the initial codes of an optimization, (G, O, K).

    Raises:
        NumericError: the moments contain NaN or Inf.
    """
    if start == "gptq":
        return Gptq().solve(grid, moments, qparams)[0]
    if not moments.is_finite:
        raise NumericError("the inputs of the layer hold NaN or infinite values")
    return grid.nearest()


def best_alone(grid: Grid, codes: Array, moments: Moments) -> Array:
    """Return the optimal value of each weight in codes, not rounded, if all others keep their codes, (G, O, K).

    It is at least half a code away from a code that coordinate descent would change. If the input is constant 0, it is
    the weight itself.
    """
    rest = moments.gradient(grid.weight, grid.values(codes))
    square = np.einsum("gkk->gk", moments.a)
    moves = alive(square)
    step = np.where(moves, 1.0 / np.where(moves, square, 1.0), 0.0)[:, None, :] * rest / grid.scale
    return np.where(moves[:, None, :], codes - step, grid.ratio())


def lower_codes(grid: Grid, codes: Array, value: Array) -> Array:
    """Return the lower of the two codes around `value`, one of which is `codes`; both within the grid. (G, O, K)."""
    low = np.where(value < codes, codes - 1, codes)
    return np.clip(low, grid.qmin, grid.qmax - 1)
