"""Fake quantization with gradients, as differentiable functions of tensors; statistics of values that share a scale.

The values are those of `sbonnx.spec.QParams.fake_quant`, operation for operation:

    q = clamp(round_half_even(x / scale) + zero_point, qmin, qmax),   y = (q - zero_point) * scale

The three ``fake_quantize`` functions differ only in their gradients. Scales and zero points must broadcast against
``x`` (see `spread`) and be on its device. Half and bfloat16 are computed in float32, and only the result
is rounded to the type of ``x``. Gradients of a scale are summed in float32 or wider, in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from sbonnx.spec import QuantSpec


def widened(x: Tensor) -> Tensor:
    """Cast `x` to float32; float64 is kept."""
    return x if x.dtype == torch.float64 else x.float()


def _narrowed(y: Tensor, x: Tensor) -> Tensor:
    """Cast `y`, the result of an operator out of place, to the type of `x`.

    torch.compile of torch 2.11 gives zero gradients to a Function whose output is a tensor changed in place, or the
    same tensor again, as ``to`` returns it where the type is equal.
    """
    return y if y.dtype == x.dtype else y.to(x.dtype)


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """Quantize and dequantize `x`, with a straight-through gradient for `x` only.

        dx = g where qmin <= round(x / scale) + zero_point <= qmax, else 0

    Args:
        x: any shape, floating point.
        scale: > 0, broadcasts against `x`.
        zero_point: integers within [qmin, qmax], broadcasts against `x`.
        qmin, qmax: lowest and highest code.

    Returns:
        shape and type of `x`. NaN stays NaN.
    """
    return _Fixed.apply(x, scale, zero_point, qmin, qmax)


def fake_quantize_learned(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """Compute `fake_quantize` with gradients for scale and zero point too.

        dx          = g where qmin <= round(x / scale) + zero_point <= qmax, else 0
        dscale      = sum g * { round(x / scale) - x / scale inside;  qmin - zero_point below;
                                qmax - zero_point above }
        dzero_point = sum g * { 0 inside;  -scale outside }

    Source: Esser et al. 2020, "Learned Step Size Quantization", equation 3; Bhalgat et al. 2020, "LSQ+", equations
    5 and 6, in terms of the zero point instead of the offset.
    """
    return _Learned.apply(x, scale, zero_point, qmin, qmax)


def fake_quantize_clipped(
    x: Tensor, alpha: Tensor, scale: Tensor, zero_point: Tensor, reach: Tensor, ends: tuple[int, int]
) -> Tensor:
    """Compute `fake_quantize` with a gradient for the clipping level alpha that the scale is derived from.

        low = (qmin - zero_point) * scale,  high = (qmax - zero_point) * scale
        dx     = g where low <= x < high, else 0
        dalpha = sum g * { 0 inside;  (qmax - zero_point) / reach above;  (qmin - zero_point) / reach below }

    For unsigned codes with zero point 0 this is the gradient of the paper: 1 where x >= alpha, else 0.

    Args:
        x, scale, zero_point: see `fake_quantize`.
        alpha: ``scale * reach``, broadcasts against `x`; used in the gradient only.
        reach: number of codes between 0 and alpha, broadcasts against `x`.
        ends: lowest and highest code, qmin and qmax.

    Source: Choi et al. 2018, "PACT: Parameterized Clipping Activation", equations 1 to 3.
    """
    return _Clipped.apply(x, alpha, scale, zero_point, reach, ends)


def positive(value: Tensor, least: float, most: float, factor: float = 1.0) -> Tensor:
    """Compute ``clamp(|value|, least, most)``, with the gradient ``factor * g * sign(value)`` for every value.

    The gradient also passes outside the limits, and the sign of 0 is 1. A scale that has reached its lower limit can
    therefore increase again; with `torch.abs` and `torch.clamp` its gradient would be 0.
    """
    return _Positive.apply(value, least, most, factor)


def whole(zero_point: Tensor, qmin: int, qmax: int, factor: float = 1.0) -> Tensor:
    """Compute ``clamp(round_half_even(zero_point), qmin, qmax)``, with a straight-through gradient times `factor`.

    At or beyond a limit, only a gradient that points further outside is set to 0. A zero point at a limit (0 after a
    Relu) can therefore move inside, and one that momentum has moved past a limit can return; with `torch.clamp` its
    gradient would stay 0.
    """
    return _Whole.apply(zero_point, qmin, qmax, factor)


class _Fixed(Function):  # type: ignore[misc]
    """Autograd function of `fake_quantize`. Saves one byte per element for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        codes = (widened(x) / scale).round_().add_(zero_point)
        limited = codes.clamp(qmin, qmax)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(codes == limited)
        return _narrowed(limited.sub_(zero_point) * scale, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grad, 0.0), None, None, None, None


