"""Pattern matching: finds a tree at a node and returns its captures."""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import lru_cache
from itertools import permutations
from typing import Any

import numpy as np
import onnx

from sbonnx.graph import Constant, Node, Tensor
from sbonnx.graph.query import constant
from sbonnx.report.codes import Reason

from .index import GraphIndex
from .tree import Any_, Const, Maybe, Op, Or, Want, captures

STANDARD = (None, "", "ai.onnx")

Goals = tuple[tuple[Want, "Tensor | None"], "Goals"] | None
"""Remaining goals of the search as a linked list, so that alternatives share their tails."""


class Match:
    """Captures of a tree at one node.

    `match["conv"]` is the node, `match["w"]` the tensor, or None if an optional part is absent.
    """

    def __init__(self, root: Node, bound: dict[str, Any], nodes: list[Node], index: GraphIndex) -> None:
        self.root = root
        self.nodes = nodes
        """All matched nodes, the root first."""
        self._bound = bound
        self._index = index

    def __getitem__(self, name: str) -> Any:
        return self._bound[name]

    def __contains__(self, name: str) -> bool:
        """Return whether the capture exists and is not None."""
        return self._bound.get(name) is not None

    @property
    def opset(self) -> int:
        return self._index.opset

    def array(self, name: str) -> np.ndarray:
        """Return the value of a captured constant. Read only: it may be memory-mapped from the model's file."""
        value = constant(self._bound[name])
        assert value is not None, f"'{name}' did not capture a constant"
        return value

    def attribute(self, name: str, attribute: str) -> Any:
        """Return an attribute of a captured node, or the default of the op's schema, or None."""
        return attribute_of(self._bound[name], attribute, self.opset)

    def readers(self, tensor: Tensor) -> list[Node]:
        """Return the nodes that read a tensor, including those in bodies, without duplicates."""
        return list({id(node): node for node in tensor.outputs}.values())

    def is_output(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an output of the graph or of a body."""
        return self._index.is_output(tensor)

    def used(self, tensor: Tensor) -> bool:
        """Return whether a node reads a tensor, or it is an output."""
        return self._index.used(tensor)

    def why_not_replace(self, old: Tensor, new: Tensor) -> Reason | None:
        """Return why an existing tensor cannot replace `old`, or None. To be used in `check`; outputs keep their name.

        A tensor created by the rewrite can always replace `old`.
        """
        return self._index.why_not_replace(old, new)


def attribute_of(node: Node, name: str, opset: int) -> Any:
    """Return an attribute of a node, or the default of its schema, or None."""
    if name in node.attrs:
        return node.attrs[name]
    return None if node.domain not in STANDARD else _default(node.op, name, opset)


@lru_cache(maxsize=4096)
def _default(op: str, name: str, opset: int) -> Any:
    if not onnx.defs.has(op):
        return None
    attribute = onnx.defs.get_schema(op, opset).attributes.get(name)
    if attribute is None or attribute.default_value.type == onnx.AttributeProto.UNDEFINED:
        return None
    value = onnx.helper.get_attribute_value(attribute.default_value)
    return value.decode() if isinstance(value, bytes) else value


def find(tree: Op, node: Node, index: GraphIndex) -> tuple[Match, Reason | None] | None:
    """Match a tree with its root at `node`.

    Returns:
        The match and the reason why the engine must not rewrite it (None: it may), or None if the tree does not match.
        If a commutative op allows several matches, the first one that may be rewritten is returned.
    """
    search = _TreeSearch(tree, node, index)
    if search.enter(tree, node, None, None) or search.blocked is not None:
        bound, nodes, why = search.found if search.found is not None else search.blocked  # type: ignore[misc]
        everything = {**dict.fromkeys(_names(tree)), **bound}
        return Match(node, everything, nodes, index), why
    return None


def producer_ops(node: Node) -> Set[str]:
    """Return the op types of the nodes whose outputs a node reads."""
    return {tensor.inputs[0].op for tensor in node.inputs if tensor.inputs}


@lru_cache(maxsize=1024)
def _names(tree: Op) -> tuple[str, ...]:
    """Return the capture names of a tree without duplicates. Cached, because trees with shared parts expand to many."""
    return tuple(dict.fromkeys(captures(tree)))


class _TreeSearch:
    """Depth-first search with backtracking over the goals of one tree."""

    def __init__(self, tree: Op, root: Node, index: GraphIndex) -> None:
        self.tree = tree
        self.root = root
        self.index = index
        self.bound: dict[str, Any] = {}
        self.path: list[tuple[Op, Node]] = []
        self.found: tuple[dict[str, Any], list[Node], Reason | None] | None = None
        self.blocked: tuple[dict[str, Any], list[Node], Reason | None] | None = None

    def solve(self, goals: Goals) -> bool:
        if goals is None:
            return self.accept()
        (want, tensor), rest = goals
        if isinstance(want, Or):
            return any(self.solve(((choice, tensor), rest)) for choice in want.choices)
        absent = tensor is None or tensor.is_empty()
        if isinstance(want, Maybe):
            return self.solve(rest) if absent else self.solve(((want.want, tensor), rest))
        if absent:
            return False
        assert tensor is not None
        if isinstance(want, Any_):
            return self.solve(rest)
        if isinstance(want, Op):
            return len(tensor.inputs) == 1 and self.enter(want, tensor.inputs[0], tensor, rest)
        if isinstance(want, Const):
            value = constant(tensor) if isinstance(tensor, Constant) else None
            if value is None or (want.where is not None and not want.where(value)):
                return False
        elif want.where is not None and not want.where(tensor):
            return False
        return self.bind(want.name, tensor, rest)

    def bind(self, name: str, value: Any, goals: Goals) -> bool:
        """Capture a value and continue; a name already captured must be the same object."""
        if name in self.bound:
            return self.bound[name] is value and self.solve(goals)
        self.bound[name] = value
        if self.solve(goals):
            return True
        del self.bound[name]
        return False

    def enter(self, want: Op, node: Node, tensor: Tensor | None, goals: Goals) -> bool:
        """Match an op at a node; `tensor` is the output that is read, None for the root."""
        if node.op not in want.ops or (
            node.domain not in STANDARD if want.domain == "" else node.domain != want.domain
        ):
            return False
        if tensor is not None and (len(node.outputs) <= want.output or node.outputs[want.output] is not tensor):
            return False
        if want.producers and not want.may_read(producer_ops(node)):
            return False
        if want.attrs and not self.attributes_fit(want, node):
            return False
        self.path.append((want, node))
        for inputs in _orders(want, node):
            rest = goals
            for pair in reversed(inputs):
                rest = (pair, rest)
            if self.bind(want.name, node, rest) if want.name else self.solve(rest):
                return True
        self.path.pop()
        return False

    def attributes_fit(self, want: Op, node: Node) -> bool:
        for name, value in want.attrs.items():
            actual = attribute_of(node, name, self.index.opset)
            if not (value(actual) if callable(value) else actual == value):
                return False
        return True

    def accept(self) -> bool:
        """Record a complete match. Return False to continue the search if the engine would have to refuse it."""
        why = self.why_not()
        match = (dict(self.bound), list({id(node): node for _, node in self.path}.values()), why)
        if why is None:
            self.found = match
            return True
        self.blocked = self.blocked or match
        return False

    def why_not(self) -> Reason | None:
        """Return why the single-reader rule is violated, or None: inner tensors must not be read outside the match."""
        inside = {id(node) for _, node in self.path}
        home = self.index.scope_of(self.root)
        for want, node in self.path:
            for tensor in node.outputs[want.outputs :]:
                if self.index.used(tensor):
                    return Reason("second-output-used", f"output '{tensor.name}' of '{node.name}' is used")
            if node is self.root or want.shared:
                continue
            if self.index.scope_of(node) != home:
                return Reason("read-in-branch", f"'{node.outputs[0].name}' is read in a branch body")
            for tensor in node.outputs:
                if self.index.is_output(tensor):
                    return Reason("is-output", f"'{tensor.name}' is an output of the graph")
                others = [reader for reader in tensor.outputs if id(reader) not in inside]
                if any(self.index.scope_of(reader) != home for reader in others):
                    return Reason("read-in-branch", f"'{tensor.name}' is read in a branch body")
                if others:
                    return Reason("read-by-another-node", f"'{tensor.name}' is also read by '{others[0].name}'")
        return None


def _orders(want: Op, node: Node) -> Iterator[list[tuple[Want, Tensor | None]]]:
    """Yield the possible assignments of a node's inputs to the inputs of a tree's op."""
    if not want.inputs:
        yield []
        return
    inputs: list[Tensor | None] = list(node.inputs)
    if any(tensor is not None and not tensor.is_empty() for tensor in inputs[len(want.inputs) :]):
        return
    inputs = inputs[: len(want.inputs)] + [None] * (len(want.inputs) - len(inputs))
    if want.commutative:
        for order in permutations(inputs):
            yield list(zip(want.inputs, order, strict=True))
    else:
        yield list(zip(want.inputs, inputs, strict=True))
