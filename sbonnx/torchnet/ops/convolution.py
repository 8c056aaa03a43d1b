"""Convolutions, matrix products, pooling and Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sbonnx.torchnet.call import Call, Function, Tensor, Unfit, axis_of, number, numbers


def conv(call: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """ONNX Conv over one to three spatial axes."""
    kernel, rank = list(w.shape[2:]), _spatial_axes(x)
    strides, dilations = _each(call, "strides", rank), _each(call, "dilations", rank)
    pads = _pads(call, x.shape[2:], kernel, strides, dilations)
    padding = [begin for begin, _ in pads]
    if any(begin != end for begin, end in pads):  # torch convolutions have symmetric padding only
        x, padding = call.torch.nn.functional.pad(x, _flat_pads(pads)), [0] * rank
    function = getattr(call.torch.nn.functional, f"conv{rank}d")
    return function(x, w, b, strides, padding, dilations, call.integer("group", 1))


def conv_transpose(call: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """ONNX ConvTranspose: the full output, extended by output_padding at the end, then cropped by pads."""
    kernel, rank = list(w.shape[2:]), _spatial_axes(x)
    strides, dilations = _each(call, "strides", rank), _each(call, "dilations", rank)
    extra = call.integers("output_padding") or [0] * rank
    function = getattr(call.torch.nn.functional, f"conv_transpose{rank}d")
    groups = call.integer("group", 1)
    full = function(x, w, None, strides, 0, 0, groups, dilations)
    lengths = [
        (size - 1) * stride + (k - 1) * dilation + 1 + add
        for size, stride, k, dilation, add in zip(x.shape[2:], strides, kernel, dilations, extra, strict=True)
    ]
    if any(extra):
        full = call.torch.nn.functional.pad(
            full, _flat_pads([(0, n - m) for n, m in zip(lengths, full.shape[2:], strict=True)])
        )
    cut = [(-begin, -end) for begin, end in _transposed_pads(call, x.shape[2:], lengths, strides)]
    full = call.torch.nn.functional.pad(full, _flat_pads(cut)) if any(map(any, cut)) else full
    return full if b is None else full + b.reshape([1, -1] + [1] * rank)


def _transposed_pads(
    call: Call, sizes: Sequence[int], lengths: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the crop (before, after) of each spatial axis. Source: ONNX ConvTranspose, output_shape and auto_pad."""
    wanted, auto = call.integers("output_shape"), call.text("auto_pad", "NOTSET")
    if wanted is None and auto.startswith("SAME"):
        wanted = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    if wanted is None:
        pads = call.integers("pads") or [0] * (2 * len(lengths))
        pads = [0] * len(pads) if auto == "VALID" else pads
        return list(zip(pads[: len(lengths)], pads[len(lengths) :], strict=True))
    crops = []
    for length, target in zip(lengths, wanted[-len(lengths) :], strict=True):
        total = length - target
        if total < 0:  # output_shape exceeds the full output: zeros at the end
            crops.append((0, total))
            continue
        small = total // 2
        crops.append((small, total - small) if auto == "SAME_UPPER" else (total - small, small))
    return crops


def gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """ONNX Gemm: alpha A B + beta C."""
    a = a.transpose(0, 1) if call.integer("transA", 0) else a
    b = b.transpose(0, 1) if call.integer("transB", 0) else b
    alpha, beta = call.number("alpha", 1.0), call.number("beta", 1.0)
    y = a @ b if alpha == 1.0 else alpha * (a @ b)
    return y if c is None else y + (c if beta == 1.0 else beta * c)


def max_pool(call: Call, x: Tensor) -> Any:
    kernel, rank = call.integers("kernel_shape") or [], _spatial_axes(x)
    strides, dilations, pads = _window_pads(call, x.shape[2:], kernel)
    function = getattr(call.torch.nn.functional, f"max_pool{rank}d")
    if all(begin == end and 2 * begin <= k for (begin, end), k in zip(pads, kernel, strict=True)):
        result = function(x, kernel, strides, [begin for begin, _ in pads], dilations, return_indices=call.outputs > 1)
        return (result[0], _flat_places(call, x, result[1])) if call.outputs > 1 else result
    if call.outputs > 1:
        raise Unfit("MaxPool returns indices and has asymmetric padding")
    if not x.dtype.is_floating_point:
        raise Unfit("MaxPool of integers has asymmetric padding")
    return function(call.torch.nn.functional.pad(x, _flat_pads(pads), value=-math.inf), kernel, strides, 0, dilations)


