"""AdaRound: rounds each weight up or down by gradient descent on a soft choice between its two neighbouring codes.

`AdaRound` minimizes the exact squared output error of a layer, by second moments. `SoftBlocks` has the settings, the
`Rounder` and the soft choices (torch tensors) of blocks; the loop over blocks and batches is in
`sbonnx.reconstruct.blockwise`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, final

import numpy as np

from sbonnx.errors import NumericError
from sbonnx.moments import Moments
from sbonnx.rounding.base import Grid, Rounder, kept_zeros
from sbonnx.rounding.choices import GAMMA, ZETA, learn_choices
from sbonnx.rounding.gptq import Gptq
from sbonnx.rounding.search.descent import alive, descend
from sbonnx.spec import Array, QParams

Start = Literal["gptq", "nearest"]
Ramp = Literal["cosine", "linear"]
Scope = Literal["block", "layer"]

MARGIN: Final = 0.01
"""Minimum initial distance from 0 and 1: where the sigmoid is clipped, the gradient is 0."""

LEAN: Final = 0.49
"""Maximum initial distance of a weight from its initial code, in codes: at 0.5 the other code would be as near."""

LATE: Final = 0.95
"""Share of the steps after which all weights are frozen at one of their codes; only scales and biases still change."""

SETTLINGS: Final = 50
"""Number of times that weights are frozen during the optimization."""

BLOCKS: Final = "blocks"
"""Name of block-wise soft rounding in `ROUNDERS`."""


class AnnealedRounder(Rounder):
    """Rounder with a regularizer whose exponent falls from `beta_start` to `beta_end` after a warm-up."""

    iterations: int
    warmup: float
    beta_start: float
    beta_end: float
    schedule: Ramp

    def beta(self, step: int) -> float | None:
        """Return the exponent of the regularizer at `step`, None before it starts."""
        begin = self.warmup * self.iterations
        if step < begin:
            return None
        way = (step - begin) / (self.iterations - begin)
        left = 1.0 - way if self.schedule == "linear" else (1.0 + math.cos(math.pi * way)) / 2.0
        return self.beta_end + (self.beta_start - self.beta_end) * left


@final
@dataclass(frozen=True)
class AdaRound(AnnealedRounder):
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

    Args:
        iterations: steps of Adam.
        lr: learning rate, in units of u.
        warmup: share of the steps before the regularizer starts.
        weight: weight of the regularizer, relative to the error caused by changing one weight by one code.
        beta_start, beta_end: the exponent when the regularizer starts and at the end.
        schedule: of the exponent, "cosine" (half a wave) or "linear".
        start: method for the initial codes.
        sweeps: maximum number of coordinate descent sweeps at the end, between the two codes.

    Source: Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization", equations 21 to 25.
    """

    iterations: int = 1000
    lr: float = 0.1
    warmup: float = 0.2
    weight: float = 0.2
    beta_start: float = 20.0
    beta_end: float = 2.0
    schedule: Ramp = "cosine"
    start: Start = "gptq"
    sweeps: int = 20

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.sweeps < 0 or not 0 <= self.warmup < 1:
            raise ValueError("iterations must be >= 1, sweeps >= 0 and warmup within [0, 1)")

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
        before, after = (moments.error(grid.weight, grid.values(each)) for each in (first, codes))
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


@final
@dataclass(frozen=True)
class SoftBlocks(AnnealedRounder):
    """AdaRound on batches of input activations of a whole block of layers.

    The optimization is in `sbonnx.reconstruct.blockwise.walk_blocks`.

    As a rounder of a single layer by its moments it returns the initial codes of the block optimization.

    Attributes:
        iterations: steps of Adam per block.
        lr: learning rate of the choices, decays to 0 by half a cosine.
        warmup: share of the steps before the regularizer starts.
        weight: weight of the regularizer: for each weight ``1 - |2 h - 1|^beta``, relative to that weight's part in the
            error of round-to-nearest (the mean over the weights of the block).
        beta_start, beta_end, schedule: the exponent when the regularizer starts and at the end, and the schedule
            between.
        start: method for the initial codes.
        scope: outputs whose error is the loss: of the "block" or of each "layer", both including the following
            activation function.
        drop: probability that an activation is taken from the float network in a step (QDrop).
        batch: samples per step.
        scale_lr: learning rate of the scales of inner activations, relative to the scales; 0: scales are fixed.
        bias_lr: learning rate of biases, relative to the standard deviation of the tensor they are added to; 0: biases
            are fixed.

    Source: Nagel et al. 2020 (AdaRound); Li et al. 2021 (BRECQ), section 3.2: reconstruction in blocks; Wei et al.
    2022 (QDrop), equation 8; Esser et al. 2020 (LSQ): gradients of scales.
    """

    keeps_zeros = True

    iterations: int = 1000
    lr: float = 0.01
    warmup: float = 0.2
    weight: float = 0.01
    beta_start: float = 20.0
    beta_end: float = 2.0
    schedule: Ramp = "cosine"
    start: Start = "gptq"
    scope: Scope = "block"
    drop: float = 0.5
    batch: int = 32
    scale_lr: float = 0.01
    bias_lr: float = 0.0

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.batch < 1 or not 0 <= self.warmup < 1 or not 0 <= self.drop <= 1:
            raise ValueError("iterations and batch must be >= 1, warmup within [0, 1) and drop within [0, 1]")

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """Return the initial codes of the block optimization."""
        if self.start == "gptq":
            return Gptq().solve(grid, moments, qparams)
        return grid.nearest(), qparams

    def settled(self, step: int) -> float:
        """Return the share of weights that are frozen at one of their codes at `step`.

        The share grows from the end of the warm-up, so that the other weights can compensate, and reaches 1 after
        `LATE` of the steps.
        """
        begin = self.warmup * self.iterations
        return min(max((step - begin) / (LATE * self.iterations - begin), 0.0), 1.0)

    def pace(self, step: int) -> float:
        """Return the factor of the learning rates at `step`: half a cosine from 1 to 0."""
        return (1.0 + math.cos(math.pi * step / self.iterations)) / 2.0


