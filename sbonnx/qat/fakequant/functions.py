"""Fake quantization with gradients: differentiable functions of tensors, without state.

The values are those of `sbonnx.spec.QParams.fake_quant`, operation for operation:

    q = clamp(round_half_even(x / scale) + zero_point, qmin, qmax),   y = (q - zero_point) * scale

What the three functions of that name differ in are the gradients. Scales and zero points come spread over ``x``
(see `sbonnx.qat.fakequant.groups.spread`) and on its device. Half and bfloat16 are computed in float32 and only the
result is rounded to the type of ``x``; sums of gradients over a scale are made in float32 or wider, in fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def widened(x: Tensor) -> Tensor:
    """`x` in float32, or as it is where it is wider than that."""
    return x if x.dtype == torch.float64 else x.float()


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """`x` after a trip through the codes; straight-through gradient to `x` alone.

        dx = g where qmin <= round(x / scale) + zero_point <= qmax, else 0

    Args:
        x: any shape, floating point.
        scale: > 0, broadcasts against `x`.
        zero_point: whole numbers within [qmin, qmax], broadcasts against `x`.
        qmin, qmax: lowest and highest code.

    Returns:
        shape and type of `x`. NaN stays NaN.
    """
    return _Fixed.apply(x, scale, zero_point, qmin, qmax)


def fake_quantize_learned(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """As `fake_quantize`, with gradients to scale and zero point too.

        dx          = g where qmin <= round(x / scale) + zero_point <= qmax, else 0
        dscale      = sum g * { round(x / scale) - x / scale inside;  qmin - zero_point below;
                                qmax - zero_point above }
        dzero_point = sum g * { 0 inside;  -scale outside }

    Source: Esser et al. 2020, "Learned Step Size Quantization", equation 3; Bhalgat et al. 2020, "LSQ+", equations
    5 and 6, in terms of the zero point instead of the offset.
    """
    return _Learned.apply(x, scale, zero_point, qmin, qmax)


def fake_quantize_clipped(
    x: Tensor, alpha: Tensor, scale: Tensor, zero_point: Tensor, reach: Tensor, qmin: int, qmax: int
) -> Tensor:
    """As `fake_quantize`, with a gradient to the clipping level that the scale was made of.

        low = (qmin - zero_point) * scale,  high = (qmax - zero_point) * scale
        dx     = g where low <= x < high, else 0
        dalpha = sum g * { 0 inside;  (qmax - zero_point) / reach above;  (qmin - zero_point) / reach below }

    which for unsigned codes from zero is the paper's: 1 where x >= alpha, else 0.

    Args:
        alpha: ``scale * reach``, broadcasts against `x`; takes part in nothing but the gradient.
        reach: how many codes lie between 0 and alpha, broadcasts against `x`.

    Source: Choi et al. 2018, "PACT: Parameterized Clipping Activation", equations 1 to 3.
    """
    return _Clipped.apply(x, alpha, scale, zero_point, reach, qmin, qmax)


def positive(value: Tensor, least: float, most: float, factor: float = 1.0) -> Tensor:
    """``clamp(|value|, least, most)``, with the gradient ``factor * g * sign(value)`` wherever the value is.

    The gradient passes through the limits, and the sign of 0 is 1: a scale that has fallen to its floor can rise
    again, where `torch.abs` and `torch.clamp` would hold it there.
    """
    return _Positive.apply(value, least, most, factor)


def whole(zero_point: Tensor, qmin: int, qmax: int, factor: float = 1.0) -> Tensor:
    """``clamp(round_half_even(zero_point), qmin, qmax)``, straight through, with the gradient times `factor`.

    No gradient leads further out of the range. A zero point of 0, that of a tensor behind a Relu, may rise, and one
    that momentum has carried past the end comes back, where the gradient of `torch.clamp` would end for good.
    """
    return _Whole.apply(zero_point, qmin, qmax, factor)


class _Fixed(Function):  # type: ignore[misc]
    """See `fake_quantize`. Keeps one byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        codes = (widened(x) / scale).round_().add_(zero_point)
        limited = codes.clamp(qmin, qmax)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(codes == limited)
        return limited.sub_(zero_point).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grad, 0.0), None, None, None, None


class _Learned(Function):  # type: ignore[misc]
    """See `fake_quantize_learned`. Keeps x, in its own type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.ends = (qmin, qmax)
        codes = (widened(x) / scale).round_().add_(zero_point).clamp_(qmin, qmax)
        return codes.sub_(zero_point).mul_(scale).to(x.dtype)

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
    """See `fake_quantize_clipped`. Keeps one byte an element."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        alpha: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        reach: Tensor,
        qmin: int,
        qmax: int,
    ) -> Tensor:
        wide = widened(x)
        up, down = qmax - zero_point, qmin - zero_point
        side = (wide >= up * scale).to(torch.int8) - (wide < down * scale).to(torch.int8)
        ctx.save_for_backward(side, alpha, up / reach, down / reach)
        codes = (wide / scale).round_().add_(zero_point).clamp_(qmin, qmax)
        return codes.sub_(zero_point).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        side, alpha, up, down = ctx.saved_tensors
        d_alpha = None
        if ctx.needs_input_grad[1]:
            slope = torch.where(side > 0, up, torch.where(side < 0, down, 0.0))
            d_alpha = (widened(grad) * slope).sum_to_size(alpha.shape).to(alpha.dtype)
        return torch.where(side == 0, grad, 0.0), d_alpha, None, None, None, None, None


class _Positive(Function):  # type: ignore[misc]
    """See `positive`."""

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
    """See `whole`."""

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
        # Descent goes against the gradient: a positive one lowers the zero point.
        outward = ((zero_point <= qmin) & (grad > 0)) | ((zero_point >= qmax) & (grad < 0))
        return torch.where(outward, 0.0, grad * ctx.factor), None, None, None