def _flat_places(call: Call, x: Tensor, places: Tensor) -> Tensor:
    """Convert indices within a plane to ONNX's indices within the whole tensor, row-major or column-major."""
    plane = math.prod(x.shape[2:])
    if call.integer("storage_order", 0):
        rest, result, step = places, call.torch.zeros_like(places), plane
        for size in reversed(x.shape[2:]):
            step = step // size
            result, rest = result + rest % size * step, rest // size
        places = result
    planes = call.torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape(*x.shape[:2], *[1] * (x.dim() - 2))
    return places + planes * plane


def average_pool(call: Call, x: Tensor) -> Tensor:
    """ONNX AveragePool; padding counts in the divisor only if count_include_pad is set."""
    functional, torch = call.torch.nn.functional, call.torch
    kernel, rank = call.integers("kernel_shape") or [], _spatial_axes(x)
    strides, dilations = _each(call, "strides", rank), _each(call, "dilations", rank)
    pads = _pads(call, x.shape[2:], kernel, strides, dilations)
    beyond = _ceiled(x.shape[2:], kernel, strides, dilations, pads) if call.integer("ceil_mode", 0) else pads
    average = getattr(functional, f"avg_pool{rank}d")
    if beyond == pads and not any(side for pair in pads for side in pair) and set(dilations) == {1}:
        return average(x, kernel, strides)

    def function(values: Tensor, kernel: Sequence[int], strides: Sequence[int]) -> Tensor:
        if set(dilations) == {1}:
            return average(values, kernel, strides)
        ones = values.new_full((values.shape[1], 1, *kernel), 1 / math.prod(kernel))
        spread = getattr(functional, f"conv{rank}d")
        return spread(values, ones, None, strides, 0, dilations, values.shape[1])

    y = function(functional.pad(x, _flat_pads(beyond)), kernel, strides)
    ones = torch.ones([1, 1, *x.shape[2:]], dtype=x.dtype, device=x.device)
    if call.integer("count_include_pad", 0):
        ones = functional.pad(ones, _flat_pads(pads), value=1.0)
        beyond = [(b - p, e - q) for (b, e), (p, q) in zip(beyond, pads, strict=True)]
    return y / function(functional.pad(ones, _flat_pads(beyond)), kernel, strides)


def global_pool(name: str) -> Function:
    """Return the function of GlobalAveragePool or GlobalMaxPool, by the name of the tensor method."""
    return lambda call, x: getattr(x, name)(dim=list(range(2, x.dim())), keepdim=True)


def _spatial_axes(x: Tensor) -> int:
    rank = int(x.dim()) - 2
    if not 1 <= rank <= 3:
        raise Unfit(f"it has {rank} spatial axes")
    return rank


def _each(call: Call, key: str, rank: int) -> list[int]:
    return call.integers(key) or [1] * rank


