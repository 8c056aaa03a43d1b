"""Choices between ways to remove channels, made so that most channels can be removed.

A tensor whose ids vary along several axes can lose entries along one of them, since what remains must be rectangular:
the ids of each place along this axis are joined. So can a product of two activations lose its heads or its columns,
and a grouped convolution the same positions of each group or whole groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.channels.ids import Ids, varies
from sbonnx.report.codes import Reason
from sbonnx.spec import Array

ENOUGH: Final = 2
"""Groups that can be removed from which a preferred way is taken: one of them can go."""


@dataclass(frozen=True)
class Layout:
    """One way to remove channels.

    Attributes:
        rows: arrays of ids, int64 (groups, n); all ids of a row are removed together.
        pinned: arrays of ids that remain.
        why: reason for both.
        preferred: taken if it leaves at least `ENOUGH` groups, even if another way leaves more.
    """

    rows: tuple[Array, ...]
    why: Reason
    pinned: tuple[Array, ...] = ()
    preferred: bool = False


def rows_along(ids: Array, axis: int) -> Array:
    """Return ids as rows, one for each place along an axis, (length, n)."""
    return np.moveaxis(ids, axis, 0).reshape(ids.shape[axis], -1)


def layouts(ids: Array) -> tuple[Layout, ...]:
    """Return the ways in which a tensor can lose entries: along one of the axes that its ids vary along."""
    why = Reason("channels-on-several-axes", "channels along several axes are removed together with it")
    return tuple(Layout((rows_along(ids, axis),), why) for axis in varies(ids))


def choose(ids: Ids, choices: Iterable[Sequence[Layout]]) -> list[Layout]:
    """Make choices in order, each the way that leaves most groups under all constraints so far; the first if equal.

    Constraints of the chosen ways are added to `ids`.
    """
    pending = [options for options in choices if options]
    if not pending:
        return []
    groups = _Groups(ids)
    chosen = []
    for options in pending:
        scores = [groups.count(option) for option in options]
        order = [(min(score, ENOUGH), option.preferred, score) for score, option in zip(scores, options, strict=True)]
        taken = options[max(range(len(options)), key=lambda place: order[place])]
        groups.join(taken)
        for rows in taken.rows:
            ids.unite(rows[:, :1], rows, taken.why)
        for pins in taken.pinned:
            ids.pin(pins, taken.why)
        chosen.append(taken)
    return chosen


@dataclass(frozen=True)
class _Joined:
    """Groups of a layout: roots (n,), the first of those that each is joined with, and whether that is fixed (n,)."""

    roots: Array
    label: Array
    fixed: Array
    names: tuple[Array, ...]  # of the ids of each array of rows, places in `roots`


class _Groups:
    """Groups of ids under constraints that are added: a forest over the groups of `Ids`."""

    def __init__(self, ids: Ids) -> None:
        groups = ids.groups()
        self._of, self._fixed = groups.of, groups.fixed.copy()
        self._parent = np.arange(len(groups.fixed))

    def count(self, layout: Layout) -> int:
        """Return the number of groups that can be removed of the array of rows with most of them."""
        joined = self._joined(layout)
        firsts = [np.unique(joined.label[names[:, 0]]) for names in joined.names]
        return max(int((~joined.fixed[labels]).sum()) for labels in firsts)

    def join(self, layout: Layout) -> None:
        """Add the constraints of a layout."""
        joined = self._joined(layout)
        self._parent[joined.roots] = joined.roots[joined.label]
        self._fixed[joined.roots[joined.label]] = joined.fixed[joined.label]

    def _root(self, ids: Array) -> Array:
        roots = self._of[ids]
        while (self._parent[roots] != roots).any():
            roots = self._parent[roots]
        return roots

    def _joined(self, layout: Layout) -> _Joined:
        pieces = [self._root(ids) for ids in (*layout.rows, *layout.pinned)]
        roots, flat = np.unique(np.concatenate([piece.reshape(-1) for piece in pieces]), return_inverse=True)
        cuts = np.cumsum([piece.size for piece in pieces])[:-1]
        parts = np.split(flat.reshape(-1), cuts)
        names = [part.reshape(piece.shape) for part, piece in zip(parts, pieces, strict=True)]
        count = len(layout.rows)
        label = np.arange(len(roots))
        while True:
            before = label.copy()
            for rows in names[:count]:
                np.minimum.at(label, rows, np.broadcast_to(label[rows].min(axis=1, keepdims=True), rows.shape))
            if (label == before).all():
                break
        fixed = self._fixed[roots].copy()
        for pins in names[count:]:
            fixed[pins] = True
        every = np.zeros(len(roots), bool)
        np.logical_or.at(every, label, fixed)
        return _Joined(roots, label, every[label], tuple(names[:count]))