class _Learned(Function):  # type: ignore[misc]
    """Autograd function of `fake_quantize_learned`. Saves x in its own type for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.ends = (qmin, qmax)
        codes = (widened(x) / scale).round_().add_(zero_point).clamp_(qmin, qmax)
        return _narrowed(codes.sub_(zero_point) * scale, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        qmin, qmax = ctx.ends
        ratio = widened(x) / scale
        codes = ratio.round().add_(zero_point)
        limited = codes.clamp(qmin, qmax)
        inside = codes == limited
        wide = widened(grad)
        d_scale = d_zero = None
        if ctx.needs_input_grad[1]:
            slope = (limited - zero_point).sub_(torch.where(inside, ratio, 0.0))
            d_scale = (wide * slope).sum_to_size(scale.shape).to(scale.dtype)
        if ctx.needs_input_grad[2]:
            d_zero = torch.where(inside, 0.0, -wide * scale).sum_to_size(zero_point.shape).to(zero_point.dtype)
        return torch.where(inside, grad, 0.0), d_scale, d_zero, None, None


class _Clipped(Function):  # type: ignore[misc]
    """Autograd function of `fake_quantize_clipped`. Saves one byte per element for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        alpha: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        reach: Tensor,
        ends: tuple[int, int],
    ) -> Tensor:
        wide, (qmin, qmax) = widened(x), ends
        up, down = qmax - zero_point, qmin - zero_point
        side = (wide >= up * scale).to(torch.int8) - (wide < down * scale).to(torch.int8)
        ctx.save_for_backward(side, alpha, up / reach, down / reach)
        codes = (wide / scale).round_().add_(zero_point).clamp_(qmin, qmax)
        return _narrowed(codes.sub_(zero_point) * scale, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        side, alpha, up, down = ctx.saved_tensors
        d_alpha = None
        if ctx.needs_input_grad[1]:
            slope = torch.where(side > 0, up, torch.where(side < 0, down, 0.0))
            d_alpha = (widened(grad) * slope).sum_to_size(alpha.shape).to(alpha.dtype)
        return torch.where(side == 0, grad, 0.0), d_alpha, None, None, None, None


class _Positive(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Tensor, least: float, most: float, factor: float) -> Tensor:
        ctx.save_for_backward(value < 0)
        ctx.factor = factor
        return value.abs().clamp(least, most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (negative,) = ctx.saved_tensors
        return torch.where(negative, -grad, grad) * ctx.factor, None, None, None


class _Whole(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, zero_point: Tensor, qmin: int, qmax: int, factor: float) -> Tensor:
        ctx.save_for_backward(zero_point)
        ctx.ends = (qmin, qmax)
        ctx.factor = factor
        return torch.round(zero_point).clamp(qmin, qmax)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (zero_point,) = ctx.saved_tensors
        qmin, qmax = ctx.ends
        # Gradient descent: a positive gradient decreases the zero point.
        outward = ((zero_point <= qmin) & (grad > 0)) | ((zero_point >= qmax) & (grad < 0))
        return torch.where(outward, 0.0, grad * ctx.factor), None, None, None


def spread(values: Tensor, spec: QuantSpec, shape: tuple[int, ...]) -> Tensor:
    """Reshape `values`, one for each scale, so that they broadcast against a tensor of `shape`.

    The layouts are those of `sbonnx.spec.QParams.along`. Differentiable and deterministic: gradients of a scale are
    summed without atomic additions.

    Args:
        values: shape (), (C,) along ``spec.axis``, or the shape of the tensor with blocks instead of ``spec.axis``.
        spec: granularity of the scales.
        shape: shape of the tensor.
    """
    if values.ndim == 0 or spec.axis is None:
        return values
    if spec.block_size is not None:
        return values.repeat_interleave(spec.block_size, dim=spec.axis).narrow(spec.axis, 0, shape[spec.axis])
    return values.reshape([-1 if index == spec.axis else 1 for index in range(len(shape))])


def shape_of_scale(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scale of a tensor of `shape`.

    Raises:
        IndexError: the tensor has no such axis.
    """
    if spec.axis is None:
        return ()
    length = shape[spec.axis]
    if spec.block_size is None:
        return (length,)
    return (*shape[: spec.axis], -(-length // spec.block_size), *shape[spec.axis + 1 :])


def _apart(x: Tensor, spec: QuantSpec) -> tuple[Tensor, list[int]]:
    """Split `x` into groups, with the last block padded with 0; returns the reshaped tensor and the axes of a group."""
    if spec.axis is None:
        return x.reshape(-1), [0]
    if spec.block_size is None:
        return x.movedim(spec.axis, 0).unsqueeze(-1).flatten(1), [1]
    missing = -x.shape[spec.axis] % spec.block_size
    full = pad(x, [0, 0] * (x.ndim - 1 - spec.axis) + [0, missing])
    return full.unflatten(spec.axis, (-1, spec.block_size)), [spec.axis + 1]


def totals(x: Tensor, spec: QuantSpec) -> Tensor:
    """Compute the sum of each group, in the shape of the scale."""
    parted, over = _apart(x, spec)
    return parted.sum(over)


def extremes(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Compute the minimum and maximum of each group, extended to include 0, in the shape of the scale."""
    parted, over = _apart(x, spec)
    wide = pad(parted, [0, 1]) if over[0] == parted.ndim - 1 else parted  # amin and amax fail on empty groups
    low, high = wide.amin(over), wide.amax(over)
    return low.clamp(max=0.0), high.clamp(min=0.0)


def mean_magnitude(x: Tensor, spec: QuantSpec) -> Tensor:
    """Compute the mean of ``|x|`` of each group, float64; 0 for an empty group."""
    wide = x.double()
    return totals(wide.abs(), spec) / totals(torch.ones_like(wide), spec).clamp(min=1.0)


def mean_and_deviation(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation (with n - 1) of each group, float64; 0 for too few values."""
    wide = x.double()
    count = totals(torch.ones_like(wide), spec)
    mean = totals(wide, spec) / count.clamp(min=1.0)
    squares = totals((wide - spread(mean, spec, tuple(x.shape))).square(), spec)
    return mean, (squares / (count - 1.0).clamp(min=1.0)).sqrt()
