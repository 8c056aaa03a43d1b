"""Extraction of subgraphs as models, and copies of graphs for editing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sbonnx.errors import ModelError
from sbonnx.graph.model import Body, Constant, Graph, ModelInfo, Node, Tensor, Variable
from sbonnx.graph.protos import topological_order
from sbonnx.graph.query import bodies, captured, dependencies, scopes, tensors_by_name


def extract(
    graph: Graph,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    scope: str = "",
    index: Mapping[str, Tensor] | None = None,
) -> Graph:
    """Extract the nodes between some tensors as a model; weights are shared and the source is not changed.

    If `index` is given, the cost depends on the size of the piece, not of the graph.

    Args:
        inputs, outputs: names of tensors of the scope (outer tensors may be inputs too). An input may be any tensor;
            the nodes that compute it are left out. A constant among them becomes an input.
        scope: "" for the main graph, else the path of a body ("node/then_branch"). Outer variables that the piece
            needs become inputs after the given ones.
        index: `tensors_by_name(graph)`, computed once for many extractions.

    Returns:
        A graph with the given inputs and outputs in their order, nodes in topological order.

    Raises:
        ModelError: a name or scope does not exist, an output cannot be computed from the inputs, or the type of an
            input is not known.
    """
    index = tensors_by_name(graph) if index is None else index
    for name in [*inputs, *outputs]:
        if name not in index:
            raise ModelError(f"there is no tensor '{name}' to extract")
    given = {name: index[name] for name in inputs}
    inside: set[int] | None = None
    if scope:
        body = next((body for path, body in scopes(graph) if path == scope), None)
        if body is None:
            raise ModelError(f"there is no scope '{scope}' in the graph")
        inside = {id(tensor) for tensor in [*body.inputs, *(tensor for node in body.nodes for tensor in node.outputs)]}
    wanted = [index[name] for name in outputs]
    nodes = _between(wanted, given, inside)
    copier = _Copier()
    sources = [copier.as_input(tensor) for tensor in given.values()]
    copies = [copier.node(node) for node in nodes]
    results = [copier.tensor(tensor) for tensor in wanted]
    copied_inputs = [*sources, *copier.outside]
    for tensor in copied_inputs:
        if tensor.dtype is None and tensor.name not in graph.info.values:
            raise ModelError(f"the element type of '{tensor.name}' is not known: it cannot be the input of a piece")
    info = ModelInfo(
        ir_version=graph.info.ir_version,
        original_opset=graph.info.original_opset,
        values=graph.info.values,
        files=graph.info.files,
        broken_rewrites=graph.info.broken_rewrites,
    )
    domains = list(graph.import_domains or ())
    name = f"{graph.name}_piece"
    return Graph(copies, copied_inputs, results, name=name, opset=graph.opset, import_domains=domains, info=info)


def _between(wanted: Sequence[Tensor], given: Mapping[str, Tensor], inside: set[int] | None) -> list[Node]:
    """Return the nodes that compute `wanted` from `given`, in topological order.

    Args:
        inside: ids of the tensors of the body, or None for the main graph, where everything is inside.
    """
    stop = {id(tensor) for tensor in given.values()}
    nodes: dict[int, Node] = {}

    def makers(tensor: Tensor, reader: Node | None) -> list[int]:
        if id(tensor) in stop or not tensor.name or isinstance(tensor, Constant):
            return []
        if tensor.inputs and (inside is None or id(tensor) in inside):
            nodes[id(tensor.inputs[0])] = tensor.inputs[0]
            return [id(tensor.inputs[0])]
        if inside is not None and id(tensor) not in inside:
            return []  # an outer variable: it becomes an input
        text = f", which node '{reader.name}' ({reader.op}) reads" if reader is not None else ""
        raise ModelError(f"the piece needs '{tensor.name}'{text}, and the given inputs do not lead to it")

    def needs(key: int) -> list[int]:  # reversed: the last input is computed first
        node = nodes[key]
        return [maker for tensor in dependencies(node) for maker in makers(tensor, node)][::-1]

    def cycle(key: int) -> str:
        return f"node '{nodes[key].name}' ({nodes[key].op}) depends on its own output: the graph has a cycle"

    roots = [maker for tensor in wanted for maker in makers(tensor, None)]
    return [nodes[key] for key in topological_order(roots, needs, cycle)]


class _Copier:
    """Copies nodes with their bodies; every tensor is copied once, values of constants are shared."""

    def __init__(self) -> None:
        self.copies: dict[int, Tensor] = {}
        self.outside: list[Tensor] = []

    def as_input(self, tensor: Tensor) -> Variable:
        """Copy the tensor as an input of the piece."""
        shape = None if tensor.shape is None else tuple(tensor.shape)
        copied = Variable(tensor.name, tensor.dtype, shape, getattr(tensor, "type", "tensor_type"))
        self.copies[id(tensor)] = copied
        return copied

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor that is read; the first read of an undefined variable makes it an input."""
        if not tensor.name:
            return Variable.empty()
        if id(tensor) not in self.copies:
            if isinstance(tensor, Constant):
                self.copies[id(tensor)] = Constant(tensor.name, tensor._values)
            else:
                self.outside.append(self.as_input(tensor))
        return self.copies[id(tensor)]

    def defined(self, tensor: Tensor) -> Tensor:
        """Copy a tensor that is an output of a node or an input of a body."""
        return self.as_input(tensor) if tensor.name else Variable.empty()

    def node(self, node: Node) -> Node:
        inner = dict(bodies(node))
        for body in inner.values():
            for tensor in captured(body):
                self.tensor(tensor)  # before local ones: it belongs to the piece or its inputs
        attrs: dict[str, Any] = {
            name: self.body(inner[name]) if name in inner else value for name, value in node.attrs.items()
        }
        inputs = [self.tensor(tensor) for tensor in node.inputs]
        # A node of the piece may also compute a tensor that is an input of the piece, next to a needed output.
        outputs = [
            self.defined(tensor) if id(tensor) not in self.copies else self.hidden(tensor) for tensor in node.outputs
        ]
        return Node(node.op, node.name, attrs, inputs, outputs, domain=node.domain)

    def hidden(self, tensor: Tensor) -> Variable:
        """Create a stand-in, which nothing reads, for an output that is already an input of the piece."""
        return Variable(f"{tensor.name}/given", tensor.dtype, tensor.shape)

    def body(self, body: Body) -> Body:
        copied = Body(name=body.name, opset=body.opset)
        copied.inputs = [self.defined(tensor) for tensor in body.inputs]
        copied.nodes = [self.node(node) for node in body.nodes]
        copied.outputs = [self.tensor(tensor) for tensor in body.outputs]
        return copied


def copy(graph: Graph) -> Graph:
    """Copy a graph: all nodes that lead to the outputs. Weights are shared, everything else is copied.

    Inputs, outputs, names and the data in `graph.info` (metadata, doc strings, notes) are kept.
    """
    copied = extract(graph, [tensor.name for tensor in graph.inputs], [tensor.name for tensor in graph.outputs])
    info = graph.info
    copied.name = graph.name
    copied.info = replace(
        info,
        metadata=dict(info.metadata),
        notes=list(info.notes),
        nodes=dict(info.nodes),
        tensors=dict(info.tensors),
        values=dict(info.values),
        graphs=dict(info.graphs),
        defaults=dict(info.defaults),
        default_uses=dict(info.default_uses),
        normals=dict(info.normals),
        edits=dict(info.edits),
    )
    return copied
