"""Integer convolutions as onnxruntime runs them, and padding of their weights with zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.graph import Body, Constant, Node, Tensor, Variable, edit, query
from sbonnx.ops import DEQUANTIZE
from sbonnx.spec import Array

BIAS: Final = 2
"""Index of a Conv's bias."""


@dataclass(frozen=True)
class IntegerConv:
    """A Conv on integers: every input comes from a DequantizeLinear, weight and bias from constants.

    Attributes:
        node: the Conv.
        data: the DequantizeLinear of its input; its codes are unsigned or signed 8 bits, with one scale.
        weight, bias: the DequantizeLinear of constant codes; bias is None if it is absent or a float constant.
        depthwise: each channel has its own filter.
    """

    node: Node
    data: Node
    weight: Node
    bias: Node | None
    depthwise: bool

    @property
    def codes(self) -> Array:
        """Weight codes, (out, in / group, *kernel)."""
        value = query.constant(self.weight.inputs[0])
        if value is None:
            raise ValueError(f"'{self.weight.name}' reads no constant")
        return value


def integer_conv(node: Node) -> IntegerConv | None:
    """Return `node` as an integer convolution, or None if it is not one."""
    if node.op != "Conv":
        return None
    data, weight, *rest = [_dequantized(tensor) for tensor in node.inputs if not tensor.is_empty()]
    bias = rest[0] if rest else None
    if data is None or weight is None or (rest and bias is None and not isinstance(node.inputs[2], Constant)):
        return None
    if not all(isinstance(source.inputs[0], Constant) for source in (weight, bias) if source is not None):
        return None
    if isinstance(data.inputs[0], Constant) or not one_scale(data):
        return None
    codes = query.constant(weight.inputs[0])
    if codes is None or codes.dtype != np.int8 or _any_zero_point(weight):
        return None  # padding writes the code 0, which must mean 0.0
    groups = int(node.attrs.get("group", 1))
    depthwise = groups > 1 and codes.shape[0] == groups and codes.shape[1] == 1
    if groups > 1 and not depthwise:
        return None
    return IntegerConv(node, data, weight, bias, depthwise)


def _dequantized(tensor: Tensor) -> Node | None:
    """Return the DequantizeLinear that writes a tensor, or None."""
    producer = query.producer(tensor)
    return producer if producer is not None and producer.op in DEQUANTIZE else None


def one_scale(node: Node) -> bool:
    """Return whether a QuantizeLinear or DequantizeLinear has a single constant scale and a zero point."""
    scale = query.constant(node.inputs[1])
    return scale is not None and scale.size == 1 and len(node.inputs) > 2


def _any_zero_point(node: Node) -> bool:
    zero = query.constant(node.inputs[2]) if len(node.inputs) > 2 and not node.inputs[2].is_empty() else None
    return zero is not None and bool(zero.any())


def like(tensor: Tensor, name: str) -> Variable:
    """Create a tensor of the same type and shape."""
    return Variable(name, dtype=tensor.dtype, shape=None if tensor.shape is None else list(tensor.shape))


def set_channels(tensor: Tensor, channels: int) -> None:
    """Set the number of channels in the shape of a tensor, if its shape is known."""
    shape = query.shape(tensor)
    if isinstance(tensor, Variable) and shape is not None:
        tensor.shape = [channels if axis == 1 else size for axis, size in enumerate(shape)]


def widen(conv: IntegerConv, axis: int, by: int, body: Body, names: edit.Names) -> Node:
    """Add zero weights along an axis: 0 for output channels (with scales and biases), 1 for input channels.

    The new channels copy the scale and zero point of the first one: any value is right for zeros, and the scale of a
    bias stays the product of the other two. Return the DequantizeLinear of the weight, which now has no other reader.
    """
    changed = []
    nodes = [conv.weight] if axis or conv.bias is None else [conv.weight, conv.bias]
    for place, node in enumerate(nodes, start=1):
        node = _own(node, conv.node, place, body, names)
        changed.append(node)
        for index, tensor in enumerate(list(node.inputs)):
            values = np.asarray(query.constant(tensor))
            if index == 0:
                values = _zeros_behind(values, axis, by)
                node.outputs[0].shape = list(values.shape)
            elif axis or values.size == 1:
                continue
            else:
                values = np.concatenate([values, np.repeat(values[:1], by)])
            edit.replace_input(node, index, edit.add_constant(body, tensor.name, values, names))
    if axis == 0 and conv.bias is None and len(conv.node.inputs) > BIAS and not conv.node.inputs[BIAS].is_empty():
        tensor = conv.node.inputs[BIAS]
        values = _zeros_behind(np.asarray(query.constant(tensor)), 0, by)
        edit.replace_input(conv.node, BIAS, edit.add_constant(body, tensor.name, values, names))
    return changed[0]


def _own(node: Node, reader: Node, place: int, body: Body, names: edit.Names) -> Node:
    """Return `node`, or a copy of it if it has other readers."""
    if len(query.readers(node.outputs[0])) == 1:
        return node
    output = like(node.outputs[0], names.fresh(node.outputs[0].name))
    copy = Node(
        op=node.op,
        name=names.fresh(node.name),
        attrs=dict(node.attrs),
        inputs=list(node.inputs),
        outputs=[output],
        domain=node.domain,
    )
    body.nodes.append(copy)
    edit.replace_input(reader, place, output)
    return copy


def _zeros_behind(values: Array, axis: int, by: int) -> Array:
    shape = list(values.shape)
    shape[axis] = by
    return np.concatenate([values, np.zeros(shape, values.dtype)], axis=axis)
