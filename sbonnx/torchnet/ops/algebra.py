"""Einsum, Det, Hardmax, LRN, mean-variance normalization and Lp pooling."""

from __future__ import annotations

from typing import Any

from sbonnx.torchnet.call import Call, Tensor, Unfit, axis_of
from sbonnx.torchnet.ops.reductions import reduce
from sbonnx.torchnet.ops.windows import FUNCTIONAL, flat_pads, window_pads


def einsum(call: Call, *inputs: Tensor) -> Tensor:
    """ONNX Einsum."""
    return call.torch.einsum(call.text("equation", "").replace(" ", ""), *inputs)


def det(call: Call, x: Tensor) -> Tensor:
    """ONNX Det."""
    return call.torch.linalg.det(x)


def hardmax(call: Call, x: Tensor) -> Tensor:
    """ONNX Hardmax: 1 at the first maximum, else 0; before opset 13 over all axes starting at `axis`."""
    torch, axis = call.torch, axis_of(call.integer("axis", -1 if call.opset >= 13 else 1), x.dim())
    rows = x if call.opset >= 13 else x.reshape(*x.shape[:axis], -1)
    axis = axis if call.opset >= 13 else rows.dim() - 1
    best = torch.argmax(rows, dim=axis, keepdim=True)
    return torch.zeros_like(rows).scatter(axis, best, 1).reshape(x.shape)


def lrn(call: Call, x: Tensor) -> Tensor:
    """ONNX LRN: x / (bias + alpha / size * sum of squares over a window of channels)^beta."""
    size, channels = call.integer("size", 1), x.shape[1]
    squares = call.torch.nn.functional.pad(
        (x * x).reshape(x.shape[0], 1, channels, -1), [0, 0, (size - 1) // 2, size - 1 - (size - 1) // 2]
    )
    total = call.torch.nn.functional.avg_pool2d(squares, (size, 1), stride=1).reshape(x.shape) * size
    base = call.number("bias", 1.0) + call.number("alpha", 1e-4) / size * total
    return x / base ** call.number("beta", 0.75)


def mean_variance(call: Call, x: Tensor) -> Tensor:
    """ONNX MeanVarianceNormalization with epsilon 1e-9. Source: function body in the ONNX specification."""
    axes = call.integers("axes", (0, 2, 3))
    mean = x.mean(dim=axes, keepdim=True)
    variance = (x * x).mean(dim=axes, keepdim=True) - mean * mean
    return (x - mean) / (variance.clamp(min=0).sqrt() + 1e-9)


def reduce_log_sum(call: Call, x: Tensor, axes: Any = None) -> Tensor:
    """ONNX ReduceLogSum."""
    return reduce("sum")(call, x, axes).log()


def lp_pool(call: Call, x: Tensor) -> Tensor:
    """ONNX LpPool: p-th root of the sum of the p-th powers in each window."""
    kernel, rank, p = call.integers("kernel_shape") or [], x.dim() - 2, call.integer("p", 2)
    if not 1 <= rank <= 3:
        raise Unfit(f"it has {rank} axes of positions")
    strides, dilations, pads = window_pads(call, x.shape[2:], kernel)
    powers = call.torch.nn.functional.pad(x.abs() ** p, flat_pads(pads))
    ones = powers.new_ones(powers.shape[1], 1, *kernel)
    function = getattr(call.torch.nn.functional, f"conv{FUNCTIONAL[rank]}")
    return function(powers, ones, None, strides, 0, dilations, powers.shape[1]) ** (1.0 / p)


def global_lp_pool(call: Call, x: Tensor) -> Tensor:
    """ONNX GlobalLpPool."""
    p = call.integer("p", 2)
    return (x.abs() ** p).sum(dim=list(range(2, x.dim())), keepdim=True) ** (1.0 / p)
