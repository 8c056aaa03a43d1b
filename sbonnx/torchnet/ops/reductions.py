"""Sums over axes, norms and softmax."""

from __future__ import annotations

from typing import Any

from sbonnx.torchnet.call import Call, Function, Tensor, Unfit, axis_of


def reduce(name: str) -> Function:
    """One of torch's reductions by its name, over axes that are an attribute or an input by opset."""

    def function(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen, keep = _axes(call, x, axes)
        return x if not chosen else getattr(call.torch, name)(x, dim=chosen, keepdim=keep)

    return function


def reduce_l1(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    """ONNX ReduceL1."""
    return reduce("sum")(call, x.abs(), axes)


def reduce_l2(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    """ONNX ReduceL2."""
    return reduce("sum")(call, x * x, axes).sqrt()


def reduce_sum_square(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    """ONNX ReduceSumSquare."""
    return reduce("sum")(call, x * x, axes)


def reduce_prod(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    """ONNX ReduceProd."""
    chosen, keep = _axes(call, x, axes)
    for axis in sorted((axis_of(axis, x.dim()) for axis in chosen), reverse=True):
        x = x.prod(dim=axis, keepdim=keep)
    return x


def arg_max(call: Call, x: Tensor) -> Tensor:
    """ONNX ArgMax, the first or last of equals."""
    return _best(call, x, "argmax")


def arg_min(call: Call, x: Tensor) -> Tensor:
    """ONNX ArgMin, likewise."""
    return _best(call, x, "argmin")


def _best(call: Call, x: Tensor, name: str) -> Tensor:
    """Where the largest or smallest value is."""
    axis, last = axis_of(call.integer("axis", 0), x.dim()), bool(call.integer("select_last_index", 0))
    found = getattr(call.torch, name)(x.flip(axis) if last else x, dim=axis, keepdim=bool(call.integer("keepdims", 1)))
    return x.shape[axis] - 1 - found if last else found


def softmax(call: Call, x: Tensor) -> Tensor:
    """ONNX Softmax; before opset 13 over all axes from the given one on."""
    return _rows(call, x, "softmax")


def log_softmax(call: Call, x: Tensor) -> Tensor:
    """ONNX LogSoftmax, likewise."""
    return _rows(call, x, "log_softmax")


def batch_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """ONNX BatchNormalization at inference.

    Raises:
        Unfit: in training mode.
    """
    if call.integer("training_mode", 0) or call.outputs > 1:
        raise Unfit("BatchNormalization is in training mode")
    epsilon = call.number("epsilon", 1e-5)
    return call.torch.nn.functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


def layer_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    """ONNX LayerNormalization over all axes from the given one on → Y, and the mean and 1 / deviation if asked for."""
    axis, epsilon = axis_of(call.integer("axis", -1), x.dim()), call.number("epsilon", 1e-5)
    normal = call.torch.nn.functional.layer_norm(x, list(x.shape[axis:]), eps=epsilon)
    y = normal * scale if bias is None else normal * scale + bias
    if call.outputs == 1:
        return y
    axes = list(range(axis, x.dim()))
    mean = x.mean(dim=axes, keepdim=True)
    return y, mean, call.torch.rsqrt(((x - mean) ** 2).mean(dim=axes, keepdim=True) + epsilon)


def rms_norm(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    """ONNX RMSNormalization."""
    axes = list(range(axis_of(call.integer("axis", -1), x.dim()), x.dim()))
    square = (x * x).mean(dim=axes, keepdim=True)
    return x * call.torch.rsqrt(square + call.number("epsilon", 1e-5)) * scale


def instance_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """ONNX InstanceNormalization."""
    return call.torch.nn.functional.instance_norm(x, weight=scale, bias=bias, eps=call.number("epsilon", 1e-5))


def group_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """ONNX GroupNormalization: from opset 21 on a scale a channel, before that one a group."""
    groups, channels = call.integer("num_groups", 1), x.shape[1]
    if scale.numel() != channels:
        scale, bias = (part.repeat_interleave(channels // groups) for part in (scale, bias))
    return call.torch.nn.functional.group_norm(x, groups, scale, bias, call.number("epsilon", 1e-5))


def lp_norm(call: Call, x: Tensor) -> Tensor:
    """ONNX LpNormalization."""
    length = call.torch.norm(x, p=call.integer("p", 2), dim=call.integer("axis", -1), keepdim=True)
    return x / call.torch.where(length == 0, call.torch.ones_like(length), length)


def _axes(call: Call, x: Tensor, axes: Tensor | None) -> tuple[list[int], bool]:
    """(axes to reduce, whether they stay as 1); no axes: none where that is asked for, else all."""
    chosen = call.listed("axes", axes)
    if not chosen:
        chosen = [] if call.integer("noop_with_empty_axes", 0) else list(range(x.dim()))
    return chosen, bool(call.integer("keepdims", 1))


def _rows(call: Call, x: Tensor, name: str) -> Tensor:
    """Softmax or its logarithm."""
    function = getattr(call.torch.nn.functional, name)
    if call.opset >= 13:
        return function(x, dim=call.integer("axis", -1))
    axis = axis_of(call.integer("axis", 1), x.dim())
    return function(x.reshape(*x.shape[:axis], -1), dim=-1).reshape(x.shape)
