"""Reductions, normalization and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sbonnx.torchnet.call import Call, Function, Tensor, Unfit, axis_of


def reduce(name: str) -> Function:
    """Return the function of an op that calls a torch reduction by name; axes are an attribute or input, by opset."""

    def function(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen, keep = _axes(call, x, axes)
        return x if not chosen else getattr(call.torch, name)(x, dim=chosen, keepdim=keep)

    return function


def square(x: Tensor) -> Tensor:
    """Compute x², as a product."""
    return x * x


def reduce_sum(before: Callable[[Tensor], Tensor] | None = None, after: str = "") -> Function:
    """Return the function of an op that sums `before(x)` and applies the tensor method `after` to the sums."""

    def function(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
        y = reduce("sum")(call, x if before is None else before(x), axes)
        return getattr(y, after)() if after else y

    return function


def reduce_prod(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen, keep = _axes(call, x, axes)
    for axis in sorted((axis_of(axis, x.dim()) for axis in chosen), reverse=True):
        x = x.prod(dim=axis, keepdim=keep)
    return x


def extreme_index(name: str) -> Function:
    """Return the function of ArgMax or ArgMin: index of the extreme; of equal values the first or last."""

    def function(call: Call, x: Tensor) -> Tensor:
        axis, last = axis_of(call.integer("axis", 0), x.dim()), bool(call.integer("select_last_index", 0))
        keep = bool(call.integer("keepdims", 1))
        index = getattr(call.torch, name)(x.flip(axis) if last else x, dim=axis, keepdim=keep)
        return x.shape[axis] - 1 - index if last else index

    return function


def softmax(name: str) -> Function:
    """Return the function of Softmax or LogSoftmax; before opset 13 over all axes starting at `axis`."""

    def function(call: Call, x: Tensor) -> Tensor:
        functional = getattr(call.torch.nn.functional, name)
        if call.opset >= 13:
            return functional(x, dim=call.integer("axis", -1))
        axis = axis_of(call.integer("axis", 1), x.dim())
        return functional(x.reshape(*x.shape[:axis], -1), dim=-1).reshape(x.shape)

    return function


def batch_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """ONNX BatchNormalization at inference.

    Raises:
        Unfit: the node is in training mode.
    """
    if call.integer("training_mode", 0) or call.outputs > 1:
        raise Unfit("BatchNormalization is in training mode")
    epsilon = call.number("epsilon", 1e-5)
    return call.torch.nn.functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


def layer_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    """ONNX LayerNormalization over all axes starting at `axis` → Y, and mean and inverse deviation if they are used."""
    axis, epsilon = axis_of(call.integer("axis", -1), x.dim()), call.number("epsilon", 1e-5)
    normal = call.torch.nn.functional.layer_norm(x, list(x.shape[axis:]), eps=epsilon)
    y = normal * scale if bias is None else normal * scale + bias
    if call.outputs == 1:
        return y
    axes = list(range(axis, x.dim()))
    mean = x.mean(dim=axes, keepdim=True)
    return y, mean, call.torch.rsqrt(((x - mean) ** 2).mean(dim=axes, keepdim=True) + epsilon)


def rms_norm(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    axes = list(range(axis_of(call.integer("axis", -1), x.dim()), x.dim()))
    square = (x * x).mean(dim=axes, keepdim=True)
    return x * call.torch.rsqrt(square + call.number("epsilon", 1e-5)) * scale


def instance_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return call.torch.nn.functional.instance_norm(x, weight=scale, bias=bias, eps=call.number("epsilon", 1e-5))


def group_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """ONNX GroupNormalization; scale and bias are per channel since opset 21, per group before."""
    groups, channels = call.integer("num_groups", 1), x.shape[1]
    if scale.numel() != channels:
        scale, bias = (part.repeat_interleave(channels // groups) for part in (scale, bias))
    return call.torch.nn.functional.group_norm(x, groups, scale, bias, call.number("epsilon", 1e-5))


def lp_norm(call: Call, x: Tensor) -> Tensor:
    length = call.torch.norm(x, p=call.integer("p", 2), dim=call.integer("axis", -1), keepdim=True)
    return x / call.torch.where(length == 0, call.torch.ones_like(length), length)


def _axes(call: Call, x: Tensor, axes: Tensor | None) -> tuple[list[int], bool]:
    """Return (axes to reduce, keepdims). Without axes, all are reduced, or none if noop_with_empty_axes is set."""
    chosen = call.listed("axes", axes)
    if not chosen:
        chosen = [] if call.integer("noop_with_empty_axes", 0) else list(range(x.dim()))
    return chosen, bool(call.integer("keepdims", 1))


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
