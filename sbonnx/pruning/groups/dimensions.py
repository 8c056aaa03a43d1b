"""Dimensions: groups of channels that the same layers write and read, so that any can be removed for another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sbonnx.channels.ids import ChannelGroups, varies
from sbonnx.channels.trace import walk
from sbonnx.errors import ModelError
from sbonnx.graph import Graph
from sbonnx.pruning.groups.pruning_plan import Direction, LayerSide, PruningPlan
from sbonnx.pruning.groups.removal_rules import RULES
from sbonnx.pruning.groups.removal_trace import Cut, LinearSides, RemovalTrace
from sbonnx.report import Refusal
from sbonnx.spec import Array

WHAT = "prune"


@dataclass(frozen=True)
class Dimension:
    """Groups of channels of which any can be removed in place of another.

    Groups are numbered by their first channel on the first side, so that the numbers do not depend on node order.

    Attributes:
        channels: by side, sorted, the indices of the channels of each group, int64 (groups, channels per group). A
            depthwise layer is on no side: it passes channels on.
        parts: sets of groups that make up a tensor alone, of which one must remain each.
    """

    channels: Mapping[LayerSide, Array]
    parts: tuple[frozenset[int], ...] = ()

    @property
    def size(self) -> int:
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

    def first(self, order: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the first `count` groups in the order of removal that can be removed together, sorted.

        Fewer are returned if the last group of a part would be removed.
        """
        left = [len(part) for part in self.parts]
        chosen: list[int] = []
        for group in order:
            if len(chosen) == min(count, self.size - 1):
                break
            inside = [place for place, part in enumerate(self.parts) if group in part]
            if any(left[place] == 1 for place in inside):
                continue
            for place in inside:
                left[place] -= 1
            chosen.append(int(group))
        return tuple(sorted(chosen))


@dataclass(frozen=True)
class Dependencies:
    """Channels of the main graph: which are removed together, and everything that is sliced with them.

    Attributes:
        groups: of ids; `fixed` groups are pinned.
        ids: by tensor name; broadcasts against the tensor. Tensors without an entry keep all their entries.
        cuts: constants to slice.
        linears: linear layers with their ids, in order.
    """

    groups: ChannelGroups
    ids: Mapping[str, Array]
    cuts: tuple[Cut, ...]
    linears: tuple[LinearSides, ...]

    @cached_property
    def sides(self) -> dict[LayerSide, Array]:
        """Ids of the channels of each side, (channels,)."""
        found: dict[LayerSide, Array] = {}
        for linear in self.linears:
            found[LayerSide(linear.node.name, "in")] = linear.inputs
            found[LayerSide(linear.node.name, "out")] = linear.outputs
        return found

    @cached_property
    def dimensions(self) -> tuple[Dimension, ...]:
        """Dimensions with at least two groups, sorted by their sides."""
        where: dict[int, list[tuple[LayerSide, int]]] = {}
        for linear in self.linears:
            both: list[tuple[Direction, Array]] = [("in", linear.inputs), ("out", linear.outputs)]
            for direction, ids in [] if linear.is_depthwise else both:
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
        tensors = [frozenset(np.unique(self.groups.of[ids]).tolist()) for ids in self.ids.values()]
        found = []
        for kind in sorted(kinds):
            groups = kinds[kind]
            if len(groups) > 1:
                found.append(self._dimension([side for side, _ in kind], groups, where, tensors))
        return tuple(found)

    def _dimension(
        self,
        sides: Sequence[LayerSide],
        groups: Sequence[int],
        where: Mapping[int, Sequence[tuple[LayerSide, int]]],
        tensors: Iterable[frozenset[int]],
    ) -> Dimension:
        places = {
            group: {side: [place for other, place in where[group] if other == side] for side in sides}
            for group in groups
        }
        order = sorted(groups, key=lambda group: places[group][sides[0]][0])
        number = {group: position for position, group in enumerate(order)}
        channels = {side: np.array([places[group][side] for group in order]) for side in sides}
        parts = {
            frozenset(number[group] for group in tensor)
            for tensor in tensors
            if len(tensor) < len(groups) and all(group in number for group in tensor)
        }
        return Dimension(channels, tuple(sorted(parts, key=sorted)))

    def pinned(self) -> list[Refusal]:
        """Return one refusal for each layer with output channels that can never be removed, with the first reason."""
        found = []
        for linear in self.linears:
            fixed = self.groups.fixed[self.groups.of[linear.outputs]]
            if fixed.any() and not linear.is_depthwise:
                why = self.groups.reason(linear.outputs[fixed]) or "its channels are pinned"
                count = "all" if fixed.all() else f"{int(fixed.sum())} of {len(fixed)}"
                found.append(Refusal(WHAT, linear.node.name, f"{count} output channels stay: {why}"))
        return found

    def plan_of(self, removed: Iterable[tuple[Dimension, Sequence[int]]]) -> PruningPlan:
        """Return the plan that removes groups of dimensions, by their numbers."""
        found: dict[LayerSide, set[int]] = {}
        for dimension, groups in removed:
            for side, channels in dimension.channels.items():
                found.setdefault(side, set()).update(channels[list(groups)].reshape(-1).tolist())
        partial = PruningPlan({side: tuple(sorted(each)) for side, each in found.items() if each})
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
                why = self.groups.reason(ids[list(channels)][self.groups.fixed[groups]]) or "it has no rule"
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
    return Dependencies(trace.ids.groups(), ids, tuple(trace.cuts), tuple(trace.linears))


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
