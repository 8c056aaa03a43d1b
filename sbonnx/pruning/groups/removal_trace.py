"""State of a trace of channels for removal: channels that are removed together, and the constants that they index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar

import numpy as np

from sbonnx.channels.ids import varies
from sbonnx.channels.trace import Trace
from sbonnx.graph import Node, Tensor
from sbonnx.graph.query import constant, producer, rank, shape
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import CONCATS, LINEAR
from sbonnx.pruning.groups.removal_choices import Layout, choose, layouts
from sbonnx.report.codes import Reason
from sbonnx.spec import Array


@dataclass(frozen=True)
class Cut:
    """An axis of a constant from which the entries of removed channels are sliced.

    Attributes:
        node, index: the constant input of the node.
        axis: of the constant.
        ids: int64 (length of the axis, n). An entry is removed if all ids of its row are.
    """

    node: Node
    index: int
    axis: int
    ids: Array


@dataclass(frozen=True)
class LinearSides:
    """Channels of a linear node with a constant weight.

    Attributes:
        node: of the main graph.
        layer: layout of the weight.
        inputs, outputs: ids, int64 (in channels,) and (out channels,). A depthwise layer passes its input ids on.
        whole_groups: groups of a convolution are removed as a whole, with their inputs and outputs.
        shared: another linear node reads the same weight.
    """

    node: Node
    layer: LinearLayer
    inputs: Array
    outputs: Array
    whole_groups: bool = False
    shared: bool = False

    @property
    def is_depthwise(self) -> bool:
        """Whether the layer is depthwise: each output channel reads one input channel, and no two read the same."""
        return self.layer.group > 1 and self.layer.in_channels == self.layer.group

    @property
    def passes_on(self) -> bool:
        """Whether outputs are removed with the inputs that they read: no weight that remains reads a removed input."""
        return self.is_depthwise or self.whole_groups


@dataclass(frozen=True)
class ProductSides:
    """A product of two activations.

    Attributes:
        node: MatMul of the main graph.
        ids: of its output; broadcast against it.
    """

    node: Node
    ids: Array


@dataclass
class RemovalTrace(Trace):
    """Mutable state of a trace for removal. Ids without a constraint can be removed one by one.

    The remaining entries of a tensor must be rectangular. Where ids vary along several axes, and where an op can lose
    channels in several ways, the choice depends on all other constraints, so `settle` makes it when the walk is over.

    Attributes:
        cuts: constants to slice.
        linears: linear nodes, in order.
        products: products of two activations with channels, in order.
    """

    refusal: ClassVar[Reason] = Reason("channels-not-apart", "does not keep channels apart")

    cuts: list[Cut] = field(default_factory=list)
    linears: list[LinearSides] = field(default_factory=list)
    products: list[ProductSides] = field(default_factory=list)
    _choices: list[tuple[Layout, ...]] = field(default_factory=list)
    _tensors: list[Array] = field(default_factory=list)
    _whole: list[tuple[int, Layout]] = field(default_factory=list)
    _weights: dict[int, list[int]] = field(default_factory=dict)

    def give(self, tensor: Tensor, ids: Array | None) -> None:
        """Set the ids of a node's output, of which what remains after any removal must be rectangular."""
        if ids is not None and len(varies(ids)) > 1:
            self._tensors.append(ids)
        super().give(tensor, ids)

    def cut(self, node: Node, index: int, axis: int, ids: Array) -> None:
        """Slice an axis of a constant along ids, (length of the axis,) or (length of the axis, n)."""
        self.cuts.append(Cut(node, index, axis, ids.reshape(len(ids), prod(ids.shape[1:]))))

    def hold(self, ids: Array, axes: Iterable[int], why: Reason) -> bool:
        """Require that no entries are removed along these axes of ids: channels along other axes go as a whole.

        Returns:
            False if there are no channels along other axes, so that all are pinned.
        """
        held = [axis for axis in varies(ids) if axis in {place % ids.ndim for place in axes}]
        rest = [axis for axis in varies(ids) if axis not in held]
        if held and not rest:
            self.ids.pin(ids, why)
        elif held:
            length = prod(size for axis, size in enumerate(ids.shape) if axis not in rest)  # may be 0
            rows = np.moveaxis(ids, rest, range(len(rest))).reshape([ids.shape[axis] for axis in rest] + [length])
            self.ids.unite(rows[..., :1], rows, why)
        return bool(rest) or not held

    def choice(self, *options: Layout) -> None:
        """Leave the choice between ways to remove channels to `settle`."""
        self._choices.append(options)

    def linear(self, sides: LinearSides, *, positions: Layout | None = None, groups: Layout | None = None) -> None:
        """Add a linear node; with groups, two ways to remove channels: positions in each group, or whole groups."""
        self._weights.setdefault(id(_weight(sides)), []).append(len(self.linears))
        if positions is not None and groups is not None:
            self._whole.append((len(self.linears), groups))
            self.choice(positions, groups)
        self.linears.append(sides)

    def sharing(self, weight: Tensor) -> LinearSides | None:
        """Return the first linear node that reads a weight, if it was visited."""
        places = self._weights.get(id(weight))
        return None if places is None else self.linears[places[0]]

    def settle(self) -> None:
        """Make all choices: first of ops, then of the axis along which each tensor shrinks."""
        self._settle_shared()
        options = [*self._choices, *(layouts(ids) for ids in self._tensors)]
        chosen = {id(layout) for layout in choose(self.ids, options)}
        for place, layout in self._whole:
            if id(layout) in chosen:
                self.linears[place] = replace(self.linears[place], whole_groups=True)

    def _settle_shared(self) -> None:
        """Mark layers that share a weight; pin them if anything else reads it."""
        for places in self._weights.values():
            first = self.linears[places[0]]
            weight = _weight(first)
            if len(weight.outputs) == 1:
                continue
            why = Reason(
                "weight-is-shared", f"weight '{weight.name}' of '{first.node.name}' is read {len(weight.outputs)} times"
            )
            for place in places:
                self.linears[place] = sides = replace(self.linears[place], shared=True)
                if len(places) < len(weight.outputs):
                    self.ids.pin(sides.inputs, why)
                    self.ids.pin(sides.outputs, why)


def _weight(sides: LinearSides) -> Tensor:
    return sides.node.inputs[LINEAR[sides.node.op].weight]


def target_places(node: Node) -> list[tuple[Node, int, int] | None] | None:
    """Return where the target of a Reshape has the size of each output axis: (node, constant input, position).

    The target is a constant, or a Concat of constants and computed sizes, which are None (a dynamic batch).

    Returns:
        None if the target is computed in any other way, or its length is not the rank of the output.
    """
    target, size = node.inputs[1], rank(node.outputs[0])
    maker = producer(target)
    pieces = [(node, 1)] if maker is None else [(maker, index) for index in range(len(maker.inputs))]
    if maker is not None and maker.op not in CONCATS:
        return None
    places: list[tuple[Node, int, int] | None] = []
    for owner, index in pieces:
        values, length = constant(owner.inputs[index]), shape(owner.inputs[index])
        if values is not None:
            places += [(owner, index, position) for position in range(values.size)]
        elif length is not None and len(length) == 1 and isinstance(length[0], int):
            places += [None] * length[0]
        else:
            return None
    return places if len(places) == size else None
