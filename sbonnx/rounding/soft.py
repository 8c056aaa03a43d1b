"""Soft rounding (AdaRound on blocks): the choice between two neighbouring codes as a differentiable parameter.

This module contains the settings, the `Rounder` and the soft choices as torch tensors. The loop over blocks and batches
is in `sbonnx.reconstruct.blockwise`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

import numpy as np

from sbonnx.moments import Moments
from sbonnx.rounding.adaround import MARGIN, AnnealedRounder, Ramp, Start
from sbonnx.rounding.base import Grid
from sbonnx.rounding.choices import GAMMA, ZETA
from sbonnx.rounding.gptq import Gptq
from sbonnx.spec import Array, QParams

Scope = Literal["block", "layer"]

LEAN: Final = 0.49
"""Maximum initial distance of a weight from its initial code, in codes: at 0.5 the other code would be as near."""

LATE: Final = 0.95
"""Share of the steps after which all weights are frozen at one of their codes; only scales and biases still change."""

SETTLINGS: Final = 50
"""Number of times that weights are frozen during the optimization."""

BLOCKS: Final = "blocks"
"""Name of block-wise soft rounding in `ROUNDERS`."""


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
        return np.clip(np.rint(grid.ratio()), grid.qmin, grid.qmax), qparams

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
        spec, shape = self.qparams.spec, self.weight.shape
        scale = self._tensor(self.qparams.along(self.qparams.scale, shape))
        zero = self.qparams.along(self.qparams.zero_point, shape).astype(np.float64)
        ratio = self.weight.astype(np.float64) / self.qparams.along(self.qparams.scale, shape) + zero
        codes = self.codes.astype(np.float64)
        value = codes + np.clip(ratio - codes, -LEAN, LEAN)
        low = np.clip(np.where(value < codes, codes - 1, codes), spec.qmin, spec.qmax - 1)
        share = np.clip(value - low, MARGIN, 1 - MARGIN)
        self._scale, self._zero, self._low = scale, self._tensor(zero), self._tensor(low)
        self.u = self._tensor(-np.log((ZETA - GAMMA) / (share - GAMMA) - 1.0)).requires_grad_(True)
        self._settled, self._ends = self.torch.zeros_like(self._low), self.torch.zeros_like(self._low)

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
