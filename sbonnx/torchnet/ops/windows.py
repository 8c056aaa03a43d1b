"""Convolutions, matrix products and pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sbonnx.torchnet.call import Call, Tensor, Unfit

FUNCTIONAL = ("", "1d", "2d", "3d")
"""Suffixes of torch function names by the number of spatial axes."""


def conv(call: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """ONNX Conv over one to three spatial axes."""
    kernel, rank = list(w.shape[2:]), _positions(x)
    strides, dilations = _each(call, "strides", rank), _each(call, "dilations", rank)
    pads = _pads(call, x.shape[2:], kernel, strides, dilations)
    x, padding = _even(call, x, pads, 0.0)
    function = getattr(call.torch.nn.functional, f"conv{FUNCTIONAL[rank]}")
    return function(x, w, b, strides, padding, dilations, call.integer("group", 1))


def conv_transpose(call: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """ONNX ConvTranspose: the full output, extended by output_padding at the end, then cropped by pads."""
    kernel, rank = list(w.shape[2:]), _positions(x)
    strides, dilations = _each(call, "strides", rank), _each(call, "dilations", rank)
    extra = call.integers("output_padding") or [0] * rank
    function = getattr(call.torch.nn.functional, f"conv_transpose{FUNCTIONAL[rank]}")
    groups = call.integer("group", 1)
    full = function(x, w, None, strides, 0, 0, groups, dilations)
    lengths = [
        (size - 1) * stride + (k - 1) * dilation + 1 + add
        for size, stride, k, dilation, add in zip(x.shape[2:], strides, kernel, dilations, extra, strict=True)
    ]
    if any(extra):
        full = call.torch.nn.functional.pad(
            full, flat_pads([(0, n - m) for n, m in zip(lengths, full.shape[2:], strict=True)])
        )
    cut = [(-begin, -end) for begin, end in _transposed_pads(call, x.shape[2:], lengths, strides)]
    full = call.torch.nn.functional.pad(full, flat_pads(cut)) if any(map(any, cut)) else full
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
    found = []
    for length, target in zip(lengths, wanted[-len(lengths) :], strict=True):
        total = length - target
        if total < 0:  # output_shape exceeds the full output: zeros at the end
            found.append((0, total))
            continue
        small = total // 2
        found.append((small, total - small) if auto == "SAME_UPPER" else (total - small, small))
    return found


def gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """ONNX Gemm: alpha A B + beta C."""
    a = a.transpose(0, 1) if call.integer("transA", 0) else a
    b = b.transpose(0, 1) if call.integer("transB", 0) else b
    alpha, beta = call.number("alpha", 1.0), call.number("beta", 1.0)
    y = a @ b if alpha == 1.0 else alpha * (a @ b)
    return y if c is None else y + (c if beta == 1.0 else beta * c)


def matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """ONNX MatMul, with the semantics of numpy.matmul."""
    return call.torch.matmul(a, b)


def max_pool(call: Call, x: Tensor) -> Any:
    """ONNX MaxPool."""
    kernel, rank = call.integers("kernel_shape") or [], _positions(x)
    strides, dilations, pads = window_pads(call, x.shape[2:], kernel)
    function = getattr(call.torch.nn.functional, f"max_pool{FUNCTIONAL[rank]}")
    if all(begin == end and 2 * begin <= k for (begin, end), k in zip(pads, kernel, strict=True)):
        made = function(x, kernel, strides, [begin for begin, _ in pads], dilations, return_indices=call.outputs > 1)
        return (made[0], _flat_places(call, x, made[1])) if call.outputs > 1 else made
    if call.outputs > 1:
        raise Unfit("MaxPool gives indices, and pads one side more than the other")
    if not x.dtype.is_floating_point:
        raise Unfit("MaxPool pads integers on one side")
    return function(call.torch.nn.functional.pad(x, flat_pads(pads), value=-math.inf), kernel, strides, 0, dilations)


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
    kernel, rank = call.integers("kernel_shape") or [], _positions(x)
    strides, dilations = _each(call, "strides", rank), _each(call, "dilations", rank)
    pads = _pads(call, x.shape[2:], kernel, strides, dilations)
    beyond = _ceiled(x.shape[2:], kernel, strides, dilations, pads) if call.integer("ceil_mode", 0) else pads
    average = getattr(functional, f"avg_pool{FUNCTIONAL[rank]}")
    if beyond == pads and not any(side for pair in pads for side in pair) and set(dilations) == {1}:
        return average(x, kernel, strides)

    def function(values: Tensor, kernel: Sequence[int], strides: Sequence[int]) -> Tensor:
        if set(dilations) == {1}:
            return average(values, kernel, strides)
        ones = values.new_full((values.shape[1], 1, *kernel), 1 / math.prod(kernel))
        spread = getattr(functional, f"conv{FUNCTIONAL[rank]}")
        return spread(values, ones, None, strides, 0, dilations, values.shape[1])

    y = function(functional.pad(x, flat_pads(beyond)), kernel, strides)
    ones = torch.ones([1, 1, *x.shape[2:]], dtype=x.dtype, device=x.device)
    if call.integer("count_include_pad", 0):
        ones = functional.pad(ones, flat_pads(pads), value=1.0)
        beyond = [(b - p, e - q) for (b, e), (p, q) in zip(beyond, pads, strict=True)]
    return y / function(functional.pad(ones, flat_pads(beyond)), kernel, strides)


def global_average_pool(call: Call, x: Tensor) -> Tensor:
    """ONNX GlobalAveragePool."""
    return x.mean(dim=list(range(2, x.dim())), keepdim=True)


def global_max_pool(call: Call, x: Tensor) -> Tensor:
    """ONNX GlobalMaxPool."""
    return x.amax(dim=list(range(2, x.dim())), keepdim=True)


def _positions(x: Tensor) -> int:
    """Return the number of spatial axes.

    Raises:
        Unfit: there are more than three, or none.
    """
    rank = int(x.dim()) - 2
    if not 1 <= rank <= 3:
        raise Unfit(f"it has {rank} axes of positions")
    return rank


def _each(call: Call, key: str, rank: int) -> list[int]:
    """Return an attribute with one number for each spatial axis; default: 1."""
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
    found = []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        small = total // 2
        found.append((small, total - small) if auto == "SAME_UPPER" else (total - small, small))
    return found


def _ceiled(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Extend pads for ceil_mode so that the last window fits; a window that would start past the end is omitted."""
    found = []
    for size, k, stride, dilation, (begin, end) in zip(sizes, kernel, strides, dilations, pads, strict=True):
        reach = (k - 1) * dilation + 1
        count = -(-(size + begin + end - reach) // stride) + 1
        if (count - 1) * stride >= size + begin:
            count -= 1
        found.append((begin, max(end, (count - 1) * stride + reach - size - begin)))
    return found


def _even(call: Call, x: Tensor, pads: Sequence[tuple[int, int]], value: float) -> tuple[Tensor, list[int]]:
    """Return (input, padding) for a torch function; asymmetric padding is applied to the input here."""
    if all(begin == end for begin, end in pads):
        return x, [begin for begin, _ in pads]
    return call.torch.nn.functional.pad(x, flat_pads(pads), value=value), [0] * len(pads)


def window_pads(
    call: Call, sizes: Sequence[int], kernel: Sequence[int]
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Return (strides, dilations, pads) of a pooling node, with the pads extended for ceil_mode."""
    strides, dilations = _each(call, "strides", len(kernel)), _each(call, "dilations", len(kernel))
    pads = _pads(call, sizes, kernel, strides, dilations)
    return (
        strides,
        dilations,
        _ceiled(sizes, kernel, strides, dilations, pads) if call.integer("ceil_mode", 0) else pads,
    )


def flat_pads(pads: Sequence[tuple[int, int]]) -> list[int]:
    """Flatten pads to the order of torch's pad: last axis first."""
    return [side for pair in reversed(pads) for side in pair]
