"""Fake quantization with fixed scale and zero point; only the weights are trained."""

from __future__ import annotations

from typing import final

from torch import Tensor

from sbonnx.qat.fakequant.base import FakeQuant, Role, start_tensors
from sbonnx.qat.fakequant.functions import fake_quantize
from sbonnx.spec import ANY_SCALE, QParams, QuantSpec, ScaleLimits, ScaleRule


@final
class Uniform(FakeQuant):
    """Straight-through fake quantization with the calibrated scale and zero point.

    `init_from` sets the range to the min-max range of the data.

    Args:
        scale_rule: see `sbonnx.spec.params_from_bounds`, for `init_from`.
        others: see `FakeQuant`.

    Source: Jacob et al. 2018, "Quantization and Training of Neural Networks", section 3; the straight-through
    estimator is of Bengio et al. 2013.
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
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    def quantized(self, x: Tensor) -> Tensor:
        """Fake-quantize `x` with fixed scale and zero point."""
        scale, zero_point = self.spread(self.scale, x), self.spread(self.zero_point, x)
        return fake_quantize(x, scale, zero_point, self._qmin, self._qmax)

    def grid(self) -> tuple[Tensor, Tensor]:
        """Return the fixed scale and zero point."""
        return self.scale, self.zero_point

    def init_from(self, x: Tensor) -> None:
        """Set scale and zero point to the min-max range of `x`; see `FakeQuant.init_from`."""
        self.begin_at(*self.covering_all(self.checked(x), self.scale_rule))
