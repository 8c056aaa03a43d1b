"""Dimensions: groups of channels that the same layers write and read, so that any can be removed for another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import ClassVar

import numpy as np

from sbonnx.channels.ids import ChannelGroups, varies
from sbonnx.channels.trace import walk
from sbonnx.errors import ModelError
from sbonnx.graph import Graph
from sbonnx.pruning.groups.pruning_plan import Direction, LayerSide, PruningPlan
from sbonnx.pruning.groups.removal_rules import RULES
from sbonnx.pruning.groups.removal_trace import Cut, LinearSides, ProductSides, RemovalTrace
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Array

WHAT = "prune"


@dataclass(frozen=True)
class Dimension:
    """Groups of channels of which any can be removed in place of another.

    Groups are numbered by their first channel on the first side, so that the numbers do not depend on node order.

    Attributes:
        channels: by side, sorted, the indices of the channels of each group, int64 (groups, channels per group). A
            layer that passes channels on, depthwise or by whole groups, is on no side.
        parts: sets of groups of which one must remain each, so that no tensor is left empty.
    """

    json_keys: ClassVar = ("writers", "readers", "groups")

    channels: Mapping[LayerSide, Array]
    parts: tuple[frozenset[int], ...] = ()

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(next(iter(self.channels.values())))

    @property
    def writers(self) -> tuple[str, ...]:
        """Layers whose output channels are in the dimension."""
        return tuple(side.layer for side in self.channels if side.direction == "out")

    @property
    def readers(self) -> tuple[str, ...]:
        """Layers whose input channels are in the dimension."""
        return tuple(side.layer for side in self.channels if side.direction == "in")

    @property
    def name(self) -> str:
        """Name for reports: the layers that write it, else those that read it; not unique."""
        return " + ".join(self.writers or self.readers)

    def multiple(self, channels: int) -> int:
        """Return the number of groups whose multiples are multiples of `channels` channels on each side."""
        channel_counts = [side.shape[1] for side in self.channels.values()]
        return math.lcm(*(channels // math.gcd(channels, count) for count in channel_counts))

    def removable(self, order: Iterable[int]) -> tuple[int, ...]:
        """Return the groups that can be removed together, in the order given: all but one, and one of each part.

        The first ones of the result can be removed without the others, for any number.
        """
        left = [len(part) for part in self.parts]
        chosen: list[int] = []
        for group in order:
            if len(chosen) == self.groups - 1:
                break
            inside = [place for place, part in enumerate(self.parts) if group in part]
            if all(left[place] > 1 for place in inside):
                for place in inside:
                    left[place] -= 1
                chosen.append(int(group))
        return tuple(chosen)


@dataclass(frozen=True)
class PrunableDimensions:
    """Channels of a model that can be removed.

    Attributes:
        model: the model.
        dimensions: what can be removed together.
        pinned: what cannot be removed, with reasons.
    """

    model: str
    dimensions: tuple[Dimension, ...]
    pinned: tuple[Refusal, ...]


@dataclass(frozen=True)
class Dependencies:
    """Channels of the main graph: which are removed together, and everything that is sliced with them.

    Attributes:
        groups: of ids; `fixed` groups are pinned.
        ids: by tensor name; broadcasts against the tensor. Tensors without an entry keep all their entries.
        cuts: constants to slice.
        linears: linear layers with their ids, in order.
        products: products of two activations with channels, in order.
    """

    groups: ChannelGroups
    ids: Mapping[str, Array]
    cuts: tuple[Cut, ...]
    linears: tuple[LinearSides, ...]
    products: tuple[ProductSides, ...] = ()

    @cached_property
    def sides(self) -> dict[LayerSide, Array]:
        """Ids of the channels of each side, (channels,)."""
        sides: dict[LayerSide, Array] = {}
        for linear in self.linears:
            sides[LayerSide(linear.node.name, "in")] = linear.inputs
            sides[LayerSide(linear.node.name, "out")] = linear.outputs
        return sides

    @cached_property
    def dimensions(self) -> tuple[Dimension, ...]:
        """Dimensions with at least two groups, sorted by their sides."""
        where: dict[int, list[tuple[LayerSide, int]]] = {}
        for linear in self.linears:
            both: list[tuple[Direction, Array]] = [("in", linear.inputs), ("out", linear.outputs)]
            for direction, ids in [] if linear.passes_on else both:
                side = LayerSide(linear.node.name, direction)
                for place, group in enumerate(self.groups.of[ids].tolist()):
                    if not self.groups.fixed[group]:
                        where.setdefault(group, []).append((side, place))
        kinds: dict[tuple[tuple[LayerSide, int], ...], list[int]] = {}
        for group, entries in where.items():
            counts: dict[LayerSide, int] = {}
            for side, _ in entries:
                counts[side] = counts.get(side, 0) + 1
            kinds.setdefault(tuple(sorted(counts.items())), []).append(group)
        members = [kinds[kind] for kind in sorted(kinds) if len(kinds[kind]) > 1]
        sides = [[side for side, _ in kind] for kind in sorted(kinds) if len(kinds[kind]) > 1]
        tensors = {frozenset(np.unique(self.groups.of[ids]).tolist()) for ids in self.ids.values()}
        parts = _parts(members, tensors)
        return tuple(map(self._dimension, sides, members, repeat(where), parts))

    def _dimension(
        self,
        sides: Sequence[LayerSide],
        groups: Sequence[int],
        where: Mapping[int, Sequence[tuple[LayerSide, int]]],
        parts: Iterable[frozenset[int]],
    ) -> Dimension:
        places = {
            group: {side: [place for other, place in where[group] if other == side] for side in sides}
            for group in groups
        }
        order = sorted(groups, key=lambda group: places[group][sides[0]][0])
        number = {group: position for position, group in enumerate(order)}
        channels = {side: np.array([places[group][side] for group in order]) for side in sides}
        numbered = [frozenset(number[group] for group in part) for part in parts]
        return Dimension(channels, tuple(sorted(numbered, key=sorted)))

    def pinned(self) -> list[Refusal]:
        """Return one refusal for each layer with output channels that can never be removed, with the first reason."""
        refusals = []
        for linear in self.linears:
            fixed = self.groups.fixed[self.groups.of[linear.outputs]]
            if fixed.any() and not linear.passes_on:
                why = self.groups.reason(linear.outputs[fixed]) or Reason("channels-pinned", "its channels are pinned")
                count = "all" if fixed.all() else f"{int(fixed.sum())} of {len(fixed)}"
                refusals.append(
                    Refusal(WHAT, linear.node.name, Reason(why.code, f"{count} output channels stay: {why}"))
                )
        return refusals

    def plan_of(self, removed: Iterable[tuple[Dimension, Sequence[int]]]) -> PruningPlan:
        """Return the plan that removes groups of dimensions, by their numbers."""
        by_side: dict[LayerSide, set[int]] = {}
        for dimension, groups in removed:
            for side, channels in dimension.channels.items():
                by_side.setdefault(side, set()).update(channels[list(groups)].reshape(-1).tolist())
        partial = PruningPlan({side: tuple(sorted(numbers)) for side, numbers in by_side.items() if numbers})
        keep = self.kept(partial, check=False)
        gone = {side: tuple(np.flatnonzero(~keep[ids]).tolist()) for side, ids in self.sides.items()}
        return PruningPlan({side: channels for side, channels in gone.items() if channels})

    def kept(self, plan: PruningPlan, *, check: bool = True) -> Array:
        """Return which ids remain, bool (ids,).

        Args:
            check: require that the plan lists each side that loses channels.

        Raises:
            ModelError: the plan does not fit this graph: it names a layer or a channel that does not exist or is
                pinned, leaves out channels that must be removed together with others, or empties a tensor.
        """
        gone = np.zeros(len(self.groups.fixed), bool)
        for side, channels in plan.removed.items():
            ids = self.sides.get(side)
            if ids is None or channels[-1] >= len(ids) or channels[0] < 0:
                raise ModelError(f"the pruning plan does not fit: the graph has no such channels of '{side.layer}'")
            groups = self.groups.of[ids[list(channels)]]
            if self.groups.fixed[groups].any():
                why = self.groups.reason(ids[list(channels)][self.groups.fixed[groups]]) or Reason(
                    "no-rule", "it has no rule"
                )
                raise ModelError(f"the pruning plan removes channels of '{side.layer}' that are pinned: {why}")
            gone[groups] = True
        keep: Array = ~gone[self.groups.of]
        for side, ids in self.sides.items() if check else ():
            if tuple(np.flatnonzero(~keep[ids]).tolist()) != tuple(plan.removed.get(side, ())):
                raise ModelError(
                    f"the pruning plan does not fit: it does not list all channels of '{side.layer}' "
                    f"({side.direction}) that are removed together; make the plan again for this model"
                )
        for name, ids in self.ids.items():
            _check_rectangular(name, keep[ids])
        return keep


def dependencies(graph: Graph) -> Dependencies:
    """Trace the channels of the main graph for removal.

    Inputs and outputs of the graph, and tensors that bodies of If, Loop and Scan read, are pinned.
    """
    trace = RemovalTrace()
    ids = walk(trace, [graph], RULES)
    trace.settle()
    return Dependencies(trace.ids.groups(), ids, tuple(trace.cuts), tuple(trace.linears), tuple(trace.products))


def _parts(members: Sequence[Sequence[int]], tensors: Iterable[frozenset[int]]) -> list[set[frozenset[int]]]:
    """Return, by dimension, the sets of groups of which one must remain each.

    A tensor with a pinned group or with all groups of a dimension is never empty. Of any other tensor, one group
    remains in the dimension that has most of its groups: a limit for each dimension alone.

    Args:
        members: groups of each dimension.
        tensors: groups of each tensor.
    """
    dimension_of = {group: place for place, groups in enumerate(members) for group in groups}
    parts: list[set[frozenset[int]]] = [set() for _ in members]
    for tensor in tensors:
        inside: dict[int, set[int]] = {}
        for group in tensor & dimension_of.keys():
            inside.setdefault(dimension_of[group], set()).add(group)
        whole = any(len(groups) == len(members[place]) for place, groups in inside.items())
        if inside and not whole and sum(map(len, inside.values())) == len(tensor):
            most = min(inside, key=lambda place: (-len(inside[place]), place))
            parts[most].add(frozenset(inside[most]))
    return parts


def along_axis(keep: Array, axis: int) -> Array:
    """Return which entries along one axis remain, bool (length,), of a rectangular mask."""
    return np.asarray(np.moveaxis(keep, axis, 0).reshape(keep.shape[axis], -1).any(axis=1))


def _check_rectangular(name: str, keep: Array) -> None:
    """Check that the remaining entries of a tensor are a block.

    Raises:
        ModelError: they are not, or there are none.
    """
    if keep.all():
        return
    block = np.ones((1,) * keep.ndim, bool)
    for axis in varies(keep):
        sides = [1] * keep.ndim
        sides[axis] = -1
        block = block & along_axis(keep, axis).reshape(sides)
    if not keep.any():
        raise ModelError(f"pruning would remove all channels of '{name}': leave at least one")
    if not (np.broadcast_to(block, keep.shape) == keep).all():
        raise ModelError(f"pruning would leave channels of '{name}' that are no block")
