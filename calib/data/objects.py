"""Feeds from Python objects: arrays, dicts, lists, generators, DataLoaders, CalibrationDataReaders."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

import numpy as np

from sbonnx.calib.data.stored_arrays import lengths_of_feeds
from sbonnx.errors import DataError
from sbonnx.report.codes import Note


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
        notes: one sentence each about data that is not used.
    """

    name: str
    feeds: Callable[[], Iterator[tuple[str, Any]]]
    count: int | None = None
    at: Callable[[int], tuple[str, Any]] | None = None
    lengths: Callable[[], Sequence[int] | None] | None = None
    notes: tuple[Note, ...] = ()


def listed(
    name: str, count: int, at: Callable[[int], tuple[str, Any]], lengths: Callable[[], Sequence[int] | None] | None
) -> Source:
    """Return the source of `count` raw feeds with random access."""
    return Source(name, lambda: (at(number) for number in range(count)), count, at, lengths)


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
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


MAX_CACHED: Final = 4 * 2**30
"""Maximum bytes kept of an iterator that cannot be iterated twice."""


def open_object(data: Any, sampling: Sampling) -> Source:
    """Open the reader for a Python object.

    Objects that can be iterated repeatedly (list, Dataset, DataLoader, a reader with `rewind`) are iterated each time.
    Others (a generator, a CalibrationDataReader without `rewind`) are read once, immediately, and the feeds picked by
    `sampling` are kept in memory.

    Raises:
        DataError: the object provides no feeds, or they are too large to be kept.
    """
    kind = type(data).__name__
    if isinstance(data, Mapping):
        return listed("the feed", 1, lambda _: ("the feed", data), lambda: lengths_of_feeds([data]))
    if isinstance(data, np.ndarray) or hasattr(data, "detach"):
        return listed("the array", 1, lambda _: ("the array", data), lambda: lengths_of_feeds([data]))
    if callable(getattr(data, "get_next", None)):
        return _calibration_reader(data, sampling)
    if isinstance(data, (list, tuple)):
        return _of_list(f"the {kind}", data)
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        called = "the result of calling it, " if callable(data) else ""
        raise DataError(
            f"a value of type {kind} gives no feeds: give {called}a folder of .npz, a list of dicts, a DataLoader"
        )
    start = iter(data)
    if start is data:
        return _cached(start, f"the {kind}", sampling)
    return Source(f"the {kind}", lambda: _numbered(iter(data)), _length(data))


def repeatable(data: Any, limit: int | None = None) -> Any:
    """Return `data`, or the first `limit` (None: all) feeds of an object that can be iterated only once.

    Raises:
        DataError: they are too large to be kept.
    """
    once = isinstance(data, Iterator) or (hasattr(data, "get_next") and not hasattr(data, "rewind"))
    return [feed for _, feed in open_object(data, Sampling(limit)).feeds()] if once else data


def _length(data: Any) -> int | None:
    """Return len(data), or None if it has none (an IterableDataset's loader raises TypeError)."""
    try:
        return len(data)
    except TypeError:
        return None


def _numbered(feeds: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    """Yield feeds with their position, for messages."""
    for number, feed in enumerate(feeds):
        yield f"feed {number}", _copied(feed)


def _copied(feed: Any) -> Any:
    """Return a copy of a feed: an iterator may write the next feed into the same arrays."""
    if isinstance(feed, Mapping):
        return {name: _copied(value) for name, value in feed.items()}
    if type(feed) in (list, tuple):
        return type(feed)(map(_copied, feed))
    if isinstance(feed, np.ndarray):
        return feed.copy()
    return feed.clone() if hasattr(feed, "clone") else feed


def _of_list(name: str, feeds: Sequence[Any], places: Sequence[int] | None = None) -> Source:
    """Return the source of feeds in memory; `places`: their original positions if some were left out."""

    def at(number: int) -> tuple[str, Any]:
        return f"feed {number if places is None else places[number]}", feeds[number]

    return listed(name, len(feeds), at, lambda: lengths_of_feeds(feeds))


def _calibration_reader(reader: Any, sampling: Sampling) -> Source:
    """Return the source of an onnxruntime CalibrationDataReader: `get_next` returns feeds, then None."""
    rewind: Callable[[], None] | None = getattr(reader, "rewind", None)
    if not callable(rewind):
        return _cached(iter(reader.get_next, None), f"the {type(reader).__name__}", sampling)

    def walk() -> Iterator[tuple[str, Any]]:
        rewind()
        return _numbered(iter(reader.get_next, None))

    return Source(f"the {type(reader).__name__}", walk)


def _cached(feeds: Iterator[Any], name: str, sampling: Sampling) -> Source:
    """Read all feeds now and keep those picked by `sampling`."""
    kept: list[Any] = []
    places: list[int] = []
    for place, feed in sampling.kept(_within(feeds, name, sampling)):
        kept.append(feed)
        places.append(place)
    return _of_list(name, kept, places)


def _within(feeds: Iterator[Any], name: str, sampling: Sampling) -> Iterator[Any]:
    """Yield copies of the feeds; raise DataError if the picked ones exceed `MAX_CACHED`."""
    size = count = 0
    for feed in feeds:
        yield _copied(feed)
        size, count = size + _bytes(feed), count + 1
        share = 1.0 if not sampling.by_chance or sampling.limit is None else min(1.0, sampling.limit / count)
        if size * share > MAX_CACHED:
            raise DataError(
                f"{name} can be walked only once and gave more than {MAX_CACHED >> 30} GiB, too much to keep: "
                "set a limit, or give a list, a folder of .npz or a DataLoader"
            )


def _bytes(feed: Any) -> int:
    if isinstance(feed, Mapping):
        return sum(_bytes(value) for value in feed.values())
    if isinstance(feed, (list, tuple)):
        return sum(_bytes(value) for value in feed)
    return int(getattr(feed, "nbytes", 64))
