"""Deformable convolution and max unpooling."""

from __future__ import annotations

import math
from typing import Any

from sbonnx.torchnet.call import Call, Tensor, Unfit, ints


def deform_conv(
    call: Call, x: Tensor, w: Tensor, offset: Tensor, b: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """ONNX DeformConv over two spatial axes: a convolution whose taps are shifted by offsets (y, x).

    Values between pixels are interpolated bilinearly, with zeros outside the image. Source: Dai et al. 2017, equation
    2; masks: Zhu et al. 2019, equation 1.

    Raises:
        Unfit: another number of spatial axes.
    """
    if x.dim() != 4:
        raise Unfit(f"it has {x.dim() - 2} axes of positions")
    torch, (count, channels, height, width) = call.torch, x.shape
    taps, (rows, columns) = math.prod(w.shape[2:]), offset.shape[2:]
    groups, parts = call.integer("group", 1), call.integer("offset_group", 1)
    places = _taps(call, w, offset) + offset.reshape(count, parts, taps, 2, rows, columns)
    sizes = x.new_tensor([height, width]).reshape(2, 1, 1)
    grid = ((2 * places + 1) / sizes - 1).flip(3).permute(0, 1, 2, 4, 5, 3)  # grid_sample takes x first
    seen = torch.nn.functional.grid_sample(
        x.reshape(count * parts, channels // parts, height, width),
        grid.reshape(count * parts, taps * rows, columns, 2),
        align_corners=False,
    )
    seen = seen.reshape(count, parts, channels // parts, taps, rows, columns)
    seen = seen if mask is None else seen * mask.reshape(count, parts, 1, taps, rows, columns)
    flat = w.reshape(groups, w.shape[0] // groups, -1)
    y = (flat @ seen.reshape(count, groups, flat.shape[2], -1)).reshape(count, -1, rows, columns)
    return y if b is None else y + b.reshape(1, -1, 1, 1)


def _taps(call: Call, w: Tensor, offset: Tensor) -> Tensor:
    """Compute the position of each tap without offset, in pixels: (taps, 2, rows, columns)."""
    torch, axes = call.torch, []
    strides, dilations = call.integers("strides") or [1, 1], call.integers("dilations") or [1, 1]
    begins = (call.integers("pads") or [0, 0])[:2]
    for kernel, steps, stride, dilation, begin in zip(
        w.shape[2:], offset.shape[2:], strides, dilations, begins, strict=True
    ):
        first = torch.arange(steps, device=offset.device) * stride - begin
        axes.append(first + torch.arange(kernel, device=offset.device)[:, None] * dilation)
    (kh, rows), (kw, columns) = axes[0].shape, axes[1].shape
    y = axes[0][:, None, :, None].expand(kh, kw, rows, columns)
    x = axes[1][None, :, None, :].expand(kh, kw, rows, columns)
    return torch.stack([y, x], dim=2).reshape(kh * kw, 2, rows, columns).to(offset.dtype)


def max_unpool(call: Call, x: Tensor, indices: Tensor, shape: Any = None) -> Tensor:
    """ONNX MaxUnpool: place the values at the indices of a MaxPool, with zeros elsewhere.

    Indices refer to the output shape that follows from kernel, strides and pads. If `shape` is larger, zeros are added
    at the end of the axes.
    """
    kernel, rank = call.integers("kernel_shape") or [], x.dim() - 2
    strides, pads = call.integers("strides") or [1] * rank, call.integers("pads") or [0] * (2 * rank)
    sizes = [
        (size - 1) * stride - pads[axis] - pads[axis + rank] + k
        for axis, (size, stride, k) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))
    ]
    flat = x.new_zeros(math.prod(x.shape[:2]) * math.prod(sizes))
    y = flat.scatter(0, indices.to(x.device).reshape(-1), x.reshape(-1)).reshape(*x.shape[:2], *sizes)
    if shape is None:
        return y
    more = [side for size, have in zip(ints(shape)[:1:-1], sizes[::-1], strict=True) for side in (0, size - have)]
    return call.torch.nn.functional.pad(y, more)
