"""`Source`: raw feeds with their origin, as every reader provides them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """Raw feeds that can be iterated repeatedly.

    Attributes:
        name: for messages: a quoted path, or the type of the object.
        feeds: starts an iteration over (where, raw feed).
        count: number of raw feeds; None if only an iteration can tell.
        at: returns the n-th (where, raw feed), for n below `count`; None if it can only be reached by iteration.
        lengths: returns the length of the leading axis of every raw feed without reading values; None, or a result of
            None, if they are unknown.
    """

    name: str
    feeds: Callable[[], Iterator[tuple[str, Any]]]
    count: int | None = None
    at: Callable[[int], tuple[str, Any]] | None = None
    lengths: Callable[[], Sequence[int] | None] | None = None


def listed(
    name: str, count: int, at: Callable[[int], tuple[str, Any]], lengths: Callable[[], Sequence[int] | None] | None
) -> Source:
    """Return the source of `count` raw feeds with random access."""
    return Source(name, lambda: (at(number) for number in range(count)), count, at, lengths)
