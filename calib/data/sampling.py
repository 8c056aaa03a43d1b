"""Selection of feeds: the first N, or a seeded random subset that is identical on every platform."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

Pick = Literal["first", "random"]

_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True)
class Sampling:
    """Selection of at most `limit` feeds (None: all): the first ones, or a random subset.

    A random pick keeps the feeds whose position has the smallest `rank`. It depends only on the seed and the positions,
    so it is the same in any process and version. Feeds appended at the end replace only as many as are picked among
    them.
    """

    limit: int | None = None
    pick: Pick = "first"
    seed: int = 0

    @property
    def by_chance(self) -> bool:
        """Whether the selection depends on the total number of feeds."""
        return self.pick == "random" and self.limit is not None

    def chosen(self, total: int) -> tuple[int, ...]:
        """Return the positions to use of `total` feeds, ascending. Memory: that of the result."""
        if self.limit is None or self.limit >= total:
            return tuple(range(total))
        if self.pick == "first":
            return tuple(range(self.limit))
        return tuple(sorted(heapq.nsmallest(self.limit, range(total), key=lambda place: rank(self.seed, place))))

    def kept(self, feeds: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Yield (position, feed) of the chosen feeds in order, in one pass that holds no more feeds than are chosen."""
        numbered = enumerate(feeds)
        if self.limit is None or self.pick == "first":
            yield from islice(numbered, self.limit)
            return
        heap: list[tuple[int, int, Any]] = []  # (-rank, position, feed): the largest rank is evicted first
        for place, feed in numbered:
            entry = (-rank(self.seed, place), place, feed)  # ranks are unique, so feeds are never compared
            if len(heap) < self.limit:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)
        yield from sorted(((place, feed) for _, place, feed in heap), key=lambda pair: pair[0])


def rank(seed: int, place: int) -> int:
    """Compute a pseudorandom 64-bit number for a position; no two positions have the same.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014,
    section 3; the constants are Stafford's variant 13), over the position plus the finaliser of the seed.
    """
    return _mix(place + _mix(seed))


def _mix(value: int) -> int:
    """Permute the 64-bit integers."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