def _pads(
    call: Call, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the padding (before, after) of each spatial axis. Source: ONNX Conv, auto_pad."""
    auto, rank = call.text("auto_pad", "NOTSET"), len(kernel)
    if auto == "VALID":
        return [(0, 0)] * rank
    if auto == "NOTSET":
        pads = call.integers("pads") or [0] * (2 * rank)
        return list(zip(pads[:rank], pads[rank:], strict=True))
    padding = []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        small = total // 2
        padding.append((small, total - small) if auto == "SAME_UPPER" else (total - small, small))
    return padding


def _ceiled(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Extend pads for ceil_mode so that the last window fits; a window that would start past the end is omitted."""
    extended = []
    for size, k, stride, dilation, (begin, end) in zip(sizes, kernel, strides, dilations, pads, strict=True):
        reach = (k - 1) * dilation + 1
        count = -(-(size + begin + end - reach) // stride) + 1
        if (count - 1) * stride >= size + begin:
            count -= 1
        extended.append((begin, max(end, (count - 1) * stride + reach - size - begin)))
    return extended


def _window_pads(
    call: Call, sizes: Sequence[int], kernel: Sequence[int]
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Return (strides, dilations, pads) of a pooling node, with the pads extended for ceil_mode."""
    strides, dilations = _each(call, "strides", len(kernel)), _each(call, "dilations", len(kernel))
    pads = _pads(call, sizes, kernel, strides, dilations)
    if call.integer("ceil_mode", 0):
        pads = _ceiled(sizes, kernel, strides, dilations, pads)
    return strides, dilations, pads


def _flat_pads(pads: Sequence[tuple[int, int]]) -> list[int]:
    return [side for pair in reversed(pads) for side in pair]


def lp_pool(call: Call, x: Tensor) -> Tensor:
    """ONNX LpPool: p-th root of the sum of the p-th powers in each window."""
    kernel, rank, p = call.integers("kernel_shape") or [], _spatial_axes(x), call.integer("p", 2)
    strides, dilations, pads = _window_pads(call, x.shape[2:], kernel)
    powers = call.torch.nn.functional.pad(x.abs() ** p, _flat_pads(pads))
    ones = powers.new_ones(powers.shape[1], 1, *kernel)
    function = getattr(call.torch.nn.functional, f"conv{rank}d")
    return function(powers, ones, None, strides, 0, dilations, powers.shape[1]) ** (1.0 / p)


def global_lp_pool(call: Call, x: Tensor) -> Tensor:
    p = call.integer("p", 2)
    return (x.abs() ** p).sum(dim=list(range(2, x.dim())), keepdim=True) ** (1.0 / p)


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
        raise Unfit(f"it has {x.dim() - 2} spatial axes")
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
    strides, dilations = _each(call, "strides", 2), _each(call, "dilations", 2)
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
    more = [side for size, have in zip(numbers(shape)[:1:-1], sizes[::-1], strict=True) for side in (0, size - have)]
    return call.torch.nn.functional.pad(y, more)


def dft(call: Call, x: Tensor, length: Any = None, axis: Any = None) -> Tensor:
    """ONNX DFT of real (..., 1) or complex (..., 2) values; the axis is an attribute before opset 20."""
    default = call.integer("axis", 1) if call.opset < 20 else -2
    dim = axis_of(default if axis is None else int(number(axis)), x.dim())
    count = None if length is None else int(number(length))
    inverse, half = call.integer("inverse", 0), call.integer("onesided", 0)
    values = _values(call, x)
    if inverse and half:
        return call.torch.fft.irfft(values, count, dim).unsqueeze(-1)
    if inverse:
        return call.torch.view_as_real(call.torch.fft.ifft(values, count, dim))
    return _spectrum(call, values, count, dim, one_sided=bool(half))


def stft(call: Call, x: Tensor, step: Any, window: Tensor | None = None, length: Any = None) -> Tensor:
    """ONNX STFT of real (N, T, 1) or complex (N, T, 2) values → (N, frames, bins, 2).

    Raises:
        Unfit: neither the frame length nor a window is given.
    """
    if length is not None:
        count = int(number(length))
    elif window is not None:
        count = int(window.shape[0])
    else:
        raise Unfit("it has neither a window nor a frame length")
    frames = _values(call, x).unfold(1, count, int(number(step)))
    frames = frames if window is None else frames * window
    return _spectrum(call, frames, count, 2, one_sided=bool(call.integer("onesided", 1)))


def _values(call: Call, x: Tensor) -> Tensor:
    """Convert the last axis of size 1 or 2 to real or complex values."""
    return call.torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)


def _spectrum(call: Call, values: Tensor, count: int | None, dim: int, *, one_sided: bool) -> Tensor:
    """Compute the Fourier transform, with real and imaginary parts on the last axis.

    Raises:
        Unfit: a one-sided spectrum of complex values.
    """
    if one_sided and values.is_complex():
        raise Unfit("a one-sided spectrum needs real values")
    function = call.torch.fft.rfft if one_sided else call.torch.fft.fft
    return call.torch.view_as_real(function(values, count, dim))
