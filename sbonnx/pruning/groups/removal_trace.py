"""State of a trace of channels for removal: channels that are removed together, and the constants that they index."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from sbonnx.channels.ids import varies
from sbonnx.channels.trace import Trace
from sbonnx.graph import Node, Tensor
from sbonnx.graph.query import constant, producer, rank, shape
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import CONCATS
from sbonnx.spec import Array


@dataclass(frozen=True)
class Cut:
    """An axis of a constant from which the entries of removed channels are sliced.

    Attributes:
        node, index: the constant input of the node.
        axis: of the constant.
        ids: int64 (length of the axis,).
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
    """

    node: Node
    layer: LinearLayer
    inputs: Array
    outputs: Array

    @property
    def is_depthwise(self) -> bool:
        """Whether the layer is depthwise: each output channel reads one input channel, and no two read the same."""
        return self.layer.group > 1 and self.layer.in_channels == self.layer.group


@dataclass
class RemovalTrace(Trace):
    """Mutable state of a trace for removal. Ids without a constraint can be removed one by one.

    The remaining entries of a tensor must be rectangular, so ids that vary along several axes are joined along all but
    the one that leaves most groups.

    Attributes:
        cuts: constants to slice.
        linears: linear nodes, in order.
        shrinking: by id of a tensor with channels, the axis from which entries may be removed.
    """

    refusal: ClassVar[str] = "does not keep channels apart"

    cuts: list[Cut] = field(default_factory=list)
    linears: list[LinearSides] = field(default_factory=list)
    shrinking: dict[int, int] = field(default_factory=dict)

    def give(self, tensor: Tensor, ids: Array | None) -> None:
        """Set the ids of a node's output, joined so that what remains after any removal is rectangular."""
        if ids is not None and varies(ids):
            self.shrinking[id(tensor)] = self._join(ids)
        super().give(tensor, ids)

    def cut(self, node: Node, index: int, axis: int, ids: Array) -> None:
        """Slice an axis of a constant along ids (length of the axis,)."""
        self.cuts.append(Cut(node, index, axis, ids))

    def _join(self, ids: Array) -> int:
        """Join ids along all axes but the one that leaves most groups, and return this axis."""
        axes = varies(ids)
        if len(axes) == 1:
            return axes[0]
        layouts = {axis: np.moveaxis(ids, axis, 0).reshape(ids.shape[axis], -1) for axis in axes}
        best = max(axes, key=lambda axis: _rows_apart(layouts[axis]))
        rows = layouts[best]
        self.ids.unite(rows[:, :1], rows, "channels along several axes are removed together with it")
        return best


def _rows_apart(ids: Array) -> int:
    """Return how many groups remain if all ids of each row (n, m) are joined: connected rows count once."""
    names = np.unique(ids, return_inverse=True)[1].reshape(ids.shape)
    label = np.arange(int(names.max()) + 1)
    while True:
        low = label[names].min(axis=1, keepdims=True)
        before = label.copy()
        np.minimum.at(label, names, np.broadcast_to(low, names.shape))
        if (label == before).all():
            return len(np.unique(label[names[:, 0]]))


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
