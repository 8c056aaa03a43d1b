"""DoReFa: weights are reshaped by tanh before rounding."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from sbonnx.errors import RecipeError
from sbonnx.qat.fakequant.base import FakeQuant, Role, start_tensors
from sbonnx.qat.fakequant.functions import fake_quantize, widened
from sbonnx.spec import ANY_SCALE, QParams, QuantSpec, ScaleLimits, ScaleRule

Magnitude = Literal["own", "unit"]


@final
class DoReFa(FakeQuant):
    """Fixed scale on weights reshaped by tanh, which compresses large weights and reduces their gradients.

        magnitude "own":   r = tanh(w) / max|tanh(w)| * max|w|
        magnitude "unit":  r = tanh(w) / max|tanh(w)|

    with maxima over the whole tensor, recomputed at each call and constant with respect to the gradient. "own", the
    default, preserves the largest magnitude, so that the calibrated scale stays valid, and a network whose weights are
    replaced by `latent_weight` starts exactly as calibrated. "unit" is the form of the paper and of the ancestor:
    every weight tensor is mapped to [-1, 1], and the following layers must adapt to the new magnitude. Call
    `init_from` with the weight in this case, because the calibrated scale is for another magnitude.

    The exported weight is the reshaped one (`export_weight`), not the latent one. Activations are not reshaped: in the
    paper they are clipped and rounded, which is `Uniform`.

    `init_from` sets the range to the min-max range of the reshaped values.

    Args:
        scale_rule: see `sbonnx.spec.params_from_bounds`, for `init_from`.
        magnitude: "own" or "unit", see above.
        others: see `FakeQuant`.

    Raises:
        RecipeError: no such magnitude; and those of `FakeQuant`.

    Source: Zhou et al. 2016, "DoReFa-Net", equations 9 and 11, on a grid that has a code for 0. The paper's grid of 2^k
    values from -1 to 1 has none.
    """

    def __init__(
        self,
        spec: QuantSpec,
        qparams: QParams,
        *,
        name: str,
        role: Role = "weight",
        limits: ScaleLimits = ANY_SCALE,
        scale_rule: ScaleRule = "exact",
        magnitude: Magnitude = "own",
    ) -> None:
        super().__init__(spec, qparams, name=name, role=role, limits=limits)
        if magnitude not in ("own", "unit"):
            raise RecipeError(f"'magnitude' of '{name}' must be 'own' or 'unit', got '{magnitude}'")
        self.scale_rule: ScaleRule = scale_rule
        self.magnitude: Magnitude = magnitude
        scale, zero_point = start_tensors(qparams)
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    def reshaped(self, x: Tensor) -> Tensor:
        """Apply tanh to a weight, in float32 or wider; return an activation unchanged."""
        if self.role != "weight" or x.numel() == 0:
            return x
        bent = torch.tanh(widened(x))
        top = bent.detach().abs().max()
        # An all-zero weight stays zero.
        wanted = torch.ones_like(top) if self.magnitude == "unit" else widened(x.detach()).abs().max()
        return bent * torch.where(top > 0.0, wanted / top, 1.0)

    def latent_weight(self, x: Tensor) -> Tensor:
        """Compute the inverse of `reshaped`, ``atanh(x tanh(M) / M)`` with ``M = max|x|``, detached.

        For "unit" the weight itself, as in the ancestor: no latent weight maps to it unless its magnitude is 1.
        """
        if self.role != "weight" or self.magnitude == "unit" or x.numel() == 0:
            return x.detach().clone()
        wide = x.detach().double()
        top = wide.abs().max()
        inverse = torch.atanh(wide / top * torch.tanh(top)).clamp(-top, top)
        return torch.where(top > 0.0, inverse, 0.0).to(x.dtype)

    def quantized(self, x: Tensor) -> Tensor:
        """Fake-quantize the reshaped weight with fixed scale and zero point."""
        scale, zero_point = self.spread(self.scale, x), self.spread(self.zero_point, x)
        return fake_quantize(self.reshaped(x), scale, zero_point, self._qmin, self._qmax).to(x.dtype)

    def grid(self) -> tuple[Tensor, Tensor]:
        """Return the fixed scale and zero point."""
        return self.scale, self.zero_point

    def init_from(self, x: Tensor) -> None:
        """Set scale and zero point to the min-max range of the reshaped `x`; see `FakeQuant.init_from`."""
        self.begin_at(*self.covering_all(self.reshaped(self.checked(x)), self.scale_rule))
