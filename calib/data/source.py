"""What every reader gives: raw feeds with the place they come from, as often as asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """Raw feeds that can be walked again and again.

    Attributes:
        name: for messages: a quoted path, or what kind of object it is.
        feeds: starts a walk over (where, raw feed).
        count: number of raw feeds, None when only a walk can tell.
        at: the n-th (where, raw feed) alone, for n below `count`; None where only a walk leads to it.
        lengths: length of the leading axis of every raw feed, where that is known without reading their values;
            None, or a result of None, where it is not.
    """

    name: str
    feeds: Callable[[], Iterator[tuple[str, Any]]]
    count: int | None = None
    at: Callable[[int], tuple[str, Any]] | None = None
    lengths: Callable[[], Sequence[int] | None] | None = None


def listed(
    name: str, count: int, at: Callable[[int], tuple[str, Any]], lengths: Callable[[], Sequence[int] | None] | None
) -> Source:
    """The source of `count` raw feeds that can be reached in any order."""
    return Source(name, lambda: (at(number) for number in range(count)), count, at, lengths)
