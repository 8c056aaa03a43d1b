"""`FakeQuant`: the module that stands where a Q/DQ pair will stand in the file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sbonnx.errors import DataError, NumericError, RecipeError
from sbonnx.qat.fakequant.groups import extremes, mean_magnitude, shape_of_scale, spread
from sbonnx.spec import (
    ANY_SCALE,
    UNUSED_SCALE,
    Array,
    Bounds,
    QParams,
    QuantSpec,
    ScaleLimits,
    ScaleRule,
    params_from_bounds,
)

Role = Literal["activation", "weight"]

MAX_BITS: Final = 16
"""Codes up to this width are exact in float32."""


class FakeQuant(nn.Module, ABC):  # type: ignore[misc]
    """Quantizes and dequantizes one tensor; gradients pass straight through.

    The arithmetic is that of `sbonnx.spec.QParams`: in eval mode, in float32 on a CPU, ``module(x)`` equals
    ``module.qparams().fake_quant(module.export_weight(x))`` bit for bit. Half and bfloat16 are computed in float32
    and come back as what they were; scales stay in float32 when a model is cast to half. In train mode NaN stays
    NaN, so that a training that diverges shows; in eval mode it becomes 0, as in the file.

    Args:
        spec: the integers to train for: 2 to 16 bits, any scheme, per tensor, channel or block.
        qparams: where to begin, the solution of the calibration; of the same spec.
        name: the site's key or the tensor's name, for messages.
        role: what the tensor is.
        limits: how small and how large a learned scale may become, as in ``Plan.scales``.

    Attributes:
        spec, name, role, limits: as given.
        enabled: where False, ``forward`` returns its input.

    Raises:
        RecipeError: the spec is fp8 or wider than 16 bits, or is not that of `qparams`.
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
        super().__init__()
        _check(spec, qparams, name)
        self.spec = spec
        self.name = name
        self.role = role
        self.limits = limits
        self.enabled = True
        # Plain numbers: a compiled forward need not look into the spec.
        self._qmin, self._qmax = spec.qmin, spec.qmax
        self._steps = positive_steps(spec)

    @abstractmethod
    def quantized(self, x: Tensor) -> Tensor:
        """`x` fake-quantized, with gradients; called by `forward` where the module is enabled."""

    @abstractmethod
    def grid(self) -> tuple[Tensor, Tensor]:
        """Scale (> 0, within the limits) and zero point (whole, within the codes) as they are used, no gradients."""

    @abstractmethod
    def init_from(self, x: Tensor) -> None:
        """Begin from data by the method's own rule instead. In place, so that an optimizer keeps its parameters.

        Args:
            x: values of the tensor, floating point, of a shape that has the module's number of scales.

        Raises:
            DataError: the shape does not fit the scale.
            NumericError: a value is NaN or infinite.
        """

    def forward(self, x: Tensor) -> Tensor:
        """`x` with the values that its codes stand for; same shape and type."""
        if not self.enabled:
            return x
        if not self.training:
            x = torch.where(x.isnan(), 0.0, x)
        return self.quantized(x)

    def qparams(self) -> QParams:
        """Scale and zero point for the file: float32 and ``spec.dtype``, one shape.

        Raises:
            NumericError: a learned one has become NaN.
        """
        scale, zero_point = self.grid()
        if not bool(torch.isfinite(scale).all() and torch.isfinite(zero_point).all()):
            raise NumericError(f"training made the scale of '{self.name}' NaN: lower the learning rate of the scales")
        return QParams(_numpy(scale), _numpy(zero_point).astype(self.spec.dtype), self.spec)

    def export_weight(self, x: Tensor) -> Array:
        """The float32 values that are rounded to codes: `x` itself, where the method does not reshape it.

        ``module.qparams().quantize(module.export_weight(w))`` are the codes, so that this is what is written back
        as the weight, beside `qparams`.
        """
        return _numpy(self.reshaped(x))

    def codes(self, x: Tensor) -> Array:
        """Codes of `x`, its shape, dtype ``spec.dtype``."""
        return self.qparams().quantize(self.export_weight(x))

    def reshaped(self, x: Tensor) -> Tensor:
        """What of `x` is rounded to codes, with gradients; `x` unless the method says otherwise."""
        return x

    def latent_weight(self, x: Tensor) -> Tensor:
        """The weight to train so that training begins at `x`: its `reshaped` is `x`. No gradients."""
        return x.detach().clone()

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"{self.name!r}, {self.role}, {self.spec.label()}" + ("" if self.enabled else ", off")

    def spread(self, values: Tensor, x: Tensor) -> Tensor:
        """`values`, one a scale, so that they broadcast against `x`."""
        return spread(values, self.spec, tuple(x.shape))

    def gradient_factor(self, x: Tensor, scales: int) -> float:
        """``1 / sqrt(n * qmax)`` with n values of `x` a scale.

        qmax is counted in codes above zero of the same grid with its zero at the lowest code (affine) or in the
        middle (symmetric), so that signed and unsigned codes of one grid learn alike.

        Source: Esser et al. 2020, section 2.2.
        """
        factor: float = (max(x.numel(), 1) / scales * self._steps) ** -0.5
        return factor

    def checked(self, x: Tensor) -> Tensor:
        """`x` without gradients, after the checks that `init_from` promises."""
        x = x.detach()
        scale = tuple(self.grid()[0].shape)
        fits = self.spec.axis is None or x.ndim > self.spec.axis
        if not fits or shape_of_scale(self.spec, tuple(x.shape)) != scale:
            raise DataError(
                f"'{self.name}' has a scale of shape {scale} for {self.spec.label()}, which values of shape "
                f"{tuple(x.shape)} do not fit: give it values of the tensor that was calibrated"
            )
        if not bool(torch.isfinite(x).all()):
            raise NumericError(f"the values given for '{self.name}' hold NaN or Inf: leave those samples out")
        return x

    def covering(self, low: Tensor, high: Tensor, rule: ScaleRule = "exact") -> tuple[Tensor, Tensor]:
        """Scale and zero point that cover a range, by `sbonnx.spec.params_from_bounds`."""
        made = params_from_bounds(Bounds(_numpy(low), _numpy(high)), self.spec, rule=rule, least=self.limits.least)
        return torch.from_numpy(made.scale), torch.from_numpy(made.zero_point.astype(np.float32))

    def covering_all(self, x: Tensor, rule: ScaleRule = "exact") -> tuple[Tensor, Tensor]:
        """Scale and zero point that cover every value of `x` (checked)."""
        return self.covering(*extremes(x, self.spec), rule=rule)

    def by_magnitude(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale ``2 mean|x| / sqrt(qmax)`` of LSQ, and the zero point.

        In an affine scheme the zero point is that of the range of `x`, and qmax counts the codes on the larger side
        of it: data with negatives keeps both the scheme and the sign of its values.

        Source: Esser et al. 2020, section 2.1.
        """
        zero_point = self.covering_all(x)[1]
        codes = codes_beside(zero_point, self.spec).double()
        return self.usable(2.0 * mean_magnitude(x, self.spec).cpu() / codes.sqrt()), zero_point

    def usable(self, scale: Tensor) -> Tensor:
        """A scale within the limits, float32; that of values that are all 0 is `UNUSED_SCALE`."""
        return torch.where(scale == 0.0, UNUSED_SCALE, scale.clamp(self.limits.least, self.limits.most)).float()

    def begin_at(self, scale: Tensor, zero_point: Tensor) -> None:
        """In place, for modules that hold both: `init_from` has found where to begin."""
        with torch.no_grad():
            self.scale.copy_(scale)
            self.zero_point.copy_(zero_point)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`nn.Module._apply`, the way of every ``.to()``; casts to 16-bit floats move the scales and no more."""

        def at_least_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = (
                moved.is_floating_point() and moved.dtype.itemsize < tensor.dtype.itemsize and moved.dtype.itemsize < 4
            )
            return tensor.to(moved.device) if narrow else moved

        return super()._apply(at_least_float32, recurse)


def positive_steps(spec: QuantSpec) -> int:
    """Codes above zero: of a symmetric range those above its middle, of an affine one all but the lowest."""
    return spec.qmax - (spec.centre if spec.symmetric else spec.qmin)


def codes_beside(zero_point: Tensor, spec: QuantSpec) -> Tensor:
    """How many codes lie between zero and the further end of an affine range, or above zero in a symmetric one.

    Float, shape of `zero_point`, at least 1.
    """
    if spec.symmetric:
        return torch.full_like(zero_point, float(positive_steps(spec)))
    return torch.maximum(spec.qmax - zero_point, zero_point - spec.qmin)


def start_tensors(qparams: QParams) -> tuple[Tensor, Tensor]:
    """Scale and zero point as float32 tensors of their own, of one shape, () for a scale for the whole tensor."""
    scale = np.array(qparams.scale, np.float32)
    zero_point = np.broadcast_to(np.asarray(qparams.zero_point, np.float32), scale.shape).copy()
    shape = () if qparams.spec.axis is None else scale.shape
    return torch.from_numpy(scale).reshape(shape), torch.from_numpy(zero_point).reshape(shape)


def quant_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What the fake-quant modules inside `module` learn: (its dotted name, parameter), each once.

    For a group of its own in the optimizer: scales, zero points and clipping levels take no weight decay.
    """
    return [
        (f"{path}.{name}" if path else name, parameter)
        for path, inner in module.named_modules()
        if isinstance(inner, FakeQuant)
        for name, parameter in inner.named_parameters(recurse=False)
    ]


def _numpy(tensor: Tensor) -> Array:
    """A float32 copy."""
    return np.array(tensor.detach().float().cpu().numpy(), np.float32)


def _check(spec: QuantSpec, qparams: QParams, name: str) -> None:
    """Refuse what the arithmetic here does not cover; see `FakeQuant`."""
    if spec.is_fp8:
        raise RecipeError(f"'{name}' is to become fp8, which cannot be trained: give it integers, of 2 to 16 bits")
    if spec.bits > MAX_BITS:
        raise RecipeError(f"'{name}' is to have {spec.bits} bits, and at most {MAX_BITS} can be trained: lower 'bits'")
    if spec != qparams.spec:
        raise RecipeError(
            f"'{name}' is to become {spec.label()}, but its scale was made for {qparams.spec.label()}: "
            f"calibrate with the spec that is to be trained"
        )
