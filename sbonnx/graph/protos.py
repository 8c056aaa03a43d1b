"""Traversal, copying and sorting of onnx protos: every graph, node and tensor, bodies included."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import onnx
from google.protobuf.message import DecodeError, Message
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from sbonnx.errors import ModelError
from sbonnx.ops import STANDARD_DOMAINS

ONNX_ERRORS: Final = (
    RuntimeError,
    ValueError,
    DecodeError,
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
)
"""Exceptions of onnx's own tools for models that they reject."""

MAX_BODIES: Final = 30
"""Maximum nesting of graphs: protobuf reads messages up to 100 deep, and each body takes three."""

_GRAPH: Final = AttributeProto.GRAPH  # looked up once: graphs have many attributes

AnyMessage = TypeVar("AnyMessage", bound=Message)
Key = TypeVar("Key", bound=Hashable)


def copied(message: AnyMessage) -> AnyMessage:
    """Copy a message."""
    copy: AnyMessage = type(message)()
    copy.CopyFrom(message)
    return copy


def replace_entries(field: Any, entries: Iterable[Message]) -> None:
    """In place. Replace the messages of a repeated field by copies of `entries`, which may be some of its own."""
    copies = [copied(entry) for entry in entries]
    del field[:]
    field.extend(copies)


def single_line(error: object) -> str:
    """Format an error of onnx's tools on one line."""
    return " ".join(str(error).split())


def domain_of(item: NodeProto | FunctionProto | onnx.OperatorSetIdProto) -> str:
    """Return the operator domain; "" for the default one, which has two names."""
    return "" if item.domain in STANDARD_DOMAINS else item.domain


