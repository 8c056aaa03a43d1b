"""`FakeQuant`: base class of the modules that correspond to Q/DQ pairs of the exported file; `BiasCodes`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sbonnx.errors import DataError, NumericError, RecipeError
from sbonnx.qat.fakequant.functions import extremes, mean_magnitude, shape_of_scale, spread, widened
from sbonnx.spec import (
    ANY_SCALE,
    UNUSED_SCALE,
    Array,
    Bounds,
    QParams,
    QuantSpec,
    ScaleLimits,
    ScaleRule,
    pair_bounds,
    pair_limits,
    params_from_bounds,
)

Role = Literal["activation", "weight"]

MAX_BITS: Final = 16
"""Largest bit width; the arithmetic on integer codes is exact in float32 up to it."""


LARGEST_BIAS: Final = 2**31 - 1


@dataclass(frozen=True)
class CalibratedTensor:
    """Tensor to fake-quantize, as calibrated.

    Attributes:
        qparams: initial scale and zero point, and the integer type to train for: 2 to 16 bits, any scheme, per tensor,
            channel or block.
        name: key of the site or name of the tensor, for messages.
        role: "activation" or "weight".
        limits: smallest and largest learned scale, as in ``Plan.scales``.
    """

    qparams: QParams
    name: str
    role: Role
    limits: ScaleLimits = ANY_SCALE


class FakeQuant(nn.Module, ABC):  # type: ignore[misc]
    """Quantizes and dequantizes one tensor, with straight-through gradients.

    The arithmetic is that of `sbonnx.spec.QParams`: in eval mode, in float32 on a CPU, ``module(x)`` equals
    ``module.qparams().fake_quant(module.export_weight(x))`` bit for bit. Half and bfloat16 inputs are computed in
    float32 and the result is cast back; scales stay in float32 when a model is cast to half. In train mode NaN stays
    NaN, so that diverging training is visible; in eval mode it becomes 0, as in the file.

    Attributes:
        spec, name, role, limits: those of the tensor.
        enabled: if False, ``forward`` returns its input unchanged.

    Raises:
        RecipeError: the spec is fp8, or is wider than 16 bits.
    """

    def __init__(self, tensor: CalibratedTensor) -> None:
        super().__init__()
        spec = tensor.qparams.spec
        if spec.is_float:
            raise RecipeError(
                f"'{tensor.name}' is planned as fp8, which cannot be trained: use integers of 2 to 16 bits"
            )
        if spec.bits > MAX_BITS:
            raise RecipeError(
                f"'{tensor.name}' is planned with {spec.bits} bits; at most {MAX_BITS} can be trained: lower 'bits'"
            )
        self.spec = spec
        self.name = tensor.name
        self.role = tensor.role
        self.limits = tensor.limits
        self.enabled = True
        # As plain numbers, so that torch.compile does not have to trace the spec.
        self._qmin, self._qmax = spec.qmin, spec.qmax
        self._steps = positive_steps(spec)
        scale = np.array(tensor.qparams.scale, np.float32)
        zero_point = np.broadcast_to(np.asarray(tensor.qparams.zero_point, np.float32), scale.shape).copy()
        shape = () if spec.axis is None else scale.shape
        self.register_grid(torch.from_numpy(scale).reshape(shape), torch.from_numpy(zero_point).reshape(shape))

    def register_grid(self, scale: Tensor, zero_point: Tensor) -> None:
        """Register the calibrated scale and zero point (float32, of the same shape): as buffers, unless learned."""
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    @abstractmethod
    def quantized(self, x: Tensor) -> Tensor:
        """Fake-quantize `x` with gradients; called by `forward` if the module is enabled."""

    @abstractmethod
    def grid(self) -> tuple[Tensor, Tensor]:
        """Return the effective scale (> 0, within the limits) and zero point (integer, in [qmin, qmax]), detached."""

    @abstractmethod
    def init_from(self, x: Tensor) -> None:
        """Initialize from data by the method's rule, instead of from calibration.

        Works in place, so that the parameters of an optimizer stay valid.

        Args:
            x: floating-point values of the tensor, of a shape that matches the shape of the scale.

        Raises:
            DataError: the shape does not match the scale.
            NumericError: a value is NaN or infinite.
        """

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return x
        if not self.training:
            x = torch.where(x.isnan(), 0.0, x)
        return self.quantized(x)

    def qparams(self) -> QParams:
        """Return scale and zero point for the file: float32 and ``spec.dtype``, of the same shape.

        Raises:
            NumericError: a learned scale or zero point is NaN or infinite.
        """
        scale, zero_point = self.grid()
        if not bool(torch.isfinite(scale).all() and torch.isfinite(zero_point).all()):
            raise NumericError(f"training made the scale of '{self.name}' NaN: lower the learning rate of the scales")
        return QParams(_numpy(scale), _numpy(zero_point).astype(self.spec.dtype), self.spec)

    def export_weight(self, x: Tensor) -> Array:
        """Return the float32 values that are rounded: `x` itself, unless the method reshapes weights.

        The exported weight consists of these values and `qparams`; its codes are
        ``module.qparams().quantize(module.export_weight(w))``.
        """
        return _numpy(self.reshaped(x))

    def codes(self, x: Tensor) -> Array:
        """Return the integer codes of `x`, in its shape, with dtype ``spec.dtype``."""
        return self.qparams().quantize(self.export_weight(x))

    def reshaped(self, x: Tensor) -> Tensor:
        """Return the values that are rounded, with gradients: `x` itself, unless the method reshapes weights."""
        return x

    def latent_weight(self, x: Tensor) -> Tensor:
        """Return the latent weight whose `reshaped` value is `x`, detached; training starts from it."""
        return x.detach().clone()

    def extra_repr(self) -> str:
        return f"{self.name!r}, {self.role}, {self.spec.label()}" + ("" if self.enabled else ", off")

    def within_pairs(self, x: Tensor, scale: Tensor) -> Tensor:
        """Clip a weight to the limits of its pairs, if its type has them (`sbonnx.spec.pair_limits`).

        Args:
            x: the values that are rounded.
            scale: their scale, broadcasts against `x`.
        """
        axes = self.spec.pairs
        if not axes:
            return x
        last = tuple(range(-len(axes), 0))
        with torch.no_grad():
            rows = (widened(x) / scale).movedim(axes, last)
            limits = pair_limits(rows.reshape(*rows.shape[: -len(axes)], -1), rows.shape[-1])
            low, high = ((end.reshape(rows.shape).movedim(last, axes) * scale).to(x.dtype) for end in limits)
        return torch.clamp(x, low, high)

    def spread(self, values: Tensor, x: Tensor) -> Tensor:
        """Reshape `values`, one for each scale, so that they broadcast against `x`."""
        return spread(values, self.spec, tuple(x.shape))

    def gradient_factor(self, x: Tensor, scales: int) -> float:
        """Compute the gradient scale of LSQ, ``1 / sqrt(n * qmax)``, with n values of `x` per scale.

        qmax is the number of codes above zero if the zero point is the lowest code (affine) or the middle code
        (symmetric). Signed and unsigned codes of the same grid therefore get the same gradient scale.

        Source: Esser et al. 2020, section 2.2.
        """
        factor: float = (max(x.numel(), 1) / scales * self._steps) ** -0.5
        return factor

    def checked(self, x: Tensor) -> Tensor:
        """Validate `x` for `init_from`, with its exceptions, and return it detached."""
        x = x.detach()
        scale = tuple(self.grid()[0].shape)
        fits = self.spec.axis is None or x.ndim > self.spec.axis
        if not fits or shape_of_scale(self.spec, tuple(x.shape)) != scale:
            raise DataError(
                f"values of shape {tuple(x.shape)} do not match the scale of '{self.name}', of shape {scale} for "
                f"{self.spec.label()}: use values of the calibrated tensor"
            )
        if not bool(torch.isfinite(x).all()):
            raise NumericError(f"the values for '{self.name}' contain NaN or Inf: leave those samples out")
        return x

    def covering(self, low: Tensor, high: Tensor, rule: ScaleRule = "exact") -> tuple[Tensor, Tensor]:
        """Compute scale and zero point of a range, by `sbonnx.spec.params_from_bounds`."""
        qparams = params_from_bounds(Bounds(_numpy(low), _numpy(high)), self.spec, rule=rule, least=self.limits.least)
        return torch.from_numpy(qparams.scale), torch.from_numpy(qparams.zero_point.astype(np.float32))

    def covering_all(self, x: Tensor, rule: ScaleRule = "exact") -> tuple[Tensor, Tensor]:
        """Compute scale and zero point of the min-max range of `x` (already validated)."""
        return self.covering(*self.with_pairs(x, *extremes(x, self.spec)), rule=rule)

    def with_pairs(self, x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Widen the range of a weight whose type has limits of pairs, see `sbonnx.spec.pair_bounds`."""
        if not self.spec.pairs:
            return low, high
        wide = pair_bounds(_numpy(x), self.spec, Bounds(_numpy(low), _numpy(high)))
        return torch.from_numpy(wide.lo), torch.from_numpy(wide.hi)

    def by_magnitude(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the initial scale of LSQ, ``2 mean|x| / sqrt(qmax)``, and the zero point.

        In an affine scheme the zero point comes from the min-max range of `x`, and qmax is the number of codes on its
        larger side, so that negative values can be represented.

        Source: Esser et al. 2020, section 2.1.
        """
        zero_point = self.covering_all(x)[1]
        codes = codes_to_clip(zero_point, self.spec).double()
        return self.usable(2.0 * mean_magnitude(x, self.spec).cpu() / codes.sqrt()), zero_point

    def usable(self, scale: Tensor) -> Tensor:
        """Clamp a scale to the limits, as float32; a scale of 0 (all values are 0) becomes `UNUSED_SCALE`."""
        return torch.where(scale == 0.0, UNUSED_SCALE, scale.clamp(self.limits.least, self.limits.most)).float()

    def begin_at(self, scale: Tensor, zero_point: Tensor) -> None:
        """Set the attributes `scale` and `zero_point` in place, for modules that have both."""
        with torch.no_grad():
            self.scale.copy_(scale)
            self.zero_point.copy_(zero_point)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Override `nn.Module._apply`, which every ``.to()`` uses, so that scales stay float32 in 16-bit models."""

        def at_least_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = (
                moved.is_floating_point() and moved.dtype.itemsize < tensor.dtype.itemsize and moved.dtype.itemsize < 4
            )
            return tensor.to(moved.device) if narrow else moved

        return super()._apply(at_least_float32, recurse)


def positive_steps(spec: QuantSpec) -> int:
    """Return the number of codes above zero: above the middle (symmetric), or all but the lowest (affine)."""
    return spec.qmax - (spec.centre if spec.symmetric else spec.qmin)


def codes_to_clip(zero_point: Tensor, spec: QuantSpec) -> Tensor:
    """Count the codes between zero and the farther end of an affine range, or above zero of a symmetric range.

    Float, shape of `zero_point`, at least 1.
    """
    if spec.symmetric:
        return torch.full_like(zero_point, float(positive_steps(spec)))
    return torch.maximum(spec.qmax - zero_point, zero_point - spec.qmin)


class BiasCodes(nn.Module):  # type: ignore[misc]
    """Fake quantization of a bias to int32, in eval mode only; a no-op in train mode or if the bias does not fit int32.

    The scale is the product of two other scales, so nothing is learned here. Training can skip the rounding, because a
    bias step is far smaller than an activation step.

    Args:
        activation, weight: fake-quant modules whose scales are multiplied; they do not become submodules.
    """

    def __init__(self, activation: FakeQuant, weight: FakeQuant) -> None:
        super().__init__()
        self._follows = (activation, weight)  # in a tuple they do not become submodules, so no parameter has two names

    def forward(self, bias: Tensor) -> Tensor:
        """Fake-quantize a bias of shape (C,); shape and type are preserved."""
        activation, weight = self._follows
        if self.training or not (activation.enabled and weight.enabled):
            return bias
        scale = activation.grid()[0].float() * weight.grid()[0].float()
        codes = torch.round(bias.double() / scale.double())
        if not bool((codes.abs() <= LARGEST_BIAS).all()):
            return bias
        return (codes.float() * scale).to(bias.dtype)


def quant_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the fake-quant modules inside `module` as (dotted name, parameter), each once.

    Use them as a separate parameter group of the optimizer, without weight decay: scales, zero points and clipping
    levels should not decay.
    """
    return [
        (f"{path}.{name}" if path else name, parameter)
        for path, inner in module.named_modules()
        if isinstance(inner, FakeQuant)
        for name, parameter in inner.named_parameters(recurse=False)
    ]


def _numpy(tensor: Tensor) -> Array:
    return np.array(tensor.detach().float().cpu().numpy(), np.float32)
