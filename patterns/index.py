"""Index of scopes, outputs and dead nodes of a graph and its bodies, maintained during rewriting.

graphsurgeon stores readers and producers. This index adds the scope of each node, which tensors are outputs, which
nodes are dead (unlinked, but still in the lists) and the position of new nodes. `commit` applies all of this to the
node lists in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from sbonnx.graph import Constant, Graph, Node, Tensor
from sbonnx.graph.edit import Names, sort
from sbonnx.graph.query import bodies, dependencies, scopes
from sbonnx.report.codes import Reason


class GraphIndex:
    """Index of one graph and all its bodies. Scope 0 is the graph itself."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.opset: int = graph.opset
        self.names = Names(graph)
        self.scopes: list[Any] = []
        self.live_names: dict[str, int] = {}
        """Number of live nodes by name."""
        self._scope_of: dict[int, int] = {}
        self._outputs: dict[int, int] = {}
        self._inputs: set[int] = set()
        self._dead: dict[int, Node] = {}
        self._before: dict[int, list[Node]] = {}
        self._changed: set[int] = set()
        self._heirs: dict[int, list[tuple[Tensor, Constant]]] = {}
        for number, (_, scope) in enumerate(scopes(graph)):
            self.scopes.append(scope)
            self._outputs.update((id(tensor), number) for tensor in scope.outputs)
            self._inputs.update(id(tensor) for tensor in scope.inputs)
            for node in scope.nodes:
                self._scope_of[id(node)] = number
                self.live_names[node.name] = self.live_names.get(node.name, 0) + 1

    # -- constants

    def add_heir(self, old: Tensor, heir: Constant) -> None:
        """Record the constant that takes the place of `old` for some of its readers."""
        self._heirs.setdefault(id(old), []).append((old, heir))

    def heir_of(self, old: Tensor, values: np.ndarray) -> Constant | None:
        """Return the constant with these values that took the place of `old` for another reader, or None."""
        heirs = (heir for _, heir in self._heirs.get(id(old), ()))
        return next(
            (heir for heir in heirs if heir.dtype == values.dtype and np.array_equal(heir.values, values)), None
        )

    # -- queries

    def nodes(self) -> Iterator[Node]:
        """Yield the live nodes of every scope, in the order of each scope."""
        for scope in self.scopes:
            for node in scope.nodes:
                if id(node) not in self._dead:
                    yield node

    def alive(self, node: Node) -> bool:
        return id(node) in self._scope_of and id(node) not in self._dead

    def scope_of(self, node: Node) -> int:
        """Return the number of a node's scope; raises KeyError for a node that is not in the graph."""
        return self._scope_of[id(node)]

    def is_output(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an output of the graph or of a body."""
        return id(tensor) in self._outputs

    def used(self, tensor: Tensor) -> bool:
        """Return whether a node reads a tensor, or it is an output."""
        return bool(tensor.outputs) or id(tensor) in self._outputs

    def why_not_replace(self, old: Tensor, new: Tensor) -> Reason | None:
        """Return why the existing tensor `new` cannot replace `old` everywhere, or None.

        Only an output is critical: it must keep its name, so the producer of `new` has to take this name.
        """
        if id(old) not in self._outputs:
            return None
        if id(new) in self._outputs:
            return Reason("both-outputs", f"'{old.name}' and '{new.name}' are both outputs")
        if id(new) in self._inputs:
            return Reason("output-is-input", f"'{old.name}' is an output and '{new.name}' an input")
        if not new.inputs:
            return Reason("output-without-producer", f"'{old.name}' is an output and '{new.name}' has no producer")
        if self._scope_of.get(id(new.inputs[0])) != self._outputs[id(old)]:
            return Reason(
                "output-of-body", f"'{old.name}' is the output of a body and '{new.name}' comes from outside it"
            )
        return None

    # -- changes

    def add(self, node: Node, *, before: Node) -> None:
        """Add a new node to the scope of `before`, directly before it."""
        scope = self._scope_of[id(before)]
        self._scope_of[id(node)] = scope
        self._before.setdefault(id(before), []).append(node)
        self._changed.add(scope)
        self.live_names[node.name] = self.live_names.get(node.name, 0) + 1

    def rename(self, node: Node, name: str) -> None:
        self.live_names[node.name] -= 1
        node.name = name
        self.live_names[name] = self.live_names.get(name, 0) + 1

    def bury(self, nodes: Iterable[Node]) -> list[Tensor]:
        """Unlink those of `nodes` that nothing uses, and recursively producers that lose their last reader.

        Returns:
            The tensors that lost a reader and are still used.
        """
        lost: dict[int, Tensor] = {}
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if not self.alive(node) or any(self.used(tensor) for tensor in node.outputs):
                continue
            for tensor in self._unlink(node):
                lost[id(tensor)] = tensor
                pending.extend(tensor.inputs)
        return [tensor for tensor in lost.values() if tensor.outputs]

    def _unlink(self, node: Node) -> list[Tensor]:
        """Mark a node (and the nodes in its bodies) as dead and remove it from the readers of its inputs."""
        self._dead[id(node)] = node
        self._changed.add(self._scope_of[id(node)])
        self.live_names[node.name] -= 1
        read: list[Tensor] = []
        for tensor in node.inputs:
            if not tensor.is_empty():
                forget(tensor.outputs, node)
                read.append(tensor)
        list.clear(node.inputs)
        for _, body in bodies(node):
            for tensor in body.outputs:
                self._outputs.pop(id(tensor), None)
                read.append(tensor)
            for inner in body.nodes:
                if id(inner) not in self._dead:
                    read.extend(self._unlink(inner))
        return read

    def commit(self) -> None:
        """Apply the changes to the node lists: one pass over each changed scope, with sorting if necessary."""
        ordered = True
        for number in self._changed:
            scope = self.scopes[number]
            scope.nodes = list(self._flatten(scope.nodes))
            ordered = ordered and _in_order(scope.nodes)
        if not ordered:
            sort(self.graph)
        self._changed.clear()
        self._before.clear()

    def _flatten(self, nodes: Iterable[Node]) -> Iterator[Node]:
        for start in nodes:
            stack = [(start, False)]
            while stack:
                node, entered = stack.pop()
                new = () if entered else self._before.get(id(node), ())
                if new:
                    stack.append((node, True))
                    stack.extend((other, False) for other in reversed(new))
                elif id(node) not in self._dead:
                    yield node


def forget(nodes: list[Node], node: Node) -> None:
    """Remove one occurrence of `node` from a list, by identity (graphsurgeon compares every attribute)."""
    for position, other in enumerate(nodes):
        if other is node:
            list.__delitem__(nodes, position)
            return


def move_readers(old: Tensor, new: Tensor) -> list[Node]:
    """Connect all readers of `old` to `new`, in place, and return them."""
    moved = list({id(node): node for node in old.outputs}.values())
    for node in moved:
        for position, tensor in enumerate(node.inputs):
            if tensor is old:
                list.__setitem__(node.inputs, position, new)
                list.append(new.outputs, node)
    list.clear(old.outputs)
    return moved


def _in_order(nodes: list[Node]) -> bool:
    position = {id(node): number for number, node in enumerate(nodes)}
    return all(
        position.get(id(producer), -1) < number
        for number, node in enumerate(nodes)
        for tensor in dependencies(node)
        for producer in tensor.inputs
    )
