"""Estimated time of a network as a function of the channels that are removed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sbonnx import graph as graphs
from sbonnx.backends.kernel_costs import KernelCosts
from sbonnx.channels.ids import varies
from sbonnx.graph import Constant, Graph, Node, Tensor
from sbonnx.graph.query import output_names, rank, shape, tensors_by_name
from sbonnx.planning.times import GraphTimes
from sbonnx.pruning.groups.dimensions import Dependencies, Dimension
from sbonnx.spec import Array


@dataclass(frozen=True)
class AxisLength:
    """Length of an axis for any number of removed groups of each dimension.

    Attributes:
        whole: length if nothing is removed.
        removed_at: by dimension, ascending, for each entry of the axis that can be removed: the number of groups that
            are removed before its own.
    """

    whole: int
    removed_at: Mapping[int, Sequence[int]]

    def after(self, removed: Sequence[int]) -> int:
        """Return the length if so many groups of each dimension are removed."""
        return self.whole - sum(bisect_left(places, removed[which]) for which, places in self.removed_at.items())


@dataclass(frozen=True)
class _PrunedAxis:
    """An axis of a tensor, of a constant of a node, or the groups of a depthwise layer, by `axis` None."""

    owner: Tensor | Node
    axis: int | None
    length: AxisLength

    def set(self, removed: Sequence[int]) -> None:
        size = self.length.after(removed)
        if isinstance(self.owner, Node):
            self.owner.attrs["group"] = size
        elif isinstance(self.owner, Constant):
            sizes = list(self.owner.values.shape)
            sizes[self.axis or 0] = size
            self.owner.values = np.broadcast_to(self.owner.values.reshape(-1)[:1], sizes)
        else:
            sizes = list(shape(self.owner) or ())
            sizes[self.axis or 0] = size
            self.owner.shape = sizes


class PrunedTimes:
    """Estimated time of one sample in float, as a `sbonnx.pruning.budgets.budget.Cost` in ns.

    `GraphTimes` of a copy of the graph in which constants have shapes and no values. Times are remembered.
    """

    def __init__(self, graph: Graph, found: Dependencies, orders: Sequence[Sequence[int]], costs: KernelCosts) -> None:
        """Trace which axes depend on which dimensions.

        Args:
            graph: the float graph; not changed.
            found: its channels.
            orders: groups of each dimension that can be removed, in the order of removal.
            costs: table of kernel costs.
        """
        self.costs = costs
        copied = graphs.copy(graph)
        self._nodes, self._outputs = tuple(copied.nodes), output_names(copied)
        places = _places(found, orders)
        self._axes = list(_axes(copied, found, places))
        self._set = [0] * len(orders)
        touched: dict[int, set[int]] = {}  # dimensions by id of the node
        tensors = {
            id(axis.owner): set(axis.length.removed_at) for axis in self._axes if not isinstance(axis.owner, Node)
        }
        for node in self._nodes:
            for tensor in (*node.inputs, *node.outputs):
                touched.setdefault(id(node), set()).update(tensors.get(id(tensor), ()))
        count = range(len(orders))
        self._parts = [tuple(node for node in self._nodes if place in touched[id(node)]) for place in count]
        self._beside = [sorted({number for node in part for number in touched[id(node)]}) for part in self._parts]
        self._by_dimension = [[axis for axis in self._axes if place in axis.length.removed_at] for place in count]
        self._known: dict[tuple[int, ...], float] = {}

    def __call__(self, removed: Array) -> float:
        """Return the time in ns if so many groups of each dimension are removed, (dimensions,)."""
        return self._time((-1, *removed.tolist()), removed, self._nodes)

    def change(self, removed: Array, place: int, counts: Array) -> Array:
        """Return how much less time in ns the nodes take that depend on a dimension, (counts,)."""
        now = self._of_part(place, removed)
        tried = np.repeat(removed[None], len(counts), axis=0)
        tried[:, place] = counts
        return np.array([now - self._of_part(place, row) for row in tried])

    def _of_part(self, place: int, removed: Array) -> float:
        key = (place, *removed[self._beside[place]].tolist())
        return self._time(key, removed, self._parts[place])

    def _time(self, key: tuple[int, ...], removed: Array, nodes: Sequence[Node]) -> float:
        if key not in self._known:
            wanted = removed.tolist()
            changed = [place for place, count in enumerate(wanted) if count != self._set[place]]
            for place in changed:
                for axis in self._by_dimension[place]:
                    axis.set(wanted)
            self._set = wanted
            self._known[key] = GraphTimes.of(nodes, self._outputs, self.costs).of_division(())
        return self._known[key]


def _places(found: Dependencies, orders: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Return by group of ids its dimension and the number of groups that are removed before it."""
    places = {}
    for place, (dimension, order) in enumerate(zip(found.dimensions, orders, strict=True)):
        groups = _groups(found, dimension)
        for before, number in enumerate(order):
            places[int(groups[number])] = (place, before)
    return places


def _groups(found: Dependencies, dimension: Dimension) -> Array:
    """Return the groups of ids of a dimension by their numbers."""
    side, channels = next(iter(dimension.channels.items()))
    return found.groups.of[found.sides[side][channels[:, 0]]]


def _axes(copied: Graph, found: Dependencies, places: Mapping[int, tuple[int, int]]) -> list[_PrunedAxis]:
    """Return the axes of the copied graph that depend on a dimension."""
    tensors, nodes = tensors_by_name(copied), {node.name: node for node in copied.nodes}
    axes = []
    for name, ids in found.ids.items():
        tensor = tensors.get(name)
        size = None if tensor is None or isinstance(tensor, Constant) else rank(tensor)
        for axis in varies(ids):
            rows = np.moveaxis(ids, axis, 0).reshape(ids.shape[axis], -1)
            length = _length(found.groups.of[rows], places)
            if tensor is not None and size is not None:
                axes.append(_PrunedAxis(tensor, axis + size - ids.ndim, length))  # ids broadcast against the tensor
    for cut in found.cuts:
        node = nodes.get(cut.node.name)
        if node is not None:
            axes.append(_PrunedAxis(_own(node, cut.index), cut.axis, _length(found.groups.of[cut.ids], places)))
    for linear in found.linears:
        node = nodes.get(linear.node.name)
        if node is not None and linear.passes_on:
            rows = linear.inputs.reshape(linear.layer.group, -1)
            axes.append(_PrunedAxis(node, None, _length(found.groups.of[rows], places)))
    return [kept_axis for kept_axis in axes if kept_axis.length.removed_at]


def _own(node: Node, index: int) -> Constant:
    """Return a constant of a copied node that no other node reads, with a shape and no values."""
    old = node.inputs[index]
    if not old.name.startswith(f"{node.name}:{index}:"):
        node.inputs[index] = Constant(
            f"{node.name}:{index}:{old.name}", np.broadcast_to(np.zeros(1, np.float32), tuple(old.shape))
        )
    constant = node.inputs[index]
    assert isinstance(constant, Constant)
    return constant


def _length(groups: Array, places: Mapping[int, tuple[int, int]]) -> AxisLength:
    """Return the length of an axis with these groups, (length, entries): it loses rows of one group that is removed."""
    removed_at: dict[int, list[int]] = {}
    for row in groups:
        if row[0] in places and (row == row[0]).all():
            place, before = places[int(row[0])]
            removed_at.setdefault(place, []).append(before)
    return AxisLength(len(groups), {place: sorted(every) for place, every in removed_at.items()})
