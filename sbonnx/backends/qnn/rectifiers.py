"""Rewrite of activations between an op and the pair behind it, with the same results.

The pair of an op is planned behind the Relu or Clip that follows. In the file, the QuantizeLinear of a node unit has to
follow its op. If the codes saturate where the activation does, it has no effect and is removed; its bounds are kept in
an attribute, from which `sbonnx.qdq.strip` restores it. Else it becomes a node unit: a pair with the parameters of the
one behind it is inserted before it. Rounding is monotonic, so that ``Q(Clip(DQ(Q(x))))`` equals ``Q(Clip(x))`` for the
same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from sbonnx.backends.base import in_every_scope
from sbonnx.backends.saturating_codes import has_no_effect, remove_rectifier
from sbonnx.graph import Body, Node, Tensor, edit, query
from sbonnx.ops import DEQUANTIZE, QUANTIZE, RECTIFIERS


@in_every_scope()
def settle_rectifiers(body: Body, names: edit.Names) -> Iterator[str]:
    """Remove each Relu or Clip that only a pair reads, or insert a pair before it."""
    outputs = {id(tensor) for tensor in body.outputs}
    for node in list(body.nodes):
        before = query.producer(node.inputs[0]) if node.op in RECTIFIERS else None
        pair = None if before is None or before.op in DEQUANTIZE else _pair_behind(node, outputs)
        if pair is None:
            continue
        quantize, dequantize = pair
        if has_no_effect(node, quantize):
            remove_rectifier(node, quantize)
            yield f"{node.name}: removed, since the codes behind it saturate at its bounds"
            continue
        tensor: Tensor = node.inputs[0]
        for copied in (quantize, dequantize):
            inputs = [tensor, *copied.inputs[1:]]
            added = edit.add_node(body, copied.op, inputs, names=names, stem=copied.name, attrs=dict(copied.attrs))
            added.outputs[0].dtype, added.outputs[0].shape = copied.outputs[0].dtype, node.inputs[0].shape
            tensor = added.outputs[0]
        edit.replace_input(node, 0, tensor)
        yield f"{node.name}: a pair before it, with the scale of the pair behind it"


def _pair_behind(node: Node, outputs: set[int]) -> tuple[Node, Node] | None:
    """Return the pair that is the only reader of a node; None if there is none, or the node writes an output."""
    readers = query.readers(node.outputs[0])
    if len(readers) != 1 or id(node.outputs[0]) in outputs or readers[0][0].op not in QUANTIZE:
        return None
    quantize = readers[0][0]
    behind = [reader for reader, _ in query.readers(quantize.outputs[0]) if reader.op in DEQUANTIZE]
    return (quantize, behind[0]) if behind else None
