"""Finding Q/DQ pairs in a graph, and taking them out again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbonnx.graph import Constant, Graph, Node, Tensor, edit, node_metadata, query
from sbonnx.ops import BOUNDS, DEQUANTIZE, QUANTIZE
from sbonnx.qdq.insert import BITS
from sbonnx.spec import Array, QParams, QuantSpec


@dataclass(frozen=True)
class Pair:
    """One DequantizeLinear with constant numbers, and what belongs to it.

    Attributes:
        node: name of the DequantizeLinear.
        source: the float tensor that is quantized, or the constant that holds codes.
        output: the dequantized tensor.
        qparams: scale, zero point, width.
        constant: the source is a constant: codes (`codes` True) or floats behind a QuantizeLinear.
        codes: there is no QuantizeLinear, the source holds integers.
    """

    node: str
    source: str
    output: str
    qparams: QParams
    constant: bool
    codes: bool


def read(graph: Graph) -> tuple[Pair, ...]:
    """Every pair of the graph, branches included, in node order. int32 biases are left out."""
    pairs = []
    for _, body in query.scopes(graph):
        for node in body.nodes:
            if node.op in DEQUANTIZE:
                pair = _read_one(node, node_metadata(graph, node.name).get("sbonnx.scheme"))
                if pair is not None:
                    pairs.append(pair)
    return tuple(pairs)


def _numbers(node: Node) -> tuple[Array, Array] | None:
    """Scale and zero point of a Q or DQ node, when both are constants."""
    scale = query.constant(node.inputs[1])
    zero = query.constant(node.inputs[2]) if len(node.inputs) > 2 and not node.inputs[2].is_empty() else None
    if scale is None:
        return None
    if zero is None:
        kind = query.dtype(node.inputs[0]) if node.op in DEQUANTIZE else None
        zero = np.zeros(scale.shape, kind if kind is not None else np.uint8)
    return scale, zero


def _spec(zero: Array, node: Node, axis: int | None, scheme: str | None) -> QuantSpec:
    """What the type of the zero point, its value and ``__bits`` say; our metadata knows affine with a central zero."""
    kind = str(zero.dtype)
    signed = not kind.startswith("u")
    width = int("".join(c for c in kind if c.isdigit()))
    bits = int(node.attrs.get(BITS, width))
    centre = 0 if signed else 1 << (bits - 1)
    symmetric = scheme != "affine" and bool((zero.astype(np.int32) == centre).all())
    block = int(node.attrs["block_size"]) if axis is not None and node.attrs.get("block_size") else None
    return QuantSpec(bits=bits, signed=signed, symmetric=symmetric, axis=axis, block_size=block)


def _source(node: Node) -> tuple[Tensor, bool]:
    """The tensor a pair starts from, past its QuantizeLinear and our clip, and whether it holds codes."""
    tensor = node.inputs[0]
    producer = query.producer(tensor)
    if producer is None or producer.op not in QUANTIZE:
        return tensor, True
    tensor = producer.inputs[0]
    producer = query.producer(tensor)
    while producer is not None and producer.op in BOUNDS and BITS in producer.attrs:
        tensor = producer.inputs[0]
        producer = query.producer(tensor)
    return tensor, False


def _read_one(node: Node, scheme: str | None) -> Pair | None:
    numbers = _numbers(node)
    if numbers is None or str(numbers[1].dtype) == "int32" or not str(numbers[1].dtype).lstrip("u").startswith("int"):
        return None
    scale, zero = numbers
    axis = None if scale.ndim == 0 or scale.size == 1 else int(node.attrs.get("axis", 1))
    if axis is not None and axis < 0:
        axis += query.rank(node.inputs[0]) or 0
    scale = scale.astype(np.float32).reshape(() if axis is None else scale.shape)
    spec = _spec(zero, node, axis, scheme)
    zero_point = zero.astype(spec.dtype).reshape(scale.shape)
    tensor, codes = _source(node)
    return Pair(
        node=node.name,
        source=tensor.name,
        output=node.outputs[0].name,
        qparams=QParams(scale, zero_point, spec),
        constant=isinstance(tensor, Constant),
        codes=codes,
    )


def strip(graph: Graph) -> int:
    """Take every pair out: activations lose it, weights and biases become float constants. In place.

    Returns how many were taken out. A DequantizeLinear of a computed integer tensor stays. A Relu that another tool
    deleted because the zero point does its work is not brought back.
    """
    names = edit.Names(graph)
    count = 0
    for _, body in query.scopes(graph):
        for node in list(body.nodes):
            if node.op not in DEQUANTIZE:
                continue
            tensor, codes = _source(node)
            if codes:
                value = _dequantized(node, tensor)
                if value is None:
                    continue
                tensor = edit.add_constant(body, f"{tensor.name}_float", value, names)
            edit.replace_all_uses(node.outputs[0], tensor, graph=body)
            count += 1
    edit.sweep(graph)
    return count


def _dequantized(node: Node, tensor: Tensor) -> Array | None:
    """Float values of constant codes, in the type of the scale."""
    numbers = _numbers(node)
    codes = query.constant(tensor)
    if numbers is None or codes is None:
        return None
    scale, zero = numbers
    if scale.size > 1:
        axis = int(node.attrs.get("axis", 1)) % codes.ndim
        along = [-1 if i == axis else 1 for i in range(codes.ndim)]
        if scale.ndim == codes.ndim:
            repeat = -(-codes.shape[axis] // scale.shape[axis])
            take = np.arange(codes.shape[axis])
            scale = np.take(np.repeat(scale, repeat, axis=axis), take, axis=axis)
            zero = np.take(np.repeat(zero, repeat, axis=axis), take, axis=axis)
        else:
            scale, zero = scale.reshape(along), zero.reshape(along)
    steps = codes.astype(np.int64) - zero.astype(np.int64)
    return np.asarray((steps.astype(np.float32) * scale.astype(np.float32)).astype(scale.dtype))
