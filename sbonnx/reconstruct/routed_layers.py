"""Layers of mixtures of experts: rows that a router weights, as loops or masks over experts compute them.

An expert's output is multiplied by its gate, one factor for each row (token): an error of the row counts by the square
of the factor. An exporter writes the expert on the rows that were routed to it (NonZero, Gather), or on all rows, of
which those not routed to it have factor 0. Gates of other kinds, such as that of a shared expert, are found too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sbonnx.graph import Constant, Graph, Node, Tensor, Variable
from sbonnx.graph.query import constant, dtype, optional_input, output_names, producer, rank, readers, shape
from sbonnx.ops import EMBEDDING, MATRIX_PRODUCTS, MOVES_DATA, MULTIPLIES, POINTWISE, SHAPED_BY_VALUES
from sbonnx.reconstruct.layer_inputs import Layer


def routed(graph: Graph, layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with gates for those whose outputs are multiplied by one factor for each row.

    Experts follow each other: the inputs of one are summed when the one before is rounded up to its last layer. A layer
    on rows that a router selects is fitted to the quantized stream alone, in which other rows may be selected.
    """
    leaving = output_names(graph)
    routed_layers: list[Layer] = []
    gate, current, before = None, "", ""
    for layer in layers:
        factor = _gate(layer, leaving)
        if factor is None:
            routed_layers.append(layer)
            continue
        if factor.name != gate:
            gate, before = factor.name, current
        current = layer.tensor
        alone = layer.alone or _selected(layer.node.inputs[layer.index])
        after = (before,) if before else ()
        routed_layers.append(replace(layer, gate=factor.name, after=after, alone=alone))
    return routed_layers


def _gate(layer: Layer, leaving: set[str]) -> Tensor | None:
    """Return the factor of each row that every path from the output of a layer is multiplied by; None if there is none.

    The path has element-wise operators, and products whose weight is constant.
    """
    node = layer.node
    if node.op not in MATRIX_PRODUCTS or layer.others or not layer.rounds or layer.layout.trans_a:
        return None
    factors: dict[str, Tensor] = {}
    stack, done = [node.outputs[0]], set[str]()
    while stack:
        tensor = stack.pop()
        uses = readers(tensor)
        if not uses or tensor.name in leaving:
            return None
        for reader, index in uses:
            factor = _factor(reader, index)
            if factor is not None:
                factors[factor.name] = factor
            elif not _keeps_rows(reader, index):
                return None
            elif reader.name not in done:
                done.add(reader.name)
                stack.extend(reader.outputs)
    return next(iter(factors.values())) if len(factors) == 1 else None


def _factor(node: Node, index: int) -> Tensor | None:
    """Return what a Mul multiplies the rows of its input by, if that is a variable with one column."""
    if node.op not in MULTIPLIES:
        return None
    rows, other = node.inputs[index], node.inputs[1 - index]
    columns = shape(other)
    alike = columns is not None and len(columns) == rank(rows) and isinstance(other, Variable)
    return other if alike and columns and columns[-1] == 1 else None


def _keeps_rows(node: Node, index: int) -> bool:
    """Return whether each row of the output of a node depends on one row of the input only, the one in its place."""
    if node.op in MATRIX_PRODUCTS:
        return index == 0 and isinstance(node.inputs[1], Constant) and not node.attrs.get("transA", 0)
    if node.op == "Split":
        return int(node.attrs.get("axis", 0)) in (-1, (rank(node.inputs[0]) or 0) - 1)
    if node.op == "Slice":
        axes = constant(optional_input(node, 3))
        return index == 0 and axes is not None and bool(np.isin(axes, (-1, (rank(node.inputs[0]) or 0) - 1)).all())
    return node.op in POINTWISE


def _is_number(tensor: Tensor) -> bool:
    """Return whether a tensor has integers, such as the numbers of rows."""
    kind = dtype(tensor)
    return kind is not None and kind.kind in "iu"


def _selected(tensor: Tensor) -> bool:
    """Return whether the rows of a tensor are selected by values, as by NonZero of the choice of a router."""
    stack, done = [tensor], set[int]()
    while stack:
        node = producer(stack.pop())
        if node is None or id(node) in done:
            continue
        done.add(id(node))
        if node.op in SHAPED_BY_VALUES:
            return True
        if node.op in EMBEDDING or node.op == "GatherND":
            stack.extend(node.inputs if _is_number(node.inputs[0]) else node.inputs[1:])
        elif node.op in MATRIX_PRODUCTS:
            stack.append(node.inputs[0])
        elif node.op in POINTWISE | MOVES_DATA | {"Concat"}:
            stack.extend(node.inputs)
    return False
