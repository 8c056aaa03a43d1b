"""Removal of Q/DQ pairs from a graph."""

from __future__ import annotations

import numpy as np

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, edit, node_metadata, query
from sbonnx.ops import BOUNDS, DEQUANTIZE, QUANTIZE
from sbonnx.plan import BITS
from sbonnx.qdq import clamps
from sbonnx.qdq.lift import lift
from sbonnx.qdq.narrow import narrow
from sbonnx.qdq.unfold import unfold as unfold_integer_ops
from sbonnx.qdq.values import dequantized
from sbonnx.spec import Array

STORED = ("_quantized", "_rounded")
"""Suffixes of the names of stored weights; the float weight had the name without the suffix."""


def source_of(dequantize: Node) -> tuple[Tensor, bool]:
    """Return the source tensor of a pair, before its QuantizeLinear and sbonnx's Clip, and whether it holds codes."""
    tensor = dequantize.inputs[0]
    stored = query.packed(tensor)
    if stored is not None:
        return stored, True
    producer = query.producer(tensor)
    if producer is not None and producer.op in BOUNDS and BITS in producer.attrs:
        producer = query.producer(producer.inputs[0])
    if producer is None or producer.op not in QUANTIZE:
        return tensor, True
    return _before_clip(producer), False


def _before_clip(quantize: Node) -> Tensor:
    tensor = quantize.inputs[0]
    producer = query.producer(tensor)
    while producer is not None and producer.op in BOUNDS and BITS in producer.attrs:
        tensor = producer.inputs[0]
        producer = query.producer(tensor)
    return tensor


def strip(graph: Graph, *, unfold: bool = False) -> int:
    """Remove every pair: activations are rewired, weights and biases become float constants. In place.

    Pairs written by `qdq.insert` are removed completely: the same nodes, order and names as before, with the weights
    rounded to their quantized values. Pairs of other tools are removed in every form: per-channel, block-wise, small
    floats, and scales that are themselves quantized. A Relu or Clip that another tool deleted because the zero point
    replaces it is restored. Ops that moved codes move floats, and zero channels that were added for integer kernels are
    removed. A DequantizeLinear stays if its integers or its parameters are computed.

    Args:
        unfold: convert integer operators (QLinearConv, MatMulInteger, ...) to float first, see `qdq.unfold`.

    Returns:
        Number of removed DequantizeLinear nodes.
    """
    if unfold:
        unfold_integer_ops(graph)
    lifted = lift(graph, "take pairs out").nodes
    work = _Strip(graph)
    count = sum(work.scope(body) for _, body in query.scopes(graph))
    edit.sweep(graph)
    if work.restored or lifted:
        edit.sort(graph)
    if narrow(graph, work.convs):
        edit.sweep(graph)
    return count


class _Strip:
    """State of one removal: names, float constants and restored activations."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = edit.Names(graph)
        self.floats: dict[str, Constant] = {}
        self.restored: dict[int, Tensor] = {}
        self.convs: list[Node] = []

    def scope(self, body: Body) -> int:
        count = 0
        for node in list(body.nodes):
            if node.op in DEQUANTIZE and node.outputs:
                tensor = self.float_of(node, body)
                if tensor is not None:
                    if BITS in node.attrs:
                        self.convs += [
                            conv for conv, index in query.readers(node.outputs[0]) if conv.op == "Conv" and index == 1
                        ]
                    edit.replace_all_uses(node.outputs[0], tensor, graph=body)
                    count += 1
        return count

    def float_of(self, node: Node, body: Body) -> Tensor | None:
        """Return the tensor that replaces the output of a DequantizeLinear, or None if the node has to stay."""
        tensor, codes = source_of(node)
        if codes:
            value = query.unpacked(node.inputs[0])
            floats = None if value is None else dequantized(node, value)
            return None if floats is None else self.constant(node, tensor, floats)
        if isinstance(tensor, Constant):
            value = query.constant(tensor)
            return None if value is None else self.constant(node, tensor, value)
        quantize = query.producer(node.inputs[0])
        if quantize is None or clamps.lost(quantize) is None:
            return tensor
        if id(quantize) not in self.restored:
            self.restored[id(quantize)] = clamps.restore(quantize, body, self.names)
        return self.restored[id(quantize)]

    def constant(self, node: Node, stored: Tensor, values: Array) -> Constant:
        """Return a float constant with the weight's original name, if that is known and free."""
        wish = node_metadata(self.graph, node.name).get("sbonnx.tensor") or str(stored.name)
        for ending in STORED:
            wish = wish.removesuffix(ending)
        if wish == stored.name:
            if values is query.constant(stored) and isinstance(stored, Constant):
                return stored
            wish = f"{wish}_float"
        known = self.floats.get(wish)
        if known is not None and np.array_equal(query.constant(known), values):  # type: ignore[arg-type]
            return known
        made = edit.add_constant(self.graph, wish, values, self.names)
        self.floats.setdefault(wish, made)
        return made
