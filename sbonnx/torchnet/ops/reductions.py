"""Reductions, normalization and softmax."""

from __future__ import annotations

from typing import Any

from sbonnx.torchnet.call import Call, Function, Tensor, Unfit, axis_of


def reduce(name: str) -> Function:
    """Return the function of an op that calls a torch reduction by name; axes are an attribute or input, by opset."""

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
    """ONNX ArgMax: index of the maximum; of equal values the first or last."""
    return _best(call, x, "argmax")


def arg_min(call: Call, x: Tensor) -> Tensor:
    """ONNX ArgMin: index of the minimum; of equal values the first or last."""
    return _best(call, x, "argmin")


def _best(call: Call, x: Tensor, name: str) -> Tensor:
    """Compute the index of the largest or smallest value along the axis."""
    axis, last = axis_of(call.integer("axis", 0), x.dim()), bool(call.integer("select_last_index", 0))
    found = getattr(call.torch, name)(x.flip(axis) if last else x, dim=axis, keepdim=bool(call.integer("keepdims", 1)))
    return x.shape[axis] - 1 - found if last else found


def softmax(call: Call, x: Tensor) -> Tensor:
    """ONNX Softmax; before opset 13 over all axes starting at `axis`."""
    return _rows(call, x, "softmax")


def log_softmax(call: Call, x: Tensor) -> Tensor:
    """ONNX LogSoftmax; before opset 13 over all axes starting at `axis`."""
    return _rows(call, x, "log_softmax")


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
    """ONNX RMSNormalization."""
    axes = list(range(axis_of(call.integer("axis", -1), x.dim()), x.dim()))
    square = (x * x).mean(dim=axes, keepdim=True)
    return x * call.torch.rsqrt(square + call.number("epsilon", 1e-5)) * scale


def instance_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """ONNX InstanceNormalization."""
    return call.torch.nn.functional.instance_norm(x, weight=scale, bias=bias, eps=call.number("epsilon", 1e-5))


def group_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """ONNX GroupNormalization; scale and bias are per channel since opset 21, per group before."""
    groups, channels = call.integer("num_groups", 1), x.shape[1]
    if scale.numel() != channels:
        scale, bias = (part.repeat_interleave(channels // groups) for part in (scale, bias))
    return call.torch.nn.functional.group_norm(x, groups, scale, bias, call.number("epsilon", 1e-5))


def lp_norm(call: Call, x: Tensor) -> Tensor:
    """ONNX LpNormalization."""
    length = call.torch.norm(x, p=call.integer("p", 2), dim=call.integer("axis", -1), keepdim=True)
    return x / call.torch.where(length == 0, call.torch.ones_like(length), length)


def _axes(call: Call, x: Tensor, axes: Tensor | None) -> tuple[list[int], bool]:
    """Return (axes to reduce, keepdims). Without axes, all are reduced, or none if noop_with_empty_axes is set."""
    chosen = call.listed("axes", axes)
    if not chosen:
        chosen = [] if call.integer("noop_with_empty_axes", 0) else list(range(x.dim()))
    return chosen, bool(call.integer("keepdims", 1))


def _rows(call: Call, x: Tensor, name: str) -> Tensor:
    """Compute softmax or log-softmax by torch's function name."""
    function = getattr(call.torch.nn.functional, name)
    if call.opset >= 13:
        return function(x, dim=call.integer("axis", -1))
    axis = axis_of(call.integer("axis", 1), x.dim())
    return function(x.reshape(*x.shape[:axis], -1), dim=-1).reshape(x.shape)
