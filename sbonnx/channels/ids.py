"""Channel ids, and the groups that constraints on them make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.report.codes import Reason
from sbonnx.spec import Array

FIXED: Final = 0
"""Id of all channels that take no part (cannot be scaled, or removed) from the start."""


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
    why: dict[int, Reason]

    def reason(self, ids: Array) -> Reason | None:
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
        self._pins: list[tuple[Array, Reason]] = []

    def fresh(self, shape: tuple[int, ...]) -> Array:
        """Allocate new distinct ids, int64 of `shape`."""
        size = int(np.prod(shape, dtype=np.int64))
        ids = np.arange(self._count, self._count + size, dtype=np.int64).reshape(shape)
        self._count += size
        return ids

    def unite(self, one: Array, other: Array, why: Reason) -> Array:
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

    def pin(self, ids: Array, why: Reason) -> None:
        """Mark these ids as fixed."""
        if ids.size:
            self._pins.append((np.unique(ids), why))

    def groups(self) -> ChannelGroups:
        """Compute groups from all constraints. Takes a few linear passes over the ids."""
        label = np.arange(self._count, dtype=np.int64)
        if self._pairs:
            left = np.concatenate([pair[0] for pair in self._pairs])
            right = np.concatenate([pair[1] for pair in self._pairs])
            while (label[left] != label[right]).any():
                low = np.minimum(label[left], label[right])
                np.minimum.at(label, label[left], low)
                np.minimum.at(label, label[right], low)
                while (label[label] != label).any():
                    label = label[label]
        of = np.unique(label, return_inverse=True)[1].reshape(-1).astype(np.int64)
        fixed = np.zeros(int(of.max()) + 1, bool)
        why: dict[int, Reason] = {}
        fixed[of[FIXED]] = True
        for ids, reason in self._pins:
            groups = np.unique(of[ids])
            fixed[groups] = True
            for group in groups.tolist():
                why.setdefault(group, reason)
        return ChannelGroups(of, fixed, why)


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