def body_protos(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """Yield the bodies that are attributes of a node, with the name of the attribute."""
    for attribute in node.attribute:
        if attribute.type == _GRAPH:
            yield attribute.name, attribute.g


def graph_protos(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield the graph, then its bodies, depth first."""
    stack = [graph]
    while stack:
        scope = stack.pop()
        yield scope
        attributes = (attribute for node in scope.node for attribute in node.attribute)
        stack.extend(reversed([attribute.g for attribute in attributes if attribute.type == _GRAPH]))


def node_protos(graph: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """Yield every node of a graph or function, then those of the bodies."""
    scopes = graph_protos(graph) if isinstance(graph, GraphProto) else function_scopes(graph)
    for scope in scopes:
        yield from scope.node


def function_scopes(function: FunctionProto) -> Iterator[GraphProto]:
    """Yield the nodes and value types of a function as a graph, then the bodies."""
    yield from graph_protos(GraphProto(node=function.node, value_info=function.value_info))


def tensor_protos(model: ModelProto) -> Iterator[tuple[TensorProto, str]]:
    """Yield every tensor with values and its label for messages: initializers and attributes, functions included."""
    for scope in graph_protos(model.graph):
        for tensor in scope.initializer:
            yield tensor, tensor.name
        for sparse in scope.sparse_initializer:
            yield sparse.values, sparse.values.name
            yield sparse.indices, sparse.values.name
        yield from _attribute_tensors(scope.node)
    for function in model.functions:
        yield from _attribute_tensors(function.node)
        for node in function.node:
            for _, body in body_protos(node):
                yield from tensor_protos(ModelProto(graph=body))


def _attribute_tensors(nodes: Sequence[NodeProto]) -> Iterator[tuple[TensorProto, str]]:
    for node in nodes:
        where = node.name or (node.output[0] if node.output else node.op_type)
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t, where
            for tensor in attribute.tensors:
                yield tensor, where
            if attribute.HasField("sparse_tensor"):
                yield attribute.sparse_tensor.values, where
                yield attribute.sparse_tensor.indices, where


def texts(model: ModelProto) -> Iterator[str | bytes]:
    """Yield every field of a model that must be text; bytes if it is not valid UTF-8."""
    yield from (model.producer_name, model.producer_version, model.domain, model.doc_string)
    yield from (entry.domain for entry in model.opset_import)
    yield from _entries(model.metadata_props)
    for scope in graph_protos(model.graph):
        yield from (scope.name, scope.doc_string)
        yield from _entries(scope.metadata_props)
        for tensor in scope.initializer:
            yield from (tensor.name, tensor.doc_string)
            yield from _entries(tensor.metadata_props)
        for value in [*scope.input, *scope.output, *scope.value_info]:
            yield from (value.name, value.doc_string, value.type.denotation)
            yield from _entries(value.metadata_props)
            for dim in value.type.tensor_type.shape.dim:
                yield from (dim.dim_param, dim.denotation)
        yield from _node_texts(scope.node)
    for function in model.functions:
        yield from (function.name, function.domain, function.overload, function.doc_string)
        yield from (*function.input, *function.output, *function.attribute)
        yield from (attribute.name for attribute in function.attribute_proto)
        yield from (entry.domain for entry in function.opset_import)
        yield from _node_texts(list(node_protos(function)))


def _node_texts(nodes: Sequence[NodeProto]) -> Iterator[str | bytes]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, node.overload, node.doc_string, *node.input, *node.output)
        yield from _entries(node.metadata_props)
        for attribute in node.attribute:
            yield from (attribute.name, attribute.ref_attr_name)
            if attribute.type == AttributeProto.TENSOR:
                yield from (attribute.t.name, attribute.t.doc_string)


def _entries(entries: Sequence[onnx.StringStringEntryProto]) -> Iterator[str | bytes]:
    for entry in entries:
        yield from (entry.key, entry.value)


def captured_names(graph: GraphProto) -> list[str]:
    """Return names that a body, or a body inside it, reads and does not define: those of outer tensors."""
    defined = {value.name for value in graph.input}
    defined.update(tensor.name for tensor in graph.initializer)
    defined.update(name for node in graph.node for name in node.output)
    read = [name for node in graph.node for name in needs(node)]
    read.extend(value.name for value in graph.output)
    return [name for name in dict.fromkeys(read) if name and name not in defined]


def needs(node: NodeProto) -> list[str]:
    """Return names of the tensors that a node depends on: its inputs and the captures of its bodies."""
    names = [name for name in node.input if name]
    for _, body in body_protos(node):
        names.extend(captured_names(body))
    return names


def sort_protos(graph: GraphProto, outer: frozenset[str] = frozenset()) -> bool:
    """In place. Sort every scope topologically; nodes in order keep their place. Return whether nodes moved.

    Checks that an order exists.

    Args:
        outer: names that enclosing graphs define.

    Raises:
        ModelError: a tensor is produced twice, read but produced nowhere, or nodes form a cycle.
    """
    given = _given_names(graph)
    maker = _makers(graph, given)
    visible = outer | given | maker.keys()
    wants = [needs(node) for node in graph.node]
    for node, names in zip(graph.node, wants, strict=True):
        missing = next((name for name in names if name not in visible), None)
        if missing is not None:
            raise ModelError(
                f"{describe(node)} reads '{missing}', which no input, initializer or node of the model gives"
            )
    for value in graph.output:
        if value.name not in visible:
            raise ModelError(
                f"graph output '{value.name}' is given by no input, initializer or node of graph '{graph.name}'"
            )
    order = topological_order(
        range(len(graph.node)),
        lambda index: [maker[name] for name in wants[index] if name in maker],
        lambda index: f"{describe(graph.node[index])} depends on its own output: the graph has a cycle",
    )
    moved = order != list(range(len(order)))
    if moved:
        replace_entries(graph.node, [graph.node[index] for index in order])
    for node in graph.node:
        for _, body in body_protos(node):
            moved |= sort_protos(body, frozenset(visible))
    return moved


def _given_names(graph: GraphProto) -> set[str]:
    """Return the names of inputs and initializers; each must be unique."""
    inputs, held = [value.name for value in graph.input], [tensor.name for tensor in graph.initializer]
    for kind, names in (("input", inputs), ("initializer", held)):
        seen: set[str] = set()
        for name in names:
            if not name:
                raise ModelError(f"graph '{graph.name}' has an {kind} without a name")
            if name in seen:
                raise ModelError(f"graph '{graph.name}' lists {kind} '{name}' twice")
            seen.add(name)
    return {*inputs, *held}


def _makers(graph: GraphProto, given: set[str]) -> dict[str, int]:
    """Map each tensor to the index of the node that computes it; tensors must be unique."""
    maker: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in maker or name in given:
                other = describe(graph.node[maker[name]]) if name in maker else "an input or initializer"
                raise ModelError(f"tensor '{name}' is given by both {other} and {describe(node)}: names must be unique")
            maker[name] = index
    return maker


def topological_order(
    roots: Iterable[Key], needs: Callable[[Key], Sequence[Key]], cycle: Callable[[Key], str]
) -> list[Key]:
    """Return the roots and everything that they need, each after what it needs, otherwise in the given order.

    Args:
        needs: direct dependencies of an element.
        cycle: error message for an element that depends on itself.

    Raises:
        ModelError: elements form a cycle.
    """
    done: set[Key] = set()
    unfinished: set[Key] = set()
    order: list[Key] = []
    for root in roots:
        stack = [(root, False)]
        while stack:
            key, finished = stack.pop()
            if finished:
                unfinished.discard(key)
                done.add(key)
                order.append(key)
            elif key in unfinished:
                raise ModelError(cycle(key))
            elif key not in done:
                unfinished.add(key)
                stack.append((key, True))
                stack.extend((needed, False) for needed in reversed(needs(key)) if needed not in done)
    return order


def describe(node: NodeProto) -> str:
    """Describe a node for messages, by its name or else by its output."""
    kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    if node.name:
        return f"node '{node.name}' ({kind})"
    return f"the {kind} node of '{node.output[0]}'" if node.output else f"a {kind} node without outputs"


def ir_version_for(domains: Sequence[onnx.OperatorSetIdProto]) -> int:
    """Return the lowest IR version that supports these opsets."""
    return int(onnx.helper.find_min_ir_version_for(list(domains), ignore_unknown=True))


def first_node(model: onnx.ModelProto | bytes | str | os.PathLike[str], domain: str, op: str) -> str:
    """Return the name of the first node of a type, or of its first output, in the main graph or a body; "": none."""
    if isinstance(model, bytes):
        proto = onnx.ModelProto.FromString(model)
    elif isinstance(model, onnx.ModelProto):
        proto = model
    else:
        proto = onnx.load(os.fspath(model), load_external_data=False)
    graphs = [proto.graph]
    for graph in graphs:
        for node in graph.node:
            if (node.domain, node.op_type) == (domain, op):
                return str(node.name or node.output[0])
            graphs += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return ""
