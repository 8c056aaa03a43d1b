"""Integer convolutions as onnxruntime runs them, and channel padding of depthwise ones, to multiples with fast kernels.

A depthwise convolution of 24 channels takes longer than one of 32 (docs/decisions/0007). Zero weights and zero inputs
add nothing to a sum, so the widened model computes the same integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sbonnx.backends.base import in_every_scope
from sbonnx.backends.onnxruntime.kernel_variants import LANES, LARGEST_WIDENING, padded
from sbonnx.graph import Body, Constant, Node, Tensor, Variable, edit, query
from sbonnx.ops import DEQUANTIZE, QUANTIZE, RECTIFIERS
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
    makers = [query.producer(tensor) for tensor in node.inputs if not tensor.is_empty()]
    data, weight, *rest = [maker if maker is not None and maker.op in DEQUANTIZE else None for maker in makers]
    bias = rest[0] if rest else None
    if data is None or weight is None or (rest and bias is None and not isinstance(node.inputs[2], Constant)):
        return None
    if not all(isinstance(source.inputs[0], Constant) for source in (weight, bias) if source is not None):
        return None
    if isinstance(data.inputs[0], Constant) or not one_scale(data):
        return None
    codes, zero = query.constant(weight.inputs[0]), None
    if len(weight.inputs) > 2 and not weight.inputs[2].is_empty():
        zero = query.constant(weight.inputs[2])
    if codes is None or codes.dtype != np.int8 or (zero is not None and zero.any()):
        return None  # padding writes the code 0, which must mean 0.0
    groups = int(node.attrs.get("group", 1))
    depthwise = groups > 1 and codes.shape[0] == groups and codes.shape[1] == 1
    if groups > 1 and not depthwise:
        return None
    return IntegerConv(node, data, weight, bias, depthwise)


def one_scale(node: Node) -> bool:
    """Return whether a QuantizeLinear or DequantizeLinear has a single constant scale and a zero point."""
    scale = query.constant(node.inputs[1])
    return scale is not None and scale.size == 1 and len(node.inputs) > 2


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
        if len(query.readers(node.outputs[0])) > 1:  # change a copy
            output = like(node.outputs[0], names.fresh(node.outputs[0].name))
            attrs, inputs = dict(node.attrs), list(node.inputs)
            node = Node(node.op, names.fresh(node.name), attrs, inputs, [output], domain=node.domain)
            body.nodes.append(node)
            edit.replace_input(conv.node, place, output)
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


def _zeros_behind(values: Array, axis: int, by: int) -> Array:
    shape = list(values.shape)
    shape[axis] = by
    return np.concatenate([values, np.zeros(shape, values.dtype)], axis=axis)


@dataclass
class Region:
    """Tensors that must have the same number of channels, and the convolutions that write and read them."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    writers: dict[int, IntegerConv] = field(default_factory=dict)
    readers: dict[int, IntegerConv] = field(default_factory=dict)


@in_every_scope(sweep=False)
def align(body: Body, names: edit.Names) -> Iterator[str]:
    """Widen depthwise convolutions."""
    convs = {id(node): conv for node in body.nodes if (conv := integer_conv(node)) is not None}
    outputs = {tensor.name for tensor in body.outputs}
    seen: set[int] = set()
    for key, conv in convs.items():
        if not conv.depthwise or key in seen:
            continue
        region = _region(conv, convs, outputs)
        if region is None:
            continue
        inside = [other for at, other in region.writers.items() if at in region.readers]
        seen.update(id(other.node) for other in inside)
        channels = conv.codes.shape[0]
        wide = padded(channels, LANES)
        if wide == channels or wide > LARGEST_WIDENING * channels:
            continue
        for at, writer in region.writers.items():
            widen(writer, 0, wide - channels, body, names)
            if at in region.readers:
                writer.node.attrs["group"] = wide
        for at, reader in region.readers.items():
            if at not in region.writers:
                widen(reader, 1, wide - channels, body, names)
        for tensor in region.tensors.values():
            set_channels(tensor, wide)
        yield f"{conv.node.name}: {channels} channels widened to {wide}"


def _region(start: IntegerConv, convs: dict[int, IntegerConv], outputs: set[str]) -> Region | None:
    """Collect the tensors that must be widened together with a depthwise convolution; None if another op uses them."""
    region = Region()
    waiting: list[tuple[IntegerConv, bool]] = [(start, True), (start, False)]
    done: set[tuple[int, bool]] = set()
    while waiting:
        conv, output = waiting.pop()
        if (id(conv.node), output) in done:
            continue
        done.add((id(conv.node), output))
        chain = _chain((conv.node if output else conv.data).outputs[0], outputs)
        if chain is None:
            return None
        tensors, writer, readers = chain
        ends = [convs.get(id(node)) for node in (writer, *readers)]
        if any(end is None for end in ends):
            return None
        region.tensors.update((id(tensor), tensor) for tensor in tensors)
        first, *others = [end for end in ends if end is not None]
        region.writers[id(first.node)] = first
        done.add((id(first.node), True))
        region.readers.update((id(end.node), end) for end in others)
        for end in (first, *others):
            if end.depthwise:
                waiting += [(end, True), (end, False)]
    return region


def _chain(tensor: Tensor, outputs: set[str]) -> tuple[list[Tensor], Node, list[Node]] | None:
    """Collect the tensors between one Conv and its readers around `tensor`: output, rectified, quantized, dequantized.

    Return None if other ops are in between, or another reader uses one of the tensors.
    """
    while (producer := query.producer(tensor)) is not None and producer.op != "Conv":
        if producer.op not in QUANTIZE | DEQUANTIZE | RECTIFIERS:
            return None
        tensor = producer.inputs[0]
    if producer is None:
        return None
    tensors: list[Tensor] = []
    ends: list[Node] = []
    waiting = [tensor]
    while waiting:
        tensor = waiting.pop()
        if tensor.name in outputs:
            return None
        tensors.append(tensor)
        for reader, index in query.readers(tensor):
            if reader.op == "Conv" and index == 0:
                ends.append(reader)
            elif index == 0 and (reader.op in RECTIFIERS or (reader.op in QUANTIZE | DEQUANTIZE and one_scale(reader))):
                waiting.append(reader.outputs[0])
            else:
                return None
    return tensors, producer, ends
