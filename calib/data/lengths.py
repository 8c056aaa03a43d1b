"""Lengths of the leading axis, read without the values, to count the batches of a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sbonnx.calib.data.stored_arrays import StoredArray, open_stored
from sbonnx.errors import DataError

MOST_FILES: Final = 1000
"""Maximum number of files whose headers are read, at 0.2 ms each; for more files the number of batches is unknown."""


def lengths_of_files(paths: Sequence[Path]) -> list[int] | None:
    """Return the length of the first array with an axis in each .npy or .npz file; None if one of them has none."""
    if len(paths) > MOST_FILES:
        return None
    return _all(_of_file(path) for path in paths)


def lengths_of_feeds(feeds: Sequence[Any]) -> list[int] | None:
    """Return the length of the first array with an axis in each raw feed; None if one of them has no known shape."""
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
    except DataError:  # reported when the file is read
        return None
