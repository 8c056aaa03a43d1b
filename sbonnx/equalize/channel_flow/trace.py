"""Traces channels through a graph: which tensors share scales, and which constants absorb them."""

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
"""Treatment of a Clip from 0 to a number.

"keep": its channels are not scaled. "channels": it becomes a Relu and a Min with one bound per channel. "relu": it
becomes a Relu (Nagel et al. 2019, section 5.1.1), which changes the function for values that were clipped.
"""

Shape = tuple[int | str | None, ...]


@dataclass
class Trace:
    """Mutable state of a trace, while the nodes of a graph are visited in order.

    Attributes:
        clips: see `Clips`.
        ids: constraints on the channels.
        of: by id of a tensor, int64 channel ids that broadcast against it. Tensors without an entry are not scaled.
        why: by id of a tensor, the reason why it is not scaled.
        weights, vectors, ceilings: constants that absorb scales.
    """

    clips: Clips = "channels"
    ids: Ids = field(default_factory=Ids)
    of: dict[int, Array] = field(default_factory=dict)
    why: dict[int, str] = field(default_factory=dict)
    weights: list[Weight] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    ceilings: list[Ceiling] = field(default_factory=list)

    def known(self, tensor: Tensor) -> Array | None:
        """Return the channel ids of a tensor, or None."""
        return self.of.get(id(tensor))

    def full(self, tensor: Tensor) -> Array | None:
        """Return the ids of a tensor with all axes (size 1 if constant along it); None without ids or known rank."""
        ids, size = self.known(tensor), shape(tensor)
        if ids is None or size is None or ids.ndim > len(size):
            return None
        return ids.reshape((1,) * (len(size) - ids.ndim) + ids.shape)

    def give(self, tensor: Tensor, ids: Array | None) -> None:
        """Set the ids of a node's output."""
        if ids is not None and ids.size and (ids != FIXED).any():
            self.of[id(tensor)] = ids

    def keep(self, tensor: Tensor, why: str) -> None:
        """Mark a tensor as not scaled."""
        ids = self.known(tensor)
        if ids is not None:
            self.ids.pin(ids, why)

    def refuse(self, node: Node, why: str | None = None) -> None:
        """Mark the inputs and outputs of a node as not scaled."""
        why = why or f"{node.op} '{node.name}' reads its values as they are"
        for tensor in node.inputs:
            self.keep(tensor, why)
        for tensor in node.outputs:
            self.why[id(tensor)] = f"it comes from {node.op} '{node.name}'"


Rule = Callable[[Trace, Node, Body], None]


@dataclass(frozen=True)
class Traced:
    """Result of a trace: what can be scaled in a graph.

    Attributes:
        groups: channels with one scale each.
        ids: by tensor name; broadcasts against the tensor. Tensors without an entry are not scaled.
        weights, vectors, ceilings: constants that absorb scales.
    """

    groups: Groups
    ids: dict[str, Array]
    weights: tuple[Weight, ...]
    vectors: tuple[Vector, ...]
    ceilings: tuple[Ceiling, ...]


def trace(graph: Graph, rules: dict[str, Rule], clips: Clips = "channels") -> Traced:
    """Trace every scope of a graph, in topological order, with a table of rules.

    Inputs and outputs of the model and of bodies are not scaled, nor are tensors that bodies read from outside.
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
    """Return whether a tensor is float16, float32 or float64, into which scales can be folded."""
    kind = dtype(tensor)
    return kind is not None and kind.kind == "f"


def number(tensor: Tensor | None) -> float | None:
    """Return the value of a constant with one element, or None."""
    values = constant(tensor)
    return float(values.reshape(())) if values is not None and values.size == 1 else None


def varies(ids: Array) -> tuple[int, ...]:
    """Return the axes along which ids differ."""
    return tuple(axis for axis, size in enumerate(ids.shape) if size > 1)


def along(ids: Array | None, axis: int, length: int) -> Array | None:
    """Return ids as a vector over one axis, (length,); None if they differ along another axis or do not fit."""
    if ids is None or not -ids.ndim <= axis < ids.ndim:
        return None
    if any(size > 1 for place, size in enumerate(ids.shape) if place != axis % ids.ndim):
        return None
    flat: Array = ids.reshape(-1)
    return np.broadcast_to(flat, (length,)) if flat.size in (1, length) else None
