"""PACT: the level at which an activation is clipped is a parameter of the network."""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor, nn

from sbonnx.errors import RecipeError
from sbonnx.qat.fakequant.base import FakeQuant, Role, codes_beside, start_tensors
from sbonnx.qat.fakequant.functions import fake_quantize_clipped, positive
from sbonnx.spec import ANY_SCALE, QParams, QuantSpec, ScaleLimits

ALPHA: Final = 10.0
"""The ancestor's first clipping level, in units of the tensor."""


@final
class Pact(FakeQuant):
    """PACT, for activations: learns the clipping level alpha, of which the scale is made.

        scale = clamp(|alpha| / reach, least, most),   reach = codes between 0 and the clipped end

    The gradient reaches alpha from values that are clipped, and the values from all others; see
    `sbonnx.qat.fakequant.functions.fake_quantize_clipped`. In a symmetric scheme alpha is the upper end, in an affine
    one the end further from 0; the zero point stays where the calibration put it.

    Data to start from gives alpha the value `alpha` whatever the data, and an affine scheme the range [0, alpha], for
    which the method was made: values below 0 would be lost. Start from the calibration where there are such.

    Args:
        alpha: what `init_from` begins with, > 0, in units of the tensor.
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
        """See `FakeQuant.quantized`."""
        alpha = positive(self.alpha, 0.0, float("inf"))
        reach = codes_beside(self.zero_point, self.spec)
        alpha, scale, zero_point, reach = (
            self.spread(each, x) for each in (alpha, self.grid()[0], self.zero_point, reach)
        )
        return fake_quantize_clipped(x, alpha, scale, zero_point, reach, self._qmin, self._qmax)

    def grid(self) -> tuple[Tensor, Tensor]:
        """See `FakeQuant.grid`."""
        scale = self.alpha.detach().abs() / codes_beside(self.zero_point, self.spec)
        return scale.clamp(self.limits.least, self.limits.most), self.zero_point

    def init_from(self, x: Tensor) -> None:
        """Alpha as chosen, and zero at the lowest or the middle code. See `FakeQuant.init_from`."""
        self.checked(x)
        with torch.no_grad():
            self.alpha.fill_(self.first_alpha)
            self.zero_point.fill_(float(self.spec.centre if self.spec.symmetric else self.spec.qmin))

    def clip_at(self, alpha: float) -> None:
        """Start from this clipping level; the zero point stays where the calibration put it.

        Args:
            alpha: > 0, in units of the tensor.
        """
        with torch.no_grad():
            self.alpha.fill_(alpha)

    def penalty(self) -> Tensor:
        """Sum of alpha², to be added to the loss with a small weight (the ancestor's is 1e-4), which keeps ranges low.

        Source: the paper, section 3, where it replaces weight decay.
        """
        return self.alpha.square().sum()
