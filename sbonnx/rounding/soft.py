"""Soft rounding: the choice between the two codes beside each weight as a number that gradients can move.

Here are its settings, its place among the roundings, and the choice itself on torch's tensors; the loop over blocks
and batches is `sbonnx.reconstruct.blockwise`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

import numpy as np

from sbonnx.moments import Moments
from sbonnx.rounding.adaround import MARGIN, Ramp, Start
from sbonnx.rounding.base import Grid, Rounder
from sbonnx.rounding.choices import GAMMA, ZETA
from sbonnx.rounding.gptq import Gptq
from sbonnx.spec import Array, QParams

Scope = Literal["block", "layer"]

LEAN: Final = 0.49
"""How far from its code, in codes, a weight may begin: at half a code the other one would be as near."""

LATE: Final = 0.95
"""Share of the steps after which every weight is at one of its codes; then only scales and biases move."""

SETTLINGS: Final = 50
"""How often in all steps more weights are settled."""

BLOCKS: Final = "blocks"
"""Its name in `ROUNDERS`."""


@final
@dataclass(frozen=True)
class SoftBlocks(Rounder):
    """AdaRound on batches of what a whole block of layers meets; see `sbonnx.reconstruct.blockwise.walk_blocks`.

    As a rounding of one layer by its moments it gives the codes that the blocks begin with.

    Attributes:
        iterations: steps of Adam a block.
        lr: its learning rate for the choices, falling to 0 by half a cosine.
        warmup: share of the steps before the pull to whole codes begins.
        weight: of that pull: of each weight ``1 - |2 h - 1|^beta``, against the part that the weight has in the
            error of the nearest codes (the mean over the weights of the block).
        beta_start, beta_end, schedule: the exponent when the pull begins and at the end, and how it goes from one to
            the other.
        start: whose codes to begin with.
        scope: what has its error in the loss: "block" or "layer", each with the activation behind it.
        drop: share of activations that are taken from the float network in a step, by chance (QDrop).
        batch: samples a step.
        scale_lr: learning rate of the scales of activations inside, in parts of themselves; 0: they stay.
        bias_lr: that of biases, in parts of the standard deviation of what they are added to; 0: they stay.

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
        """See `Rounder.solve`: the codes to begin with."""
        if self.start == "gptq":
            return Gptq().solve(grid, moments, qparams)
        return np.clip(np.rint(grid.ratio()), grid.qmin, grid.qmax), qparams

    def beta(self, step: int) -> float | None:
        """The exponent of the pull at `step`, None before it begins."""
        begin = self.warmup * self.iterations
        if step < begin:
            return None
        way = (step - begin) / (self.iterations - begin)
        left = 1.0 - way if self.schedule == "linear" else (1.0 + math.cos(math.pi * way)) / 2.0
        return self.beta_end + (self.beta_start - self.beta_end) * left

    def settled(self, step: int) -> float:
        """Share of the weights that are at one of their codes for good at `step`: from the end of the warm-up on more
        and more, so that the others can make up for them; all when `LATE` of the steps are done.
        """
        begin = self.warmup * self.iterations
        return min(max((step - begin) / (LATE * self.iterations - begin), 0.0), 1.0)

    def pace(self, step: int) -> float:
        """What the learning rates are multiplied with at `step`: half a cosine from 1 to 0."""
        return (1.0 + math.cos(math.pi * step / self.iterations)) / 2.0


@dataclass
class Choice:
    """The soft choices of one weight: ``value = (low + h(u) - zero) * scale``, on torch's tensors.

    Args:
        torch: the module.
        weight: float values, as in the file.
        codes: of it, to begin with: one of the two codes; the other one lies towards the weight.
        qparams: their scales.
        device: torch's name.

    Attributes:
        u: what is learned, float32 of the weight's shape.
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
        """How far each weight is from its lower code to the one above, 0 to 1."""
        soft = self.torch.clamp(self.torch.sigmoid(self.u) * (ZETA - GAMMA) + GAMMA, 0.0, 1.0)
        return self.torch.lerp(soft, self._ends, self._settled)

    def settle(self, share: float) -> None:
        """From now on this share of the weights, those nearest to one of their codes, is at that code."""
        with self.torch.no_grad():
            h = self.h()
            count = min(round(share * h.numel()), h.numel())
            if count > int(self._settled.sum()):
                nearness = (h - 0.5).abs() + self._settled
                chosen = self.torch.topk(nearness.reshape(-1), count).indices
                self._ends = self.torch.lerp((h >= 0.5).to(h.dtype), self._ends, self._settled)
                self._settled.reshape(-1)[chosen] = 1.0

    def values(self, h: Any) -> Any:
        """What the choices mean, float32."""
        return (self._low + h - self._zero) * self._scale

    def chosen(self) -> Array:
        """The nearer one of the two codes of each weight."""
        codes = self._low + (self.h().detach() >= 0.5).to(self._low.dtype)
        return np.asarray(codes.cpu().numpy()).astype(self.qparams.spec.dtype)


def pull(h: Any, beta: float) -> Any:
    """``sum(1 - |2 h - 1|^beta)``, 0 where every weight is at one of its codes."""
    return (1.0 - (2.0 * h - 1.0).abs().pow(beta)).sum()


__all__ = ["BLOCKS", "SETTLINGS", "Choice", "SoftBlocks", "pull"]
