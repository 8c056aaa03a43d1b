"""Embedding tables: which matrix a Gather reads rows of, and tables that are the weight of a linear op too.

A tied model has one matrix for its token embedding and its head. Exporters write it once, as the (H, V) weight of the
head's MatMul that the Gather reads through a Transpose, or twice; and constant folding makes two of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, edit, query
from sbonnx.graph.storage.weights import release_pages
from sbonnx.linear.layer import weight_index
from sbonnx.ops import EMBEDDING, MATRIX_PRODUCTS
from sbonnx.spec import Array

CHUNK: Final = 1 << 22
"""Values that are compared at a time."""


@dataclass(frozen=True)
class EmbeddingTable:
    """A Gather of rows of a matrix.

    Attributes:
        gather: the Gather.
        reader: the node that reads the matrix: the Gather, or a Transpose before it.
        matrix: (V, H), or (H, V) before a Transpose; not necessarily constant.
        turned: whether there is a Transpose.
    """

    gather: Node
    reader: Node
    matrix: Tensor
    turned: bool

    @property
    def row_axis(self) -> int:
        """Axis of the matrix along which a row of the table runs (H)."""
        return 0 if self.turned else 1


def table_of(node: Node) -> EmbeddingTable | None:
    """Return the table whose rows a Gather reads; None for any other node."""
    if node.op not in EMBEDDING or node.domain or node.attrs.get("axis", 0) != 0:
        return None
    source = node.inputs[0]
    before = query.producer(source)
    if before is not None and before.op == "Transpose" and list(before.attrs.get("perm", (1, 0))) == [1, 0]:
        return EmbeddingTable(node, before, before.inputs[0], turned=True)
    return EmbeddingTable(node, node, source, turned=False)


def constant_tables(graph: Graph) -> Iterator[tuple[Body, EmbeddingTable]]:
    """Yield every table that is a constant float matrix, with the scope of its Gather."""
    for _, body in query.scopes(graph):
        for node in body.nodes:
            table = table_of(node)
            matrix = None if table is None else table.matrix
            if table is None or not isinstance(matrix, Constant) or len(matrix.shape) != 2:
                continue
            if str(query.dtype(matrix)).startswith("float"):
                yield body, table


def tie_tables(graph: Graph) -> list[str]:
    """Let tables with the values of a linear op's weight read that weight. In place.

    A Gather of a table equal to the transposed weight reads it through a Transpose.

    Returns:
        The names of the tables that are gone.
    """
    weights = _weights(graph)
    names = edit.Names(graph)
    tied: list[str] = []
    for body, table in list(constant_tables(graph)):
        if table.turned or any(table.matrix is weight for weight in weights):
            continue
        name = table.matrix.name
        rows = _values(table.matrix)
        for weight in weights:
            values = _values(weight)
            if _equal(rows, values):
                edit.replace_input(table.gather, 0, weight)
            elif _equal(rows, values.T):
                edit.replace_input(table.gather, 0, _transposed(body, weight, names))
            else:
                continue
            tied.append(name)
            break
    if tied:
        edit.sort(graph)
    return tied


def _weights(graph: Graph) -> list[Constant]:
    """Return the constant matrices on the right of matrix products, each once."""
    weights: dict[int, Constant] = {}
    for node in query.all_nodes(graph):
        if node.op in MATRIX_PRODUCTS and weight_index(node) == 1 and len(node.inputs[1].shape) == 2:
            weights[id(node.inputs[1])] = node.inputs[1]
    return list(weights.values())


def _values(tensor: Constant) -> Array:
    value = query.constant(tensor)
    assert value is not None
    return value


def _equal(one: Array, other: Array) -> bool:
    """Return whether two matrices have the same type and values."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    step = max(1, CHUNK // max(one.shape[1], 1))
    for at in range(0, len(one), step):
        same = np.array_equal(one[at : at + step], other[at : at + step])
        if len(one) > step:
            release_pages()
        if not same:
            return False
    return True


def _transposed(body: Body, weight: Constant, names: edit.Names) -> Tensor:
    """Add a Transpose of a weight to a scope, and return its output."""
    rows = Variable(names.fresh(f"{weight.name}_rows"), query.dtype(weight), tuple(weight.shape[::-1]))
    stem = f"{weight.name}_Transpose"
    edit.add_node(body, "Transpose", [weight], names=names, stem=stem, attrs={"perm": [1, 0]}, outputs=[rows])
    return rows
