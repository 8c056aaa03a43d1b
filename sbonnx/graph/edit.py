"""Edits of a graph, linear at worst and fast on 10,000 nodes.

onnx-graphsurgeon updates node and tensor lists by equality of nodes, which compares inputs and attributes
one by one. Here links are found by identity.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from sbonnx.graph.model import Body, Constant, Node, Tensor, Variable
from sbonnx.graph.query import Array, all_nodes, all_tensors, bodies, ordered, readers, scopes
from sbonnx.graph.storage.weights import spill_packed


class Names:
    """Allocator of names that are unique among all tensors and nodes of all scopes.

    The names of the graph are read when the first one is asked for: most rewrites change nothing.
    """

    def __init__(self, graph: Body) -> None:
        self._graph = graph
        self._taken: set[str] | None = None
        self._next: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        """Return `stem` if it is free, else `stem_1`, `stem_2`, ...; no name is returned twice."""
        if self._taken is None:
            self._taken = {node.name for node in all_nodes(self._graph)}
            self._taken.update(tensor.name for tensor in all_tensors(self._graph))
        name, count = stem, self._next.get(stem, 0)
        while not name or name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._next[stem] = count
        self._taken.add(name)
        return name


def _unlink(links: list[Any], node: Node) -> None:
    for position, linked in enumerate(links):
        if linked is node:
            list.__delitem__(links, position)
            return


def replace_input(node: Node, index: int, tensor: Tensor) -> None:
    """In place. Make `tensor` input `index` of `node`."""
    _unlink(node.inputs[index].outputs, node)
    list.__setitem__(node.inputs, index, tensor)
    list.append(tensor.outputs, node)


def replace_output(node: Node, index: int, tensor: Tensor) -> None:
    """In place. Make `tensor` output `index` of `node`."""
    _unlink(node.outputs[index].inputs, node)
    list.__setitem__(node.outputs, index, tensor)
    list.append(tensor.inputs, node)


def add_node(
    graph: Body,
    op: str,
    inputs: Sequence[Tensor],
    *,
    names: Names,
    stem: str,
    attrs: Mapping[str, Any] | None = None,
    outputs: int | Sequence[Tensor] = 1,
) -> Node:
    """In place. Append a node to a scope and return it; new outputs have no dtype and no shape.

    Args:
        graph: the scope that gets the node. It is appended last; `sort` or saving restores the topological order.
        stem: preferred name of the node; new outputs are named after the node.
        outputs: number of new outputs, or the tensors to use as outputs.
    """
    name = names.fresh(stem)
    if isinstance(outputs, int):
        stems = [f"{name}_out"] if outputs == 1 else [f"{name}_out{index}" for index in range(outputs)]
        outputs = [Variable(names.fresh(stem)) for stem in stems]
    node = Node(op, name, dict(attrs or {}), list(inputs), list(outputs))
    graph.nodes.append(node)
    return node


def add_constant(graph: Body, name_stem: str, values: Array, names: Names) -> Constant:
    """Create a constant tensor. It is saved if a node of any scope reads it.

    Args:
        graph: unused, for symmetry with `add_node`; constants belong to no scope.
        values: any dtype of ONNX; large arrays are moved to a scratch file and mapped from there.
    """
    del graph
    return Constant(names.fresh(name_stem), spill_packed(np.asarray(values)))


def set_constant(node: Node, index: int, values: Array, names: Names) -> None:
    """Replace a constant input of `node` in place. The name is kept if nothing else reads the old constant."""
    old = node.inputs[index]
    alone = len(old.outputs) == 1
    new = add_constant(node, old.name, np.ascontiguousarray(values).reshape(values.shape), names)
    replace_input(node, index, new)
    if alone:
        old.name, new.name = new.name, old.name


def replace_all_uses(old: Tensor, new: Tensor, *, graph: Body, keep: Collection[Node] = ()) -> int:
    """In place. Replace all uses of `old` by `new`; return the number of uses replaced.

    If `old` is an output of its scope, the output keeps its name. `new` takes over the name if possible (a variable
    that is computed in the scope and not an output yet), otherwise an Identity is inserted.

    Args:
        graph: the scope of `old`.
        keep: nodes that continue to read `old` (the ones that compute `new` from it).
    """
    kept = {id(node) for node in keep}
    moved = 0
    for node, index in readers(old):
        if id(node) not in kept:
            replace_input(node, index, new)
            moved += 1
    places = [place for place, tensor in enumerate(graph.outputs) if tensor is old]
    if places:
        moved += len(places)
        _take_over_output(old, new, graph, places)
    return moved


def _take_over_output(old: Tensor, new: Tensor, graph: Body, places: Sequence[int]) -> None:
    """In place. Make `new` (or a copy of it) the scope's output instead of `old`, under the same name."""
    is_output = any(tensor is new for tensor in graph.outputs)
    computed_here = bool(new.inputs) and any(node is new.inputs[0] for node in reversed(graph.nodes))
    if isinstance(new, Variable) and isinstance(old, Variable) and computed_here and not is_output:
        old.name, new.name = new.name, old.name
        new.dtype, new.shape = old.dtype or new.dtype, old.shape if old.shape is not None else new.shape
        for place in places:
            graph.outputs[place] = new
        return
    name = f"{old.name}/Identity"  # unique: it derives from a unique name, and one output is copied once
    output = Variable(old.name, old.dtype, old.shape, getattr(old, "type", "tensor_type"))
    old.name = f"{old.name}/replaced"
    graph.nodes.append(Node("Identity", name, {}, [new], [output]))
    for place in places:
        graph.outputs[place] = output


def sweep(graph: Body) -> int:
    """In place. Remove every node without a needed output, in one pass over all scopes; return their number.

    A tensor is needed if it leads to an output of the main graph, or of the body of a needed node. Inputs and outputs
    of the graph and of bodies stay. A node with any needed output stays whole.
    """
    everything = list(all_nodes(graph))
    live: set[int] = set()
    stack = [node for tensor in graph.outputs for node in tensor.inputs]
    while stack:
        node = stack.pop()
        if id(node) in live:
            continue
        live.add(id(node))
        stack.extend(maker for tensor in node.inputs for maker in tensor.inputs)
        for _, body in bodies(node):
            stack.extend(maker for tensor in body.outputs for maker in tensor.inputs)
    dead = [node for node in everything if id(node) not in live]
    if not dead:
        return 0
    for _, scope in list(scopes(graph)):
        scope.nodes = [node for node in scope.nodes if id(node) in live]
    touched = {id(tensor): tensor for node in dead for tensor in node.inputs}
    for tensor in touched.values():
        left = [node for node in tensor.outputs if id(node) in live]
        list.clear(tensor.outputs)
        list.extend(tensor.outputs, left)
    for node in dead:
        for tensor in node.outputs:
            list.clear(tensor.inputs)
        list.clear(node.inputs)
        list.clear(node.outputs)
    return len(dead)


def sort(graph: Body) -> None:
    """In place. Sort every scope topologically; nodes that are in order keep their place.

    Raises:
        ModelError: nodes form a cycle.
    """
    for _, scope in list(scopes(graph)):
        scope.nodes = ordered(scope.nodes)
