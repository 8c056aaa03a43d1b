"""Dead code elimination: removes nodes that no output needs."""

from __future__ import annotations

from sbonnx.graph import Graph
from sbonnx.graph.edit import sweep
from sbonnx.graph.query import all_nodes
from sbonnx.report import Fired, Refusal

from ..engine import Sweep
from ..sample import sample


def remove_dead(graph: Graph) -> list[Fired | Refusal]:
    """Remove nodes that lead to no output, in every scope and in place. Unused inputs are kept."""
    before = list(all_nodes(graph))
    if not sweep(graph):
        return []
    alive = {id(node) for node in all_nodes(graph)}
    return [Fired("dead_code", node.name) for node in before if id(node) not in alive]


DEAD = Sweep(
    "dead_code",
    run=remove_dead,
    source="ONNX operators have no effect but their outputs",
    example=lambda: sample("g (float[2,3] x) => (float[2,3] y) { a = Exp(x) b = Neg(a) y = Relu(x) }"),
    counter_example=lambda: sample("g (float[2,3] x, float[2] unused) => (float[2,3] y) { a = Exp(x) y = Relu(a) }"),
)
