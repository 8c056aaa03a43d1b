"""Feeds from Python objects: arrays, dicts, lists, generators, DataLoaders, CalibrationDataReaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import numpy as np

from sbonnx.calib.readers.source import Source
from sbonnx.errors import DataError

MAX_CACHED: Final = 4 * 2**30
"""Bytes of feeds that are kept of an iterator that cannot be walked twice."""


def open_object(data: Any, limit: int | None) -> Source:
    """The reader for a Python object.

    What can be walked again (list, Dataset, DataLoader, a reader with `rewind`) is walked anew each time. What cannot
    (a generator, a CalibrationDataReader without `rewind`) is walked once, at once, and kept in memory.

    Raises:
        DataError: it is nothing that gives feeds, or too large to be kept.
    """
    kind = type(data).__name__
    if isinstance(data, Mapping):
        return Source("the feed", lambda: iter([("the feed", data)]), 1)
    if isinstance(data, np.ndarray) or hasattr(data, "detach"):
        return Source("the array", lambda: iter([("the array", data)]), 1)
    if callable(getattr(data, "get_next", None)):
        return _calibration_reader(data, limit)
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise DataError(f"a value of type {kind} gives no feeds: give a folder of .npz, a list of dicts, a DataLoader")
    start = iter(data)
    if start is data:
        return _cached(islice(start, limit), f"the {kind}")
    return Source(f"the {kind}", lambda: _numbered(iter(data)), _length(data))


def _length(data: Any) -> int | None:
    """len(data), or None where it has none (an IterableDataset's loader raises TypeError)."""
    try:
        return len(data)
    except TypeError:
        return None


def _numbered(feeds: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    """Feeds with their place for messages."""
    for number, feed in enumerate(feeds):
        yield f"feed {number}", feed


def _calibration_reader(reader: Any, limit: int | None) -> Source:
    """An onnxruntime CalibrationDataReader: `get_next` gives feeds, then None."""
    rewind: Callable[[], None] | None = getattr(reader, "rewind", None)
    if not callable(rewind):
        return _cached(islice(iter(reader.get_next, None), limit), f"the {type(reader).__name__}")

    def walk() -> Iterator[tuple[str, Any]]:
        rewind()
        return _numbered(iter(reader.get_next, None))

    return Source(f"the {type(reader).__name__}", walk)


def _cached(feeds: Iterator[Any], name: str) -> Source:
    """Walk now, keep all."""
    kept: list[Any] = []
    size = 0
    for feed in feeds:
        kept.append(feed)
        size += _bytes(feed)
        if size > MAX_CACHED:
            raise DataError(
                f"{name} can be walked only once and gave more than {MAX_CACHED >> 30} GiB, too much to keep: "
                "set a limit, or give a list, a folder of .npz or a DataLoader"
            )
    return Source(name, lambda: _numbered(iter(kept)), len(kept))


def _bytes(feed: Any) -> int:
    """Memory that one raw feed holds, about."""
    if isinstance(feed, Mapping):
        return sum(_bytes(value) for value in feed.values())
    if isinstance(feed, (list, tuple)):
        return sum(_bytes(value) for value in feed)
    return int(getattr(feed, "nbytes", 64))
