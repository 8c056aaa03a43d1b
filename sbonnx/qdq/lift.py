"""Conversion of ops on integer codes, between a QuantizeLinear and a DequantizeLinear, back to ops on floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import MOVES_DATA, PADS, PICKS_MAX, QUANTIZE
from sbonnx.qdq.values import Numbers, numbers
from sbonnx.report import Refusal

FILL: Final = 2
"""Index of Pad's fill value."""

MOVERS: Final = MOVES_DATA | PICKS_MAX | PADS


@dataclass(frozen=True)
class Lifted:
    """Result of `lift`.

    Attributes:
        nodes: the converted ops, which now have float inputs and outputs.
        refusals: ops that were not converted, with the reason.
    """

    nodes: tuple[Node, ...]
    refusals: tuple[Refusal, ...]


def lift(graph: Graph, what: str) -> Lifted:
    """Write ``Q -> op -> DQ`` as ``Q -> DQ -> op -> Q -> DQ`` with the same scales, for ops that only move values.

    In place. Quantization commutes with moving values, so the results are equal. A Pad fills with the dequantized value
    of its fill code.

    Args:
        what: name of the step in refusals.
    """
    names = edit.Names(graph)
    nodes: list[Node] = []
    refusals: list[Refusal] = []
    for _, body in list(query.scopes(graph)):
        for node in list(body.nodes):
            source = query.producer(node.inputs[0]) if node.inputs else None
            if node.op not in MOVERS or source is None or source.op not in QUANTIZE:
                continue
            found = numbers(source)
            if found is None or found.scale.size != 1:
                why = f"{node.op} moves codes whose scale is computed, or one of many"
                refusals.append(Refusal(what, str(node.name), why))
                continue
            _lift(node, source, found, body, names)
            nodes.append(node)
    if nodes:
        edit.sort(graph)
    return Lifted(tuple(nodes), tuple(refusals))


def _lift(node: Node, source: Node, found: Numbers, body: Body, names: edit.Names) -> None:
    codes: Tensor = node.inputs[0]
    pair = source.inputs[1:]
    before = _like(codes, names.fresh(f"{codes.name}_float"), found)
    made = Node("DequantizeLinear", names.fresh(f"{codes.name}_DequantizeLinear"), dict(source.attrs), [], [before])
    made.inputs.extend([codes, *pair])
    edit.replace_input(node, 0, before)
    body.nodes.append(made)
    if node.op in PADS and len(node.inputs) > FILL and not node.inputs[FILL].is_empty():
        fill = query.constant(node.inputs[FILL])
        if fill is not None:
            floats = np.asarray(found.dequantize(fill.reshape(())))
            edit.replace_input(node, FILL, edit.add_constant(body, f"{node.name}_fill", floats, names))
    for index, output in enumerate(list(node.outputs)):
        floats_out = _like(output, names.fresh(f"{output.name}_float"), found)
        edit.replace_output(node, index, floats_out)
        after = Node("QuantizeLinear", names.fresh(f"{node.name}_QuantizeLinear"), dict(source.attrs), [], [output])
        after.inputs.extend([floats_out, *pair])
        body.nodes.append(after)


def _like(tensor: Tensor, name: str, found: Numbers) -> Variable:
    shape = query.shape(tensor)
    return Variable(name, found.scale.dtype, None if shape is None else list(shape))
