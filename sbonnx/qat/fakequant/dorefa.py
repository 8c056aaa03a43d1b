"""DoReFa: weights go through tanh before they are rounded."""

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
    """Fixed scale on weights reshaped by tanh, which draws large weights in and learns them more slowly.

        magnitude "own":   r = tanh(w) / max|tanh(w)| * max|w|
        magnitude "unit":  r = tanh(w) / max|tanh(w)|

    with maxima over the whole tensor, taken anew at each call and constant to the gradient. "own", the default, keeps
    the largest weight where it is, so that the scale of the calibration fits, and a network whose weights are replaced
    by `latent_weight` begins exactly as calibrated. "unit" is the paper's and the ancestor's form: every weight tensor
    becomes one in [-1, 1], whatever it was, and the layers behind must learn to live with it; call `init_from` with
    the weight, since the scale of the calibration is for another magnitude.

    What is written back is the reshaped weight (`export_weight`), never the one below the tanh. Activations are not
    reshaped: the paper's are clipped and rounded, which is `Uniform`.

    Data to start from sets the range from the least to the largest of the reshaped values.

    Args:
        scale_rule: see `sbonnx.spec.params_from_bounds`, for `init_from`.
        magnitude: "own" or "unit", see above.
        others: see `FakeQuant`.

    Raises:
        RecipeError: no such magnitude; and those of `FakeQuant`.

    Source: Zhou et al. 2016, "DoReFa-Net", equations 9 and 11, on a grid that has a code for 0, where the paper's
    of 2^k values from -1 to 1 has none.
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
        """The weight behind the tanh, in float32 or wider; an activation as it is."""
        if self.role != "weight" or x.numel() == 0:
            return x
        bent = torch.tanh(widened(x))
        top = bent.detach().abs().max()
        # A weight that is all zero stays so.
        wanted = torch.ones_like(top) if self.magnitude == "unit" else widened(x.detach()).abs().max()
        return bent * torch.where(top > 0.0, wanted / top, 1.0)

    def latent_weight(self, x: Tensor) -> Tensor:
        """The inverse of `reshaped`: ``atanh(x tanh(M) / M)`` with ``M = max|x|``. No gradients.

        For "unit" the weight itself, as the ancestor starts: there no other weight would have its magnitude.
        """
        if self.role != "weight" or self.magnitude == "unit" or x.numel() == 0:
            return x.detach().clone()
        wide = x.detach().double()
        top = wide.abs().max()
        inverse = torch.atanh(wide / top * torch.tanh(top)).clamp(-top, top)
        return torch.where(top > 0.0, inverse, 0.0).to(x.dtype)

    def quantized(self, x: Tensor) -> Tensor:
        """See `FakeQuant.quantized`."""
        scale, zero_point = self.spread(self.scale, x), self.spread(self.zero_point, x)
        return fake_quantize(self.reshaped(x), scale, zero_point, self._qmin, self._qmax).to(x.dtype)

    def grid(self) -> tuple[Tensor, Tensor]:
        """See `FakeQuant.grid`."""
        return self.scale, self.zero_point

    def init_from(self, x: Tensor) -> None:
        """Cover every value of the reshaped `x`. See `FakeQuant.init_from`."""
        self.begin_at(*self.covering_all(self.reshaped(self.checked(x)), self.scale_rule))
