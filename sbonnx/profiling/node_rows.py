"""Nodes of a graph as plain rows: edges, quantized inputs with their ranges, and what was not quantized and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from sbonnx.graph import Graph, Node, Tensor, Variable, query
from sbonnx.graph.model import node_metadata
from sbonnx.planning.types import Plan, Reader, Site, Solution
from sbonnx.profiling.variants import uses_of
from sbonnx.recipe.torch_modules import NodeInfo, module_titles
from sbonnx.report import Refusal
from sbonnx.report.details import NodeRow, QuantizedRead, TensorRow
from sbonnx.spec import QParams


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
    qparams = {} if solution is None else solution.qparams
    places: dict[str, list[Refusal]] = {}
    for refusal in refusals:
        places.setdefault(refusal.where, []).append(refusal)
    rows = []
    for scope, node in _in_order(graph):
        sites = [uses.get(Reader(str(node.name), index)) for index in range(len(node.inputs))]
        refused = {
            f"{refusal.what}: {refusal.why}": refusal.code for name in _names(node) for refusal in places.pop(name, ())
        }
        outputs = tuple(tensor_row(tensor) for tensor in node.outputs if tensor.name)
        rows.append(
            NodeRow(
                str(node.name),
                str(node.op),
                scope,
                tuple(_makers(node)),
                query.shape(node.outputs[0]) if node.outputs else None,
                tuple(_read(site, qparams) for site in sites if site is not None),
                tuple(refused),
                tuple(refused.values()),
                "/".join(module_titles(NodeInfo(str(node.name), str(node.op), node_metadata(graph, str(node.name))))),
                tuple(dict.fromkeys(str(tensor.name) for tensor in _variables(node))),
                outputs,
            )
        )
    return tuple(rows)


def tensor_row(tensor: Tensor) -> TensorRow:
    """Describe a tensor."""
    dtype = query.dtype(tensor)
    return TensorRow(str(tensor.name), "" if dtype is None else dtype.name, query.shape(tensor))


def _read(site: Site, qparams: Mapping[str, QParams]) -> QuantizedRead:
    row = QuantizedRead(site.tensor, site.role, site.spec.label(), site.spec.bits, None, None)
    params = qparams.get(site.key) if site.role != "bias" else None
    if params is None:
        return row
    limits, scale = params.limits, params.scale
    return replace(
        row,
        low=float(limits.lo.min()),
        high=float(limits.hi.max()),
        scales=scale.size,
        smallest_scale=float(scale.min()),
        largest_scale=float(scale.max()),
    )


def _variables(node: Node) -> Iterator[Tensor]:
    """Yield the tensors that a node reads, and those that its branches return; no constants."""
    returned = (tensor for _, body in query.bodies(node) for tensor in body.outputs)
    yield from (tensor for tensor in (*node.inputs, *returned) if tensor.name and isinstance(tensor, Variable))


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
