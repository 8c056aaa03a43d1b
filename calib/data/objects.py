"""Feeds from Python objects: arrays, dicts, lists, generators, DataLoaders, CalibrationDataReaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.lengths import lengths_of_feeds
from sbonnx.calib.data.sampling import Sampling
from sbonnx.calib.data.source import Source, listed
from sbonnx.errors import DataError

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
        raise DataError(f"a value of type {kind} gives no feeds: give a folder of .npz, a list of dicts, a DataLoader")
    start = iter(data)
    if start is data:
        return _cached(start, f"the {kind}", sampling)
    return Source(f"the {kind}", lambda: _numbered(iter(data)), _length(data))


def _length(data: Any) -> int | None:
    """Return len(data), or None if it has none (an IterableDataset's loader raises TypeError)."""
    try:
        return len(data)
    except TypeError:
        return None


def _numbered(feeds: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    """Yield feeds with their position, for messages."""
    for number, feed in enumerate(feeds):
        yield f"feed {number}", feed


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
    """Yield the feeds unchanged; raise DataError if the picked ones exceed `MAX_CACHED`."""
    size = count = 0
    for feed in feeds:
        yield feed
        size, count = size + _bytes(feed), count + 1
        share = 1.0 if not sampling.by_chance or sampling.limit is None else min(1.0, sampling.limit / count)
        if size * share > MAX_CACHED:
            raise DataError(
                f"{name} can be walked only once and gave more than {MAX_CACHED >> 30} GiB, too much to keep: "
                "set a limit, or give a list, a folder of .npz or a DataLoader"
            )


def _bytes(feed: Any) -> int:
    """Estimate the memory of one raw feed."""
    if isinstance(feed, Mapping):
        return sum(_bytes(value) for value in feed.values())
    if isinstance(feed, (list, tuple)):
        return sum(_bytes(value) for value in feed)
    return int(getattr(feed, "nbytes", 64))
