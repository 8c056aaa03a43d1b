"""Nodes of a graph as plain rows: edges, quantized inputs with their ranges, and what was not quantized and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sbonnx.graph import Graph, Node, Tensor, query
from sbonnx.planning.types import Plan, Reader, Site, Solution
from sbonnx.profiling.variants import uses_of
from sbonnx.report import Refusal
from sbonnx.report.details import NodeRow, QuantizedRead


def node_rows(
    graph: Graph, plan: Plan, solution: Solution | None, refusals: Iterable[Refusal] = ()
) -> tuple[NodeRow, ...]:
    """Describe every node, those of branches after the node that has them.

    Args:
        graph: the float graph that `plan` was made of.
        solution: scales and zero points; None: all sites of the plan are shown, without ranges.
        refusals: each is shown at the node of that name, or else at the node that computes, or first reads, the tensor
            of that name.
    """
    uses = _planned(plan) if solution is None else uses_of(plan, solution)
    limits = {} if solution is None else {key: params.limits for key, params in solution.qparams.items()}
    places: dict[str, list[str]] = {}
    for refusal in refusals:
        places.setdefault(refusal.where, []).append(f"{refusal.what}: {refusal.why}")
    rows = []
    for scope, node in _in_order(graph):
        reads = []
        for index in range(len(node.inputs)):
            site = uses.get(Reader(str(node.name), index))
            if site is not None:
                bounds = limits.get(site.key) if site.role != "bias" else None
                low, high = (None, None) if bounds is None else (float(bounds.lo.min()), float(bounds.hi.max()))
                reads.append(QuantizedRead(site.tensor, site.role, site.spec.label(), site.spec.bits, low, high))
        refused = [text for name in _names(node) for text in places.pop(name, ())]
        shape = query.shape(node.outputs[0]) if node.outputs else None
        rows.append(
            NodeRow(
                str(node.name),
                str(node.op),
                scope,
                tuple(_makers(node)),
                shape,
                tuple(reads),
                tuple(dict.fromkeys(refused)),
            )
        )
    return tuple(rows)


def _planned(plan: Plan) -> Mapping[Reader, Site]:
    return {reader: site for site in plan.sites for reader in site.readers}


def _in_order(graph: Graph) -> Iterator[tuple[str, Node]]:
    """Yield all nodes with their scopes: a node, then those of its branches."""
    stack: list[tuple[str, Node]] = [("", node) for node in reversed(graph.nodes)]
    while stack:
        scope, node = stack.pop()
        yield scope, node
        for name, body in reversed(query.bodies(node)):
            path = f"{scope}/{node.name}/{name}" if scope else f"{node.name}/{name}"
            stack += [(path, inner) for inner in reversed(body.nodes)]


def _makers(node: Node) -> Iterator[str]:
    """Yield the names of the nodes that compute what a node, or one of its branches, reads."""
    makers: dict[str, None] = {}
    for tensor in query.dependencies(node):
        maker = query.producer(tensor)
        if maker is not None:
            makers[str(maker.name)] = None
    yield from makers


def _names(node: Node) -> Iterator[str]:
    """Yield the names by which refusals name a place: that of the node, then those of its tensors."""
    tensors: list[Tensor] = [*node.outputs, *node.inputs]
    yield from dict.fromkeys([str(node.name), *(str(tensor.name) for tensor in tensors if tensor.name)])
