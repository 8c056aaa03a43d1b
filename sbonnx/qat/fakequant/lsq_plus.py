"""LSQ+: scale and zero point are trained parameters."""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor, nn

from sbonnx.qat.fakequant.base import FakeQuant, Role, start_tensors
from sbonnx.qat.fakequant.functions import fake_quantize_learned, positive, whole
from sbonnx.qat.fakequant.groups import mean_and_deviation
from sbonnx.spec import ANY_SCALE, QParams, QuantSpec, ScaleLimits, ScaleRule

DEVIATIONS: Final = 3.0
"""Initial range of a weight on either side of its mean, in standard deviations. Source: the paper, equation 11."""


@final
class LsqPlus(FakeQuant):
    """LSQ+: learned scale and, in an affine scheme, learned zero point; any scheme, activations and weights.

        scale = clamp(|parameter|, least, most),  zero_point = clamp(round(parameter), qmin, qmax)

    Both gradients are multiplied by 1 / sqrt(n * qmax). The zero point is a float parameter, rounded with a
    straight-through gradient. The paper learns the offset ``-zero_point * scale`` instead, but the file needs integer
    zero points.

    `init_from` sets the range of a weight to three standard deviations (with n - 1) on either side of its mean; with a
    symmetric scheme, ``scale = 2 max(|mean - 3 sd|, |mean + 3 sd|) / (qmax - qmin)``. The range of an activation is
    the min-max range.

    Args:
        scale_rule: see `sbonnx.spec.params_from_bounds`, for `init_from` of activations.
        others: see `FakeQuant`.

    Source: Bhalgat et al. 2020, "LSQ+: Improving low-bit quantization through learnable offsets and better
    initialization", equations 5, 6 and 11.
    """

    def __init__(
        self,
        spec: QuantSpec,
        qparams: QParams,
        *,
        name: str,
        role: Role = "activation",
        limits: ScaleLimits = ANY_SCALE,
        scale_rule: ScaleRule = "exact",
    ) -> None:
        super().__init__(spec, qparams, name=name, role=role, limits=limits)
        self.scale_rule: ScaleRule = scale_rule
        scale, zero_point = start_tensors(qparams)
        self.scale = nn.Parameter(scale)
        if spec.symmetric:
            self.register_buffer("zero_point", zero_point)
        else:
            self.zero_point = nn.Parameter(zero_point)

    def quantized(self, x: Tensor) -> Tensor:
        """Fake-quantize `x` with the learned scale and zero point."""
        factor = self.gradient_factor(x, self.scale.numel())
        scale = positive(self.scale, self.limits.least, self.limits.most, factor)
        zero_point = whole(self.zero_point, self._qmin, self._qmax, factor)
        spread = self.spread(scale, x), self.spread(zero_point, x)
        return fake_quantize_learned(x, *spread, self._qmin, self._qmax)

    def grid(self) -> tuple[Tensor, Tensor]:
        """Return the learned scale, clamped to the limits, and the rounded zero point."""
        scale = positive(self.scale.detach(), self.limits.least, self.limits.most)
        return scale, whole(self.zero_point.detach(), self._qmin, self._qmax)

    def init_from(self, x: Tensor) -> None:
        """Initialize from mean and standard deviation (weights) or from min and max (activations).

        See `FakeQuant.init_from`.
        """
        x = self.checked(x)
        self.begin_at(*(self._by_deviation(x) if self.role == "weight" else self.covering_all(x, self.scale_rule)))

    def _by_deviation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute scale and zero point for three standard deviations on either side of the mean."""
        mean, deviation = (each.cpu() for each in mean_and_deviation(x, self.spec))
        low, high = mean - DEVIATIONS * deviation, mean + DEVIATIONS * deviation
        if not self.spec.symmetric:
            return self.covering(low, high)
        scale = self.usable(2.0 * torch.maximum(low.abs(), high.abs()) / (self._qmax - self._qmin))
        return scale, torch.full(scale.shape, float(self.spec.centre))
