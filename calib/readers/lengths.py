"""Lengths of the leading axis, told without reading values: for how many batches a split makes."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

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
        if path.suffix == ".npy":
            with open(path, "rb") as file:
                return _leading(file)
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    length = _leading(member)
                if length is not None:
                    return length
    except (OSError, ValueError, zipfile.BadZipFile):  # said in full when it is read
        return None
    return None


def _leading(file: IO[bytes]) -> int | None:
    """Of the array whose .npy form begins here; None without an axis."""
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in read:
        return None
    shape = read[version](file)[0]
    return int(shape[0]) if shape else None
