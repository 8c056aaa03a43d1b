"""Follows channels through a graph: which tensors are scaled together, and what takes up their scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sbonnx.equalize.channel_flow.constants import Ceiling, Vector, Weight
from sbonnx.equalize.channel_flow.ids import FIXED, Groups, Ids
from sbonnx.graph import Body, Graph, Node, Tensor
from sbonnx.graph.query import bodies, captured, constant, dtype, scopes, shape
from sbonnx.ops import READS_SHAPE, STANDARD_DOMAINS
from sbonnx.spec import Array

Clips = Literal["keep", "channels", "relu"]
"""What becomes of a Clip from 0 to a number: its channels keep their scale; it becomes a Relu and a Min with a bound a
channel; it becomes a Relu (Nagel et al. 2019, section 5.1.1: the function changes where values were cut)."""

Shape = tuple[int | str | None, ...]


@dataclass
class Trace:
    """What is known while the nodes of a graph are walked in order.

    Attributes:
        clips: see `Clips`.
        ids: what is said of the channels.
        of: by id of a tensor, int64 ids that broadcast against it. A tensor without an entry keeps its values.
        why: by id of a tensor, why it does.
        weights, vectors, ceilings: what takes up scales.
    """

    clips: Clips = "channels"
    ids: Ids = field(default_factory=Ids)
    of: dict[int, Array] = field(default_factory=dict)
    why: dict[int, str] = field(default_factory=dict)
    weights: list[Weight] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    ceilings: list[Ceiling] = field(default_factory=list)

    def known(self, tensor: Tensor) -> Array | None:
        """The ids of a tensor, or None."""
        return self.of.get(id(tensor))

    def full(self, tensor: Tensor) -> Array | None:
        """The ids of a tensor with all its axes (1 where they do not differ); None without ids or known rank."""
        ids, size = self.known(tensor), shape(tensor)
        if ids is None or size is None or ids.ndim > len(size):
            return None
        return ids.reshape((1,) * (len(size) - ids.ndim) + ids.shape)

    def give(self, tensor: Tensor, ids: Array | None) -> None:
        """The output of a node has these ids."""
        if ids is not None and ids.size and (ids != FIXED).any():
            self.of[id(tensor)] = ids

    def keep(self, tensor: Tensor, why: str) -> None:
        """A tensor keeps its values."""
        ids = self.known(tensor)
        if ids is not None:
            self.ids.pin(ids, why)

    def refuse(self, node: Node, why: str | None = None) -> None:
        """What a node reads keeps its values, and what it writes."""
        why = why or f"{node.op} '{node.name}' reads its values as they are"
        for tensor in node.inputs:
            self.keep(tensor, why)
        for tensor in node.outputs:
            self.why[id(tensor)] = f"it comes from {node.op} '{node.name}'"


Rule = Callable[[Trace, Node, Body], None]


@dataclass(frozen=True)
class Traced:
    """What can be scaled in a graph, and how.

    Attributes:
        groups: channels that are scaled by one number each.
        ids: by tensor name; broadcasts against the tensor. Tensors without an entry keep their values.
        weights, vectors, ceilings: what takes up scales.
    """

    groups: Groups
    ids: dict[str, Array]
    weights: tuple[Weight, ...]
    vectors: tuple[Vector, ...]
    ceilings: tuple[Ceiling, ...]


def trace(graph: Graph, rules: dict[str, Rule], clips: Clips = "channels") -> Traced:
    """Walk every scope of a graph, in topological order, by a table of rules.

    Inputs and outputs of the model and of bodies keep their values, and so does what bodies read from outside.
    """
    found = Trace(clips)
    tensors: dict[int, Tensor] = {}
    for _, body in scopes(graph):
        for tensor in body.inputs:
            found.why[id(tensor)] = f"'{tensor.name}' is an input"
        for node in body.nodes:
            _walk(found, node, body, rules)
            tensors.update((id(tensor), tensor) for tensor in node.outputs)
        for tensor in body.outputs:
            found.keep(tensor, f"'{tensor.name}' is an output")
    groups = found.ids.groups()
    named = {tensors[key].name: ids for key, ids in found.of.items()}
    return Traced(groups, named, tuple(found.weights), tuple(found.vectors), tuple(found.ceilings))


def _walk(found: Trace, node: Node, body: Body, rules: dict[str, Rule]) -> None:
    for _, inner in bodies(node):
        for tensor in captured(inner):
            found.keep(tensor, f"a branch of '{node.name}' reads it")
    standard = (node.domain or "") in STANDARD_DOMAINS
    if standard and node.op in READS_SHAPE:
        return
    rule = rules.get(node.op) if standard else None
    if rule is None:
        found.refuse(node)
    else:
        rule(found, node, body)


def is_float(tensor: Tensor) -> bool:
    """Whether a tensor holds float32, or a type that scales can be folded into likewise."""
    kind = dtype(tensor)
    return kind is not None and kind.kind == "f"


def number(tensor: Tensor | None) -> float | None:
    """The value of a constant with one element, or None."""
    values = constant(tensor)
    return float(values.reshape(())) if values is not None and values.size == 1 else None


def varies(ids: Array) -> tuple[int, ...]:
    """The axes along which ids differ."""
    return tuple(axis for axis, size in enumerate(ids.shape) if size > 1)


def along(ids: Array | None, axis: int, length: int) -> Array | None:
    """Ids as a vector over one axis, (length,); None where they differ along another one or do not fit."""
    if ids is None or not -ids.ndim <= axis < ids.ndim:
        return None
    if any(size > 1 for place, size in enumerate(ids.shape) if place != axis % ids.ndim):
        return None
    flat: Array = ids.reshape(-1)
    return np.broadcast_to(flat, (length,)) if flat.size in (1, length) else None
