"""Traces channels through a graph: which channels share a scale, and which constants absorb scales.

Channels have ids. Constraints on ids make scales equal, or exclude channels that cannot be scaled. Weights, biases,
gains of norms and bounds of Clips absorb scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from sbonnx.graph import Body, Graph, Node, Tensor, Variable
from sbonnx.graph.edit import Names, add_constant, add_node, replace_input, replace_output
from sbonnx.graph.query import bodies, captured, constant, dtype, scopes, shape
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import LINEAR, READS_SHAPE, STANDARD_DOMAINS
from sbonnx.spec import Array

FIXED: Final = 0
"""Id of all channels that cannot be scaled from the start."""


@dataclass(frozen=True)
class Weight:
    """A linear node with a constant weight that nothing else reads.

    If a tensor x is divided by s per channel, the weight becomes ``s_in * W / s_out`` and the bias ``b / s_out``.

    Attributes:
        node, body: the node and its scope.
        layer: layout of the weight.
        inputs, outputs: ids of its channels, int64 (in channels,) and (out channels,).
        why: why the input cannot be scaled, if known from the start.
    """

    node: Node
    body: Body
    layer: LinearLayer
    inputs: Array
    outputs: Array
    why: str | None = None

    @property
    def values(self) -> Array:
        """The current weight."""
        found = constant(self.node.inputs[self.layer.index])
        assert found is not None
        return found

    @property
    def bias(self) -> Array | None:
        """The current bias."""
        index = LINEAR[self.node.op].bias
        return None if index is None or index >= len(self.node.inputs) else constant(self.node.inputs[index])

    def set_values(self, values: Array, names: Names) -> None:
        """Replace the weight in place, keeping its type and name."""
        set_constant(self.node, self.layer.index, values.astype(self.values.dtype), names)

    def set_bias(self, values: Array, names: Names) -> None:
        """Replace the bias in place, in the type of the weight. A bias is added if the node has none."""
        index = LINEAR[self.node.op].bias
        assert index is not None
        values = values.astype(self.values.dtype)
        if index < len(self.node.inputs) and self.node.inputs[index].name:
            set_constant(self.node, index, values, names)
            return
        made = add_constant(self.body, f"{self.node.name}.bias", values, names)
        if index < len(self.node.inputs):  # optional input with an empty name
            replace_input(self.node, index, made)
        else:
            self.node.inputs.append(made)

    def scaled(self, before: Array, after: Array) -> tuple[Array, Array | None]:
        """Return weight and bias, float64, times `before` (in channels,) and over `after` (out channels,)."""
        factor = before.reshape(self.layer.in_shape) / after.reshape(self.layer.out_shape)
        weight = np.empty(self.values.shape)
        np.multiply(self.layer.by_channel(self.values), factor, out=self.layer.by_channel(weight))
        bias = self.bias
        if bias is None:
            return weight, None
        wide = bias if bias.size == 1 and after.size == 1 else np.broadcast_to(bias, (*bias.shape[:-1], after.size))
        return weight, wide / after


@dataclass(frozen=True)
class Vector:
    """A constant operand that becomes ``c * s[times] / s[over]``.

    Attributes:
        node, index: the constant input of the node.
        times, over: ids that broadcast against the constant and do not enlarge it; None: no factor.
    """

    node: Node
    index: int
    times: Array | None
    over: Array | None


@dataclass(frozen=True)
class Ceiling:
    """The upper bound of a Clip from 0, which becomes one bound per channel: ``hi / s``.

    Attributes:
        node, body: the Clip and its scope.
        high: the bound.
        ids: of its output, with all axes.
    """

    node: Node
    body: Body
    high: float
    ids: Array


def set_constant(node: Node, index: int, values: Array, names: Names) -> None:
    """Replace a constant input of `node` in place. The name is kept if nothing else reads the old constant."""
    old = node.inputs[index]
    alone = len(old.outputs) == 1
    made = add_constant(node, old.name, np.ascontiguousarray(values).reshape(values.shape), names)
    replace_input(node, index, made)
    if alone:
        old.name, made.name = made.name, old.name


def put_ceiling(ceiling: Ceiling, bound: Array, names: Names) -> None:
    """Replace Clip(x, 0, high) by Min(Relu(x), bound) in place. The Clip remains without readers."""
    output = _freed(ceiling.node, names)
    relu = add_node(ceiling.body, "Relu", ceiling.node.inputs[:1], names=names, stem=f"{ceiling.node.name}/Relu")
    relu.outputs[0].dtype, relu.outputs[0].shape = output.dtype, output.shape
    high = add_constant(ceiling.body, f"{ceiling.node.name}/ceiling", bound, names)
    stem = f"{ceiling.node.name}/Min"
    add_node(ceiling.body, "Min", [relu.outputs[0], high], names=names, stem=stem, outputs=[output])


def put_relu(ceiling: Ceiling, names: Names) -> None:
    """Replace Clip(x, 0, high) by Relu(x) in place. The Clip remains without readers."""
    output = _freed(ceiling.node, names)
    stem = f"{ceiling.node.name}/Relu"
    add_node(ceiling.body, "Relu", ceiling.node.inputs[:1], names=names, stem=stem, outputs=[output])


def _freed(node: Node, names: Names) -> Tensor:
    """Detach the output of a node, in place, and return it. The node gets a new output."""
    output = node.outputs[0]
    replace_output(node, 0, Variable(names.fresh(f"{output.name}/before"), output.dtype, output.shape))
    return output


@dataclass(frozen=True)
class ChannelGroups:
    """Partition of channels into groups with one scale each, under all constraints.

    Attributes:
        of: group of each id, int64 (ids,).
        fixed: whether the group cannot be scaled, bool (groups,).
        why: by fixed group, the first reason that was given.
    """

    of: Array
    fixed: Array
    why: dict[int, str]

    def reason(self, ids: Array) -> str | None:
        """Return why none of these ids can be scaled; None if any of them can."""
        groups = np.unique(self.of[ids])
        if not self.fixed[groups].all():
            return None
        return next((self.why[group] for group in groups.tolist() if group in self.why), None)


class Ids:
    """Allocates channel ids and collects constraints on them. Id 0 is fixed."""

    def __init__(self) -> None:
        self._count = 1
        self._pairs: list[tuple[Array, Array]] = []
        self._pins: list[tuple[Array, str]] = []

    def fresh(self, shape: tuple[int, ...]) -> Array:
        """Allocate new distinct ids, int64 of `shape`."""
        size = int(np.prod(shape, dtype=np.int64))
        made = np.arange(self._count, self._count + size, dtype=np.int64).reshape(shape)
        self._count += size
        return made

    def unite(self, one: Array, other: Array, why: str) -> Array:
        """Require equal scales for channels that are combined, and return their ids, broadcast to both shapes.

        Channels combined with a fixed channel become fixed.
        """
        both = np.broadcast_arrays(one, other)
        left, right = (side.reshape(-1) for side in both)
        self.pin(left[right == FIXED], why)
        self.pin(right[left == FIXED], why)
        free = (left != FIXED) & (right != FIXED) & (left != right)
        if free.any():
            self._pairs.append((left[free], right[free]))
        return np.where(both[0] == FIXED, both[1], both[0])

    def pin(self, ids: Array, why: str) -> None:
        """Mark these ids as fixed."""
        if ids.size:
            self._pins.append((np.unique(ids), why))

    def groups(self) -> ChannelGroups:
        """Compute groups from all constraints. Takes a few linear passes over the ids."""
        label = np.arange(self._count, dtype=np.int64)
        if self._pairs:
            one = np.concatenate([pair[0] for pair in self._pairs])
            other = np.concatenate([pair[1] for pair in self._pairs])
            while (label[one] != label[other]).any():
                low = np.minimum(label[one], label[other])
                np.minimum.at(label, label[one], low)
                np.minimum.at(label, label[other], low)
                while (label[label] != label).any():
                    label = label[label]
        of = np.unique(label, return_inverse=True)[1].reshape(-1).astype(np.int64)
        fixed = np.zeros(int(of.max()) + 1, bool)
        why: dict[int, str] = {}
        fixed[of[FIXED]] = True
        for ids, reason in self._pins:
            groups = np.unique(of[ids])
            fixed[groups] = True
            for group in groups.tolist():
                why.setdefault(group, reason)
        return ChannelGroups(of, fixed, why)


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
        why = why or f"{node.op} '{node.name}' needs its inputs unscaled"
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

    groups: ChannelGroups
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
