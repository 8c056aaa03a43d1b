"""PACT: the clipping level of an activation is a trained parameter."""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor, nn

from sbonnx.errors import RecipeError
from sbonnx.qat.fakequant.base import FakeQuant, Role, codes_beside, start_tensors
from sbonnx.qat.fakequant.functions import fake_quantize_clipped, positive
from sbonnx.spec import ANY_SCALE, QParams, QuantSpec, ScaleLimits

ALPHA: Final = 10.0
"""Default initial clipping level, in units of the tensor; as in the ancestor."""


@final
class Pact(FakeQuant):
    """PACT, for activations: learned clipping level alpha, from which the scale is derived.

        scale = clamp(|alpha| / reach, least, most),   reach = codes between 0 and the clipped end

    Clipped values contribute to the gradient of alpha, all other values receive the straight-through gradient; see
    `sbonnx.qat.fakequant.functions.fake_quantize_clipped`. Alpha is the upper end of a symmetric range, or the end of
    an affine range that is farther from 0. The zero point stays as calibrated.

    `init_from` sets alpha to the argument `alpha`, independent of the data, and an affine range to [0, alpha], for
    which the method was designed. Negative values would be lost: start from the calibration if there are any.

    Args:
        alpha: initial clipping level for `init_from`, > 0, in units of the tensor.
        others: see `FakeQuant`.

    Raises:
        RecipeError: the tensor is a weight, or alpha is not positive; and those of `FakeQuant`.

    Source: Choi et al. 2018, "PACT: Parameterized Clipping Activation for Quantized Neural Networks", equations 1-3.
    """

    def __init__(
        self,
        spec: QuantSpec,
        qparams: QParams,
        *,
        name: str,
        role: Role = "activation",
        limits: ScaleLimits = ANY_SCALE,
        alpha: float = ALPHA,
    ) -> None:
        super().__init__(spec, qparams, name=name, role=role, limits=limits)
        if role != "activation":
            raise RecipeError(f"'{name}' is a {role}, and pact clips activations: use lsq or dorefa for it")
        if not 0.0 < alpha < float("inf"):
            raise RecipeError(f"'alpha' of '{name}' must be positive and finite, got {alpha}")
        self.first_alpha = alpha
        scale, zero_point = start_tensors(qparams)
        self.alpha = nn.Parameter(scale * codes_beside(zero_point, spec))
        self.register_buffer("zero_point", zero_point)

    def quantized(self, x: Tensor) -> Tensor:
        """Fake-quantize `x` with the scale derived from alpha."""
        alpha = positive(self.alpha, 0.0, float("inf"))
        reach = codes_beside(self.zero_point, self.spec)
        alpha, scale, zero_point, reach = (
            self.spread(each, x) for each in (alpha, self.grid()[0], self.zero_point, reach)
        )
        return fake_quantize_clipped(x, alpha, scale, zero_point, reach, self._qmin, self._qmax)

    def grid(self) -> tuple[Tensor, Tensor]:
        """Return the scale derived from alpha, clamped to the limits, and the fixed zero point."""
        scale = self.alpha.detach().abs() / codes_beside(self.zero_point, self.spec)
        return scale.clamp(self.limits.least, self.limits.most), self.zero_point

    def init_from(self, x: Tensor) -> None:
        """Set alpha to its initial value and the zero point to the lowest (affine) or middle code (symmetric).

        See `FakeQuant.init_from`.
        """
        self.checked(x)
        with torch.no_grad():
            self.alpha.fill_(self.first_alpha)
            self.zero_point.fill_(float(self.spec.centre if self.spec.symmetric else self.spec.qmin))

    def clip_at(self, alpha: float) -> None:
        """Set the clipping level; the zero point stays as calibrated.

        Args:
            alpha: > 0, in units of the tensor.
        """
        with torch.no_grad():
            self.alpha.fill_(alpha)

    def penalty(self) -> Tensor:
        """Compute the sum of alpha², an L2 regularizer for the loss that keeps ranges small.

        Add it with a small weight (1e-4 in the ancestor). Source: the paper, section 3, where it replaces weight
        decay.
        """
        return self.alpha.square().sum()
