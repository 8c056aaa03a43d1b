"""Ops of quantized models. Integer products are computed in float64, because torch has no integer kernels for them."""

from __future__ import annotations

from typing import Any, Final

from sbonnx.torchnet.call import Call, Tensor, Unfit, axis_of
from sbonnx.torchnet.ops.convolution import conv
from sbonnx.torchnet.ops.pointwise import torch_type

RANGES: Final = {
    "int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767), "uint16": (0, 65535),
    "int32": (-(2**31), 2**31 - 1),
}  # fmt: skip
"""Saturation limits of quantized values by type."""


def quantize_linear(call: Call, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """ONNX QuantizeLinear: saturate(round half to even(x / scale) + zero point), without gradient.

    Raises:
        Unfit: the quantized type is not supported; see `RANGES`.
    """
    torch = call.torch
    kind = zero_point.dtype if zero_point is not None else torch_type(torch, call.integer("output_dtype", 0) or 2)
    scale = _spread(call, scale, x)
    shift = 0 if zero_point is None else _spread(call, zero_point, x).to(torch.float64)
    return _codes(call, x / scale.to(x.dtype), shift, kind)


def dequantize_linear(call: Call, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """ONNX DequantizeLinear: (x - zero point) * scale, in the type of the scale."""
    shift, spread = dequantize_parts(call, x, scale, zero_point)
    return (x.to(scale.dtype) - shift) * spread


def dequantize_parts(call: Call, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> tuple[Any, Tensor]:
    """Return zero point and scale of a DequantizeLinear, which broadcast to its values `x`."""
    shift = 0 if zero_point is None else _spread(call, zero_point, x).to(scale.dtype)
    return shift, _spread(call, scale, x)


def dynamic_quantize_linear(call: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ONNX DynamicQuantizeLinear → uint8 values, scale, zero point."""
    torch = call.torch
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero_point = (-low / scale).clamp(0, 255).round().to(torch.uint8)
    return _codes(call, x / scale, zero_point.to(torch.float64), torch.uint8), scale, zero_point


def matmul_integer(call: Call, a: Tensor, b: Tensor, za: Tensor | None = None, zb: Tensor | None = None) -> Tensor:
    """ONNX MatMulInteger; zero points are per tensor, or per row of a and per column of b."""
    left, right = a.to(call.torch.float64), b.to(call.torch.float64)
    if za is not None:
        left = left - (za[..., None] if za.dim() == 1 and za.numel() > 1 else za).to(left.dtype)
    if zb is not None:
        right = right - zb.to(right.dtype)
    return (left @ right).to(call.torch.int32)


def conv_integer(call: Call, x: Tensor, w: Tensor, zx: Tensor | None = None, zw: Tensor | None = None) -> Tensor:
    """ONNX ConvInteger; the zero point of w is per tensor or per output channel."""
    left, right = x.to(call.torch.float64), w.to(call.torch.float64)
    left = left if zx is None else left - zx.to(left.dtype)
    right = right if zw is None else right - _first(zw, w).to(right.dtype)
    return conv(call, left, right).to(call.torch.int32)


def qlinear_matmul(call: Call, *inputs: Tensor) -> Tensor:
    """ONNX QLinearMatMul of a and b, each followed by its scale and zero point; then those of the output."""
    a, sa, za, b, sb, zb, sy, zy = inputs
    wide = call.torch.float64
    sums = matmul_integer(call, a, b, za, zb).to(wide)
    row = sa[..., None] if sa.dim() == 1 and sa.numel() > 1 else sa
    return _codes(call, sums * row.to(wide) * sb.to(wide) / sy.to(wide), zy.to(wide), zy.dtype)


def qlinear_conv(call: Call, *inputs: Tensor) -> Tensor:
    """ONNX QLinearConv of x and w, each followed by its scale and zero point; those of the output; the bias."""
    x, sx, zx, w, sw, zw, sy, zy, *bias = inputs
    b = bias[0] if bias else None
    wide = call.torch.float64
    sums = conv(call, x.to(wide) - zx.to(wide), w.to(wide) - _first(zw, w).to(wide))
    line = [1, -1] + [1] * (sums.dim() - 2)
    sums = sums if b is None else sums + b.to(wide).reshape(line)
    scale = sw.to(wide).reshape(line) if sw.numel() > 1 else sw.to(wide)
    return _codes(call, sums * sx.to(wide) * scale / sy.to(wide), zy.to(wide), zy.dtype)


def _first(part: Tensor, w: Tensor) -> Tensor:
    return part.reshape([-1] + [1] * (w.dim() - 1)) if part.numel() > 1 else part


def _codes(call: Call, x: Tensor, shift: Any, kind: Any) -> Tensor:
    """Quantize x, given in quantization steps: round, add the zero point, saturate and cast."""
    name = str(kind).removeprefix("torch.")
    if name not in RANGES:
        raise Unfit(f"quantized values of type {name} are not supported")
    low, high = RANGES[name]
    return (x.round().to(call.torch.float64) + shift).clamp(low, high).to(kind)


def _spread(call: Call, part: Tensor, x: Tensor) -> Tensor:
    if part.numel() == 1 and part.dim() <= 1:
        return part.reshape(())
    axis, block = axis_of(call.integer("axis", 1), x.dim()), call.integer("block_size", 0)
    if part.dim() == 1 and not block:
        return part.reshape([-1 if dim == axis else 1 for dim in range(x.dim())])
    if not block:
        return part
    return part.repeat_interleave(block, dim=axis).narrow(axis, 0, x.shape[axis])
