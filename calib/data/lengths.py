"""Lengths of the leading axis, told without reading values: for how many batches a split makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sbonnx.calib.data.stored_arrays import StoredArray, open_stored
from sbonnx.errors import DataError

MOST_FILES: Final = 1000
"""Files whose headers are read, a fifth of a millisecond each; how many batches more files make is not told."""


def lengths_of_files(paths: Sequence[Path]) -> list[int] | None:
    """Of the first array with an axis in each .npy or .npz file; None where one of them does not tell."""
    if len(paths) > MOST_FILES:
        return None
    return _all(_of_file(path) for path in paths)


def lengths_of_feeds(feeds: Sequence[Any]) -> list[int] | None:
    """Of the first array with an axis in each raw feed; None where one of them has none that says its shape."""
    return _all(_of_feed(feed) for feed in feeds)


def _all(found: Any) -> list[int] | None:
    lengths = []
    for length in found:
        if length is None:
            return None
        lengths.append(length)
    return lengths


def _of_feed(feed: Any) -> int | None:
    values = feed.values() if isinstance(feed, Mapping) else feed if isinstance(feed, (list, tuple)) else [feed]
    shapes = (getattr(value, "shape", None) for value in values)
    return next((int(shape[0]) for shape in shapes if shape), None)


def _of_file(path: Path) -> int | None:
    try:
        stored = open_stored(path)
        arrays = [stored] if isinstance(stored, StoredArray) else stored.values()
        return next((array.shape[0] for array in arrays if array.shape), None)
    except DataError:  # said when it is read
        return None
