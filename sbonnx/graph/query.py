"""Queries on a graph. All are linear at worst and change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx

from sbonnx.graph.model import Body, Constant, Node, Tensor, Variable
from sbonnx.graph.protos import topological_order
from sbonnx.graph.storage.weights import MappedWeights
from sbonnx.ops import READS_SHAPE, SHAPED_BY_VALUES, UNPACKS
from sbonnx.spec import Array as Array


def bodies(node: Node) -> list[tuple[str, Body]]:
    """Return the bodies that are attributes of a node, with the name of the attribute, in order."""
    return [(name, value) for name, value in node.attrs.items() if isinstance(value, Body)]


def node_count(graph: Body) -> int:
    """Return the number of nodes, branches included."""
    return sum(len(body.nodes) for _, body in scopes(graph))


def scopes(graph: Body, path: str = "") -> Iterator[tuple[str, Body]]:
    """Yield every graph with its path: ("", graph) first, then ("node/then_branch", body), ..., depth first."""
    stack = [(path, graph)]
    while stack:
        where, scope = stack.pop()
        yield where, scope
        inner = [
            (f"{where}/{node.name}/{name}" if where else f"{node.name}/{name}", body)
            for node in scope.nodes
            if node.attrs
            for name, body in node.attrs.items()
            if isinstance(body, Body)
        ]
        stack.extend(reversed(inner))


def all_nodes(graph: Body) -> Iterator[Node]:
    """Yield every node of every scope, scope by scope."""
    for _, scope in scopes(graph):
        yield from scope.nodes


def all_tensors(graph: Body) -> Iterator[Tensor]:
    """Yield every tensor of every scope once, in order of first appearance; empty (omitted) ones left out."""
    seen: set[int] = set()
    for _, scope in scopes(graph):
        groups = [scope.inputs, *(side for node in scope.nodes for side in (node.inputs, node.outputs)), scope.outputs]
        for group in groups:
            for tensor in group:
                if tensor.name and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor


def constant(tensor: Tensor | None) -> Array | None:
    """Return the value of a constant tensor, else None. Not copied: mapped weights stay mapped, all are read-only."""
    if not isinstance(tensor, Constant):
        return None
    stored = tensor._values  # `values` would cache the loaded array in the tensor
    value: Array = stored if isinstance(stored, np.ndarray) else stored.load()
    return value


def stored_values(tensor: Constant) -> Array | MappedWeights:
    """Return the values of a constant; mapped ones are not loaded."""
    values = tensor._values
    return values if isinstance(values, (np.ndarray, MappedWeights)) else values.load()


def packed(tensor: Tensor) -> Constant | None:
    """Return the constant from which Cast, and Sub of another constant, unpack values stored in few bits, or None.

    A tensor that is constant itself is returned.
    """
    node = producer(tensor)
    while node is not None and node.op in UNPACKS and all(packed(operand) is not None for operand in node.inputs[1:]):
        tensor = node.inputs[0]
        node = producer(tensor)
    return tensor if isinstance(tensor, Constant) else None


def unpacked(tensor: Tensor) -> Array | None:
    """Return the value of a constant tensor, or of one that Cast and Sub compute from constants; None for any other."""
    node = producer(tensor)
    if node is None or node.op not in UNPACKS:
        return constant(tensor)
    values = [value for value in map(unpacked, node.inputs) if value is not None]
    if len(values) < len(node.inputs):
        return None
    if node.op == "Sub":
        return np.asarray(values[0] - values[1])
    return values[0].astype(onnx.helper.tensor_dtype_to_np_dtype(int(node.attrs["to"])))


def optional_input(node: Node, index: int | None) -> Tensor | None:
    """Return an input of a node; None if it is absent or empty, or if `index` is None."""
    if index is None or index >= len(node.inputs) or node.inputs[index].is_empty():
        return None
    tensor: Tensor = node.inputs[index]
    return tensor


def producer(tensor: Tensor) -> Node | None:
    """Return the node that computes a tensor; None for constants, graph inputs and body inputs."""
    return tensor.inputs[0] if tensor.inputs else None


def readers(tensor: Tensor) -> list[tuple[Node, int]]:
    """Return every use of a tensor as (node, input index), uses inside bodies included."""
    seen: set[int] = set()
    uses: list[tuple[Node, int]] = []
    for node in tensor.outputs:
        if id(node) not in seen:  # a node that reads a tensor twice is listed twice
            seen.add(id(node))
            uses.extend((node, index) for index, read in enumerate(node.inputs) if read is tensor)
    return uses


def output_names(graph: Body) -> set[str]:
    """Return the names of the outputs of the graph and of every body."""
    return {tensor.name for _, scope in scopes(graph) for tensor in scope.outputs}


def shape(tensor: Tensor) -> tuple[int | str | None, ...] | None:
    """Return dimensions: int, the name of a dynamic one, or None if unknown; None if the rank is unknown."""
    return None if tensor.shape is None else tuple(tensor.shape)


def is_depthwise(node: Node) -> bool:
    """Whether a node is a depthwise Conv: one filter for each channel."""
    weight = shape(node.inputs[1]) if node.op == "Conv" and len(node.inputs) > 1 else None
    group = int(node.attrs.get("group", 1))
    return weight is not None and group > 1 and group == weight[0] and weight[1] == 1


def rank(tensor: Tensor) -> int | None:
    """Return the number of dimensions, None if unknown."""
    return None if tensor.shape is None else len(tensor.shape)


def dtype(tensor: Tensor) -> np.dtype[Any] | None:
    """Return the element type (ml_dtypes for bfloat16, float8, int4, ...; object for strings).

    None if unknown, and for sequences, maps and optionals.
    """
    if isinstance(tensor, Variable) and tensor.type != "tensor_type":
        return None
    kind = tensor.dtype
    if kind is None or (isinstance(kind, int) and kind == 0):
        return None
    return onnx.helper.tensor_dtype_to_np_dtype(kind) if isinstance(kind, int) else np.dtype(kind)


def attribute(node: Node, name: str, default: Any = None) -> Any:
    """Return an attribute's value (a tensor attribute as array), or `default` if the node has none."""
    value = node.attrs.get(name, default)
    return constant(value) if isinstance(value, Constant) else value