@dataclass
class Choice:
    """Soft choices of one weight as torch tensors: ``value = (low + h(u) - zero) * scale``, on torch's tensors.

    Zeros of a sparse weight (`kept_zeros`) keep their initial codes.

    Args:
        torch: the torch module.
        weight: float values, in the file layout.
        codes: initial codes, one of the two candidates; the other candidate is the next code in the direction of the
            weight.
        qparams: scale and zero point of the codes.
        device: torch device name.

    Attributes:
        u: the parameter to optimize, float32 of the weight's shape.
    """

    torch: Any
    weight: Array
    codes: Array
    qparams: QParams
    device: str = "cpu"
    u: Any = field(init=False)

    def __post_init__(self) -> None:
        shape = self.weight.shape
        scale = self._tensor(self.qparams.along(self.qparams.scale, shape))
        zero = self.qparams.along(self.qparams.zero_point, shape).astype(np.float64)
        ratio = self.weight.astype(np.float64) / self.qparams.along(self.qparams.scale, shape) + zero
        codes = self.codes.astype(np.float64)
        value = codes + np.clip(ratio - codes, -LEAN, LEAN)
        lowest, highest = self.qparams.code_limits(self.weight.astype(np.float64))
        low = np.clip(np.where(value < codes, codes - 1, codes), lowest, highest - 1)
        share = np.clip(value - low, MARGIN, 1 - MARGIN)
        self._scale, self._zero, self._low = scale, self._tensor(zero), self._tensor(low)
        self.u = self._tensor(-np.log((ZETA - GAMMA) / (share - GAMMA) - 1.0)).requires_grad_(True)
        zeros = kept_zeros(self.weight)
        settled = np.zeros(shape) if zeros is None else zeros
        self._settled, self._ends = self._tensor(settled), self._tensor(settled * (codes - low))

    def _tensor(self, values: Array) -> Any:
        return self.torch.from_numpy(np.array(values, np.float32, order="C")).to(self.device)

    def h(self) -> Any:
        """Return the position of each weight between its lower code (0) and its upper code (1)."""
        soft = self.torch.clamp(self.torch.sigmoid(self.u) * (ZETA - GAMMA) + GAMMA, 0.0, 1.0)
        return self.torch.lerp(soft, self._ends, self._settled)

    def settle(self, share: float) -> None:
        """Freeze this share of the weights, those nearest to one of their codes, at that code."""
        with self.torch.no_grad():
            h = self.h()
            count = min(round(share * h.numel()), h.numel())
            if count > int(self._settled.sum()):
                nearness = (h - 0.5).abs() + self._settled
                chosen = self.torch.topk(nearness.reshape(-1), count).indices
                self._ends = self.torch.lerp((h >= 0.5).to(h.dtype), self._ends, self._settled)
                self._settled.reshape(-1)[chosen] = 1.0

    def values(self, h: Any) -> Any:
        """Return the dequantized soft choices, float32."""
        return (self._low + h - self._zero) * self._scale

    def chosen(self) -> Array:
        """Return the nearer of the two codes of each weight."""
        codes = self._low + (self.h().detach() >= 0.5).to(self._low.dtype)
        return np.asarray(codes.cpu().numpy()).astype(self.qparams.spec.dtype)


def pull(h: Any, beta: float) -> Any:
    """Return the regularizer ``sum(1 - |2 h - 1|^beta)``, which is 0 if every weight is at one of its codes."""
    return (1.0 - (2.0 * h - 1.0).abs().pow(beta)).sum()
