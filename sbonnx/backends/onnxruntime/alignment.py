"""Channel padding of depthwise convolutions with zeros, to the multiples for which onnxruntime's kernel is fast.

A depthwise convolution of 24 channels takes longer than one of 32 (docs/decisions/0007). Zero weights and zero inputs
add nothing to a sum, so the widened model computes the same integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from sbonnx.backends.onnxruntime.convolutions import IntegerConv, integer_conv, one_scale, set_channels, widen
from sbonnx.graph import Body, Graph, Node, Tensor, edit, query
from sbonnx.ops import DEQUANTIZE, QUANTIZE, RECTIFIERS

LANES: Final = 16
"""Channels that the kernel computes at a time; the remainder is computed one by one."""

MAX_WIDTH: Final = 2.0
"""Largest widening factor: beyond it the added channels cost as much as they save."""


def align(graph: Graph) -> list[str]:
    """Widen depthwise convolutions in every scope, in place. Return one sentence per change.

    Args:
        graph: with Q/DQ pairs in place.
    """
    done: list[str] = []
    names = edit.Names(graph)
    for _, body in query.scopes(graph):
        convs = {id(node): conv for node in body.nodes if (conv := integer_conv(node)) is not None}
        outputs = {tensor.name for tensor in body.outputs}
        done += _align_depthwise(convs, outputs, body, names)
    if done:
        edit.sort(graph)
    return done


@dataclass
class Region:
    """Tensors that must have the same number of channels, and the convolutions that write and read them."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    writers: dict[int, IntegerConv] = field(default_factory=dict)
    readers: dict[int, IntegerConv] = field(default_factory=dict)


def _align_depthwise(convs: dict[int, IntegerConv], outputs: set[str], body: Body, names: edit.Names) -> Iterator[str]:
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
        wide = -(-channels // LANES) * LANES
        if wide == channels or wide > MAX_WIDTH * channels:
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
        chain = _chain(_written_by(conv) if output else conv.data.outputs[0], outputs)
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


def _written_by(conv: IntegerConv) -> Tensor:
    tensor: Tensor = conv.node.outputs[0]
    return tensor


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
            elif index == 0 and reader.op in QUANTIZE | DEQUANTIZE | RECTIFIERS and _per_tensor(reader):
                waiting.append(reader.outputs[0])
            else:
                return None
    return tensors, producer, ends


def _per_tensor(node: Node) -> bool:
    return node.op in RECTIFIERS or one_scale(node)
