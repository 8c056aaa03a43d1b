"""Fake quantization of each training method: uniform, DoReFa, LSQ, LSQ+ and PACT."""

from __future__ import annotations

import inspect
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn

from sbonnx.errors import RecipeError
from sbonnx.qat.fakequant.base import CalibratedTensor, FakeQuant, Role, codes_to_clip
from sbonnx.qat.fakequant.functions import (
    fake_quantize,
    fake_quantize_clipped,
    fake_quantize_learned,
    mean_and_deviation,
    positive,
    whole,
    widened,
)
from sbonnx.spec import ANY_SCALE, QParams, ScaleLimits, ScaleRule

Magnitude = Literal["own", "unit"]

DEVIATIONS: Final = 3.0
"""Initial range of a weight of LSQ+ on either side of its mean, in standard deviations (equation 11 of the paper)."""

ALPHA: Final = 10.0
"""Default initial clipping level of PACT, in units of the tensor; as in the ancestor."""


class FixedGrid(FakeQuant):
    """Straight-through fake quantization with fixed scale and zero point; only the weights are trained.

    `init_from` sets the range to the min-max range of the (reshaped) data.

    Args:
        tensor: see `FakeQuant`.
        scale_rule: see `sbonnx.spec.params_from_bounds`, for `init_from`.
    """

    def __init__(self, tensor: CalibratedTensor, *, scale_rule: ScaleRule = "exact") -> None:
        super().__init__(tensor)
        self.scale_rule: ScaleRule = scale_rule

    def quantized(self, x: Tensor) -> Tensor:
        scale, zero_point = self.spread(self.scale, x), self.spread(self.zero_point, x)
        values = self.within_pairs(self.reshaped(x), scale)
        return fake_quantize(values, scale, zero_point, self._qmin, self._qmax).to(x.dtype)

    def grid(self) -> tuple[Tensor, Tensor]:
        return self.scale, self.zero_point

    def init_from(self, x: Tensor) -> None:
        self.begin_at(*self.covering_all(self.reshaped(self.checked(x)), self.scale_rule))


@final
class Uniform(FixedGrid):
    """Straight-through fake quantization with the calibrated scale and zero point.

    Source: Jacob et al. 2018, "Quantization and Training of Neural Networks", section 3; the straight-through
    estimator is of Bengio et al. 2013.
    """


