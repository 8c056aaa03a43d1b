"""LSQ, learned step size quantization: the scale is a trained parameter."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from sbonnx.qat.fakequant.base import FakeQuant, Role, start_tensors
from sbonnx.qat.fakequant.functions import fake_quantize_learned, positive
from sbonnx.spec import ANY_SCALE, QParams, QuantSpec, ScaleLimits


@final
class Lsq(FakeQuant):
    """LSQ: learned scale, in every scheme; the zero point of an affine scheme stays as calibrated.

        scale = clamp(|parameter|, least, most),   its gradient times 1 / sqrt(n * qmax)

    `init_from` sets ``scale = 2 mean|x| / sqrt(qmax)``; see `FakeQuant.by_magnitude`.

    Source: Esser et al. 2020, "Learned Step Size Quantization", sections 2.1 and 2.2, equation 3.
    """

    def __init__(
        self,
        spec: QuantSpec,
        qparams: QParams,
        *,
        name: str,
        role: Role = "activation",
        limits: ScaleLimits = ANY_SCALE,
    ) -> None:
        super().__init__(spec, qparams, name=name, role=role, limits=limits)
        scale, zero_point = start_tensors(qparams)
        self.scale = nn.Parameter(scale)
        self.register_buffer("zero_point", zero_point)

    def quantized(self, x: Tensor) -> Tensor:
        """Fake-quantize `x` with the learned scale."""
        factor = self.gradient_factor(x, self.scale.numel())
        scale = positive(self.scale, self.limits.least, self.limits.most, factor)
        spread = self.spread(scale, x), self.spread(self.zero_point, x)
        return fake_quantize_learned(x, *spread, self._qmin, self._qmax)

    def grid(self) -> tuple[Tensor, Tensor]:
        """Return the learned scale, clamped to the limits, and the fixed zero point."""
        return positive(self.scale.detach(), self.limits.least, self.limits.most), self.zero_point

    def init_from(self, x: Tensor) -> None:
        """Set ``scale = 2 mean|x| / sqrt(qmax)``; see `FakeQuant.init_from`."""
        self.begin_at(*self.by_magnitude(self.checked(x)))
