"""Rewrite of residual sums before a layer normalization, to prevent a slow fusion in onnxruntime's CPU provider.

It fuses Add and LayerNormalization into SkipLayerNormalization, whose CPU kernel takes 4 to 6 times as long as the two
separate ops (docs/decisions/0007). A Sum computes the same values, is not fused, and can include a bias.
"""

from __future__ import annotations

from collections.abc import Iterator

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import ADDS, DEQUANTIZE, QUANTIZE

NORMALIZES = "LayerNormalization"
FIRST_OF_UNROLLED = "ReduceMean"
"""First op of a normalization that is written in single ops."""


def write_sums(graph: Graph) -> list[str]:
    """Replace such Adds by Sums in every scope, in place. Return one sentence per change."""
    done: list[str] = []
    names = edit.Names(graph)
    for _, body in query.scopes(graph):
        outputs = {tensor.name for tensor in body.outputs}
        for node in list(_residual_sums(body)):
            output = node.outputs[0]
            edit.replace_output(node, 0, Variable(names.fresh(output.name), output.dtype, output.shape))
            name = names.fresh(f"{node.name}_Sum")
            body.nodes.append(Node("Sum", name, {}, _terms(node, outputs), [output]))
            done.append(f"{node.name}: written as Sum")
    if done:
        edit.sweep(graph)
        edit.sort(graph)
    return done


def _residual_sums(body: Body) -> Iterator[Node]:
    for node in body.nodes:
        if node.op not in ADDS or any(_outside(tensor) for tensor in node.inputs):
            continue
        ops = {reader.op for reader, _ in query.readers(node.outputs[0])}
        if ops & QUANTIZE:
            continue
        if NORMALIZES in ops or FIRST_OF_UNROLLED in ops:
            yield node


def _outside(tensor: Tensor) -> bool:
    """Return whether a tensor is not a float activation: a constant, or one that an integer kernel may read."""
    producer = query.producer(tensor)
    return isinstance(tensor, Constant) or (producer is not None and producer.op in DEQUANTIZE)


def _terms(node: Node, outputs: set[str]) -> list[Tensor]:
    """Return the terms of an Add in the order of the additions, including a bias added to one side before."""
    for index, tensor in enumerate(node.inputs):
        inner = query.producer(tensor)
        if inner is None or inner.op not in ADDS or len(query.readers(tensor)) != 1 or tensor.name in outputs:
            continue
        if any(isinstance(term, Constant) for term in inner.inputs):
            return [*inner.inputs, node.inputs[1 - index]]
    return list(node.inputs)
