"""Recognition of blocks: groups of nodes that compute one function, in which no Q/DQ may be inserted.

Blocks are never rewritten. A group is a block only if nothing outside it reads its intermediate results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sbonnx.graph import Constant, Graph, Node, Tensor
from sbonnx.graph.query import scopes

from ..index import GraphIndex
from ..match import STANDARD, find, producer_ops
from .decompositions import SHAPES

NATIVE: Final = {
    "Attention": "attention_softmax",
    "Gelu": "gelu",
    "GroupNormalization": "groupnorm",
    "HardSwish": "hardswish",
    "LayerNormalization": "layernorm",
    "Mish": "mish",
    "RMSNormalization": "rmsnorm",
    "SimplifiedLayerNormalization": "rmsnorm",  # its name in onnxruntime
    "Swish": "silu",
}
"""Ops of the standard domain that are a block alone."""


@dataclass(frozen=True)
class Block:
    """Nodes that compute one function.

    Attributes:
        kind: "gelu", "silu", "hardswish", "mish", "layernorm", "rmsnorm", "groupnorm" or "attention_softmax" (the nodes
            strictly between the product of queries and keys and the product with the values).
        nodes: their names, in the order of the graph.
        inputs: names of the non-constant tensors that they read from outside; the data input first.
        output: name of the output tensor.
        scope: path of their graph, "" for the main graph.
    """

    kind: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    output: str
    scope: str


def find_blocks(graph: Graph) -> tuple[Block, ...]:
    """Return the blocks of a graph and its bodies, ordered by their last node. A node is in at most one block."""
    index = GraphIndex(graph)
    by_op: dict[str, list[Node]] = {}
    position: dict[int, int] = {}
    for node in index.nodes():
        by_op.setdefault(node.op, []).append(node)
        position[id(node)] = len(position)
    paths = [path for path, _ in scopes(graph)]
    taken: set[int] = set()
    placed_blocks: list[tuple[int, Block]] = []
    for kind, nodes, data in _candidates(index, by_op):
        if not nodes or any(id(node) in taken for node in nodes):
            continue
        taken.update(id(node) for node in nodes)
        nodes.sort(key=lambda node: position[id(node)])
        block = _block(kind, nodes, data, paths[index.scope_of(nodes[-1])])
        placed_blocks.append((position[id(nodes[-1])], block))
    return tuple(block for _, block in sorted(placed_blocks, key=lambda pair: pair[0]))


def _candidates(index: GraphIndex, by_op: dict[str, list[Node]]) -> Iterator[tuple[str, list[Node], Tensor]]:
    """Yield all candidates for blocks: kind, nodes, data input. The widest come first."""
    for op, kind in NATIVE.items():
        for node in by_op.get(op, ()):
            if node.domain in STANDARD:
                yield kind, [node], node.inputs[0]
    readers = {op: [(node, producer_ops(node)) for node in nodes] for op, nodes in by_op.items()}
    for shape in SHAPES:
        for op in shape.tree.ops:
            for node, ops in readers.get(op, ()):
                outcome = find(shape.tree, node, index) if shape.tree.may_read(ops) else None
                if outcome is None or outcome[1] is not None:  # no match, or intermediate results are read elsewhere
                    continue
                match = outcome[0]
                if shape.where is None or shape.where(match):
                    outside = {id(match[name]) for name in shape.outside}
                    data = match[shape.data]
                    nodes = [inner for inner in match.nodes if id(inner) not in outside]
                    yield shape.kind, nodes, data.outputs[0] if isinstance(data, Node) else data


def _block(kind: str, nodes: list[Node], data: Tensor, scope: str) -> Block:
    inside = {id(tensor) for node in nodes for tensor in node.outputs}
    read = {id(tensor): tensor for tensor in [data, *(tensor for node in nodes for tensor in node.inputs)]}
    inputs = [
        tensor.name
        for tensor in read.values()
        if not isinstance(tensor, Constant) and not tensor.is_empty() and id(tensor) not in inside
    ]
    return Block(kind, tuple(node.name for node in nodes), tuple(inputs), nodes[-1].outputs[0].name, scope)