def node_by_name(graph: Body) -> dict[str, Node]:
    """Index the nodes of all scopes by name."""
    return {node.name: node for node in all_nodes(graph)}


def tensors_by_name(graph: Body) -> dict[str, Tensor]:
    """Index the tensors of all scopes by name."""
    return {tensor.name: tensor for tensor in all_tensors(graph)}


def captured(body: Body) -> list[Tensor]:
    """Return the outer variables that a body, or a body inside it, reads, in order of first use. No constants."""
    inside: set[int] = set()
    for _, scope in scopes(body):
        inside.update(id(tensor) for tensor in scope.inputs)
        inside.update(id(tensor) for node in scope.nodes for tensor in node.outputs)
    outer: dict[int, Tensor] = {}
    for _, scope in scopes(body):
        for tensor in [*(read for node in scope.nodes for read in node.inputs), *scope.outputs]:
            if tensor.name and isinstance(tensor, Variable) and id(tensor) not in inside:
                outer.setdefault(id(tensor), tensor)
    return list(outer.values())


def dependencies(node: Node) -> Iterator[Tensor]:
    """Yield the tensors that a node depends on: its inputs and the captures of its bodies."""
    yield from node.inputs
    for body in node.attrs.values():
        if isinstance(body, Body):
            yield from captured(body)


def branches_on_values(graph: Body) -> bool:
    """Return whether an If chooses its branch, or a Loop ends, by values of the inputs; their shapes do not count."""
    return _FollowedValues({id(tensor) for tensor in graph.inputs}).branch_in(graph)


class _FollowedValues:
    """Tensors that depend on values of the inputs of a graph, by id.

    Attributes:
        values: their values do.
        shapes: their shapes do.
    """

    def __init__(self, values: set[int]) -> None:
        self.values = values
        self.shapes: set[int] = set()

    def branch_in(self, body: Body) -> bool:
        """Follow the values through a body; return whether its control flow depends on them."""
        return any(self._branch_at(node) for node in body.nodes)

    def _branch_at(self, node: Node) -> bool:
        read = [id(tensor) for tensor in dependencies(node)]
        by_value, by_shape = any(name in self.values for name in read), any(name in self.shapes for name in read)
        deciding = {"If": 1, "Loop": 2}.get(node.op, 0)  # the condition; the number of rounds and the condition
        if any(id(tensor) in self.values for tensor in node.inputs[:deciding]):
            return True
        for _, body in bodies(node):
            if by_value:
                self.values.update(id(tensor) for tensor in body.inputs[2 * (node.op == "Loop") :])
            if self.branch_in(body) or (node.op == "Loop" and id(body.outputs[0]) in self.values):
                return True
        outputs = [id(tensor) for tensor in node.outputs]
        if by_shape if node.op in READS_SHAPE else by_value:
            self.values.update(outputs)
        if (by_shape and node.op not in READS_SHAPE) or (by_value and node.op in SHAPED_BY_VALUES):
            self.shapes.update(outputs)
        return False


def ordered(nodes: Sequence[Node], pairs: Iterable[tuple[Node, Node]] = ()) -> list[Node]:
    """Return the nodes of one scope in topological order, otherwise in the given order.

    Args:
        pairs: further nodes in the order that they need.

    Raises:
        ModelError: nodes form a cycle.
    """
    local = {id(node): node for node in nodes}
    before: dict[int, list[int]] = {}
    for first, second in pairs:
        before.setdefault(id(second), []).append(id(first))

    def needs(key: int) -> list[int]:
        makers = [id(maker) for tensor in dependencies(local[key]) for maker in tensor.inputs if id(maker) in local]
        return [*makers, *before.get(key, ())]

    def cycle(key: int) -> str:
        return f"node '{local[key].name}' ({local[key].op}) depends on its own output: the graph has a cycle"

    return [local[key] for key in topological_order(local, needs, cycle)]


def constant_bytes(graph: Body) -> int:
    """Return the bytes of all constants of a graph, including subgraphs; shared constants count once."""
    sizes: dict[int, int] = {}
    for tensor in all_tensors(graph):
        kind = dtype(tensor)
        if isinstance(tensor, Constant) and kind is not None:
            sizes[id(tensor)] = int(prod(tensor.shape)) * kind.itemsize
    return sum(sizes.values())