@final
class DoReFa(FixedGrid):
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

    Args:
        tensor, scale_rule: see `FixedGrid`.
        magnitude: "own" or "unit", see above.

    Raises:
        RecipeError: no such magnitude; and those of `FakeQuant`.

    Source: Zhou et al. 2016, "DoReFa-Net", equations 9 and 11, on a grid that has a code for 0. The paper's grid of 2^k
    values from -1 to 1 has none.
    """

    def __init__(
        self, tensor: CalibratedTensor, *, scale_rule: ScaleRule = "exact", magnitude: Magnitude = "own"
    ) -> None:
        super().__init__(tensor, scale_rule=scale_rule)
        if magnitude not in ("own", "unit"):
            raise RecipeError(f"'magnitude' of '{self.name}' must be 'own' or 'unit', got '{magnitude}'")
        self.magnitude: Magnitude = magnitude

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
            return super().latent_weight(x)
        wide = x.detach().double()
        top = wide.abs().max()
        inverse = torch.atanh(wide / top * torch.tanh(top)).clamp(-top, top)
        return torch.where(top > 0.0, inverse, 0.0).to(x.dtype)


class LearnedScale(FakeQuant):
    """Fake quantization with a learned scale.

    scale = clamp(|parameter|, least, most),   its gradient times 1 / sqrt(n * qmax)
    """

    def register_grid(self, scale: Tensor, zero_point: Tensor) -> None:
        """Register the scale as a parameter, the zero point as a buffer."""
        self.scale = nn.Parameter(scale)
        self.register_buffer("zero_point", zero_point)

    def rounded_zero_point(self, zero_point: Tensor, factor: float = 1.0) -> Tensor:
        """Return the zero point as an integer; `factor` multiplies its gradient, if it is learned."""
        return zero_point

    def quantized(self, x: Tensor) -> Tensor:
        factor = self.gradient_factor(x, self.scale.numel())
        scale = positive(self.scale, self.limits.least, self.limits.most, factor)
        spread = self.spread(scale, x), self.spread(self.rounded_zero_point(self.zero_point, factor), x)
        return fake_quantize_learned(self.within_pairs(x, spread[0]), *spread, self._qmin, self._qmax)

    def grid(self) -> tuple[Tensor, Tensor]:
        scale = positive(self.scale.detach(), self.limits.least, self.limits.most)
        return scale, self.rounded_zero_point(self.zero_point.detach())


@final
class Lsq(LearnedScale):
    """LSQ, learned step size quantization, in every scheme; the zero point of an affine scheme stays as calibrated.

    `init_from` sets ``scale = 2 mean|x| / sqrt(qmax)``; see `FakeQuant.by_magnitude`.

    Source: Esser et al. 2020, "Learned Step Size Quantization", sections 2.1 and 2.2, equation 3.
    """

    def init_from(self, x: Tensor) -> None:
        self.begin_at(*self.by_magnitude(self.checked(x)))


@final
class LsqPlus(LearnedScale):
    """LSQ+: learned scale and, in an affine scheme, learned zero point; any scheme, activations and weights.

        zero_point = clamp(round(parameter), qmin, qmax)

    Both gradients are multiplied by 1 / sqrt(n * qmax). The zero point is a float parameter, rounded with a
    straight-through gradient. The paper learns the offset ``-zero_point * scale`` instead, but the file needs integer
    zero points.

    `init_from` sets the range of a weight to three standard deviations (with n - 1) on either side of its mean; with a
    symmetric scheme, ``scale = 2 max(|mean - 3 sd|, |mean + 3 sd|) / (qmax - qmin)``. The range of an activation is
    the min-max range.

    Args:
        tensor: see `FakeQuant`.
        scale_rule: see `sbonnx.spec.params_from_bounds`, for `init_from` of activations.

    Source: Bhalgat et al. 2020, "LSQ+: Improving low-bit quantization through learnable offsets and better
    initialization", equations 5, 6 and 11.
    """

    def __init__(self, tensor: CalibratedTensor, *, scale_rule: ScaleRule = "exact") -> None:
        super().__init__(tensor)
        self.scale_rule: ScaleRule = scale_rule

    def register_grid(self, scale: Tensor, zero_point: Tensor) -> None:
        """Register the scale as a parameter, and the zero point too in an affine scheme."""
        if self.spec.symmetric:
            super().register_grid(scale, zero_point)
        else:
            self.scale, self.zero_point = nn.Parameter(scale), nn.Parameter(zero_point)

    def rounded_zero_point(self, zero_point: Tensor, factor: float = 1.0) -> Tensor:
        return whole(zero_point, self._qmin, self._qmax, factor)

    def init_from(self, x: Tensor) -> None:
        x = self.checked(x)
        if self.role != "weight":
            self.begin_at(*self.covering_all(x, self.scale_rule))
            return
        mean, deviation = (moment.cpu() for moment in mean_and_deviation(x, self.spec))
        low, high = self.with_pairs(x, mean - DEVIATIONS * deviation, mean + DEVIATIONS * deviation)
        if self.spec.symmetric:
            scale = self.usable(2.0 * torch.maximum(low.abs(), high.abs()) / (self._qmax - self._qmin))
            self.begin_at(scale, torch.full(scale.shape, float(self.spec.centre)))
        else:
            self.begin_at(*self.covering(low, high))


@final
class ParameterizedClipping(FakeQuant):
    """PACT, for activations: learned clipping level alpha, from which the scale is derived.

        scale = clamp(|alpha| / reach, least, most),   reach = codes between 0 and the clipped end

    Clipped values contribute to the gradient of alpha, all other values receive the straight-through gradient; see
    `sbonnx.qat.fakequant.functions.fake_quantize_clipped`. Alpha is the upper end of a symmetric range, or the end of
    an affine range that is farther from 0. The zero point stays as calibrated.

    `init_from` sets alpha to the argument `alpha`, independent of the data, and an affine range to [0, alpha], for
    which the method was designed. Negative values would be lost: start from the calibration if there are any.

    Args:
        tensor: see `FakeQuant`.
        alpha: initial clipping level for `init_from`, > 0, in units of the tensor.

    Raises:
        RecipeError: the tensor is a weight, or alpha is not positive; and those of `FakeQuant`.

    Source: Choi et al. 2018, "PACT: Parameterized Clipping Activation for Quantized Neural Networks", equations 1-3.
    """

    def __init__(self, tensor: CalibratedTensor, *, alpha: float = ALPHA) -> None:
        super().__init__(tensor)
        if self.role != "activation":
            raise RecipeError(f"'{self.name}' is a {self.role}, and pact clips activations: use lsq or dorefa for it")
        if not 0.0 < alpha < float("inf"):
            raise RecipeError(f"'alpha' of '{self.name}' must be positive and finite, got {alpha}")
        self.first_alpha = alpha

    def register_grid(self, scale: Tensor, zero_point: Tensor) -> None:
        """Register the clipping level as a parameter, the zero point as a buffer."""
        self.alpha = nn.Parameter(scale * codes_to_clip(zero_point, self.spec))
        self.register_buffer("zero_point", zero_point)

    def quantized(self, x: Tensor) -> Tensor:
        alpha = positive(self.alpha, 0.0, float("inf"))
        reach = codes_to_clip(self.zero_point, self.spec)
        alpha, scale, zero_point, reach = (
            self.spread(values, x) for values in (alpha, self.grid()[0], self.zero_point, reach)
        )
        return fake_quantize_clipped(x, alpha, scale, zero_point, reach, (self._qmin, self._qmax))

    def grid(self) -> tuple[Tensor, Tensor]:
        """Return the scale derived from alpha, clamped to the limits, and the fixed zero point."""
        scale = self.alpha.detach().abs() / codes_to_clip(self.zero_point, self.spec)
        return scale.clamp(self.limits.least, self.limits.most), self.zero_point

    def init_from(self, x: Tensor) -> None:
        self.checked(x)
        self.clip_at(self.first_alpha)
        self.zero_point.fill_(float(self.spec.centre if self.spec.symmetric else self.spec.qmin))

    def clip_at(self, alpha: float) -> None:
        """Set the clipping level, > 0, in units of the tensor; the zero point stays as calibrated."""
        with torch.no_grad():
            self.alpha.fill_(alpha)


METHODS: Final[dict[str, type[FakeQuant]]] = {
    "uniform": Uniform,
    "lsq": Lsq,
    "lsq+": LsqPlus,
    "pact": ParameterizedClipping,
    "dorefa": DoReFa,
}
"""Classes of fake-quant modules by the name of their method in recipes."""

OTHER_NAMES: Final = {"lsq_plus": "lsq+", "lsqplus": "lsq+"}
"""Aliases from the ancestor's documentation."""


def make_fake_quant(
    method: str, qparams: QParams, *, name: str, role: Role, limits: ScaleLimits = ANY_SCALE, **options: Any
) -> FakeQuant:
    """Create the fake-quant module of `method`, initialized with `qparams`.

    Args:
        method: a key of `METHODS`; case-insensitive.
        qparams, name, role, limits: see `CalibratedTensor`.
        options: method-specific arguments: ``scale_rule`` (uniform, lsq+, dorefa), ``alpha`` (pact),
            ``magnitude`` (dorefa).

    Raises:
        RecipeError: no such method or option, or the method does not support this tensor.
    """
    key = method.lower()
    key = OTHER_NAMES.get(key, key)
    if key not in METHODS:
        raise RecipeError(f"'{name}': there is no training method '{method}'; methods: {', '.join(METHODS)}")
    _, *supported = inspect.signature(METHODS[key]).parameters
    for option in options:
        if option not in supported:
            takes = f"takes {', '.join(supported)}" if supported else "takes no options"
            raise RecipeError(f"'{option}' of '{name}' is not an option of {key}, which {takes}")
    return METHODS[key](CalibratedTensor(qparams, name, role, limits), **options)
