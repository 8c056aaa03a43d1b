"""Globs of files, as of `glob.glob(recursive=True)`, but `**` does not follow links: every search ends."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path


def matches(pattern: str, base: Path) -> Iterator[str]:
    """Absolute paths of the regular files that match, each once, in no order.

    `*`, `?` and `[...]` match within a name, `**` any folders; hidden names only match a pattern that begins with a
    dot.

    Args:
        base: folder that a relative pattern starts in.
    """
    parts = Path(pattern).parts
    start = Path(parts[0]) if Path(pattern).is_absolute() else Path(os.path.abspath(base))
    parts = parts[1:] if Path(pattern).is_absolute() else parts
    seen: set[tuple[str, int]] = set()
    left = [(str(start), 0)]
    while left:
        path, count = left.pop()
        place = (os.path.abspath(path), count)
        if place in seen:
            continue
        seen.add(place)
        if count < len(parts):
            left += _next(path, parts, count)
        elif os.path.isfile(path):
            yield place[0]


def _next(folder: str, parts: Sequence[str], count: int) -> Iterator[tuple[str, int]]:
    """Paths in a folder that match the next part of a pattern, with the number of parts that are matched then."""
    head, last = parts[count], count + 1 == len(parts)
    if head == "**":
        yield folder, count + 1
        for entry in _entries(folder):
            if not entry.name.startswith("."):
                if entry.is_dir(follow_symlinks=False):
                    yield entry.path, count
                elif last:
                    yield entry.path, count + 1
    elif not glob.has_magic(head):
        if os.path.lexists(os.path.join(folder, head)):
            yield os.path.join(folder, head), count + 1
    else:
        fits = re.compile(fnmatch.translate(os.path.normcase(head))).match
        for entry in _entries(folder):
            hidden = entry.name.startswith(".") and not head.startswith(".")
            if not hidden and fits(os.path.normcase(entry.name)) and (last or entry.is_dir()):
                yield entry.path, count + 1


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Entries of a folder; none of what cannot be listed."""
    try:
        with os.scandir(folder) as rows:
            return list(rows)
    except OSError:
        return []


__all__ = ["matches"]
