"""What every reader gives: raw feeds with the place they come from, as often as asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """Raw feeds that can be walked again and again.

    Attributes:
        name: for messages: a quoted path, or what kind of object it is.
        feeds: starts a walk over (where, raw feed).
        count: number of raw feeds, None when only a walk can tell.
    """

    name: str
    feeds: Callable[[], Iterator[tuple[str, Any]]]
    count: int | None = None
