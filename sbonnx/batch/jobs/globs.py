"""File globs, like `glob.glob(recursive=True)`, except that `**` does not follow links, so every search terminates."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path


def matches(pattern: str, base: Path) -> Iterator[str]:
    """Yield the absolute paths of matching regular files, each once, in no particular order.

    `*`, `?` and `[...]` match within a name, `**` matches any folders. Hidden names only match a pattern that begins
    with a dot.

    Args:
        base: base folder of relative patterns.
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
    """Yield paths in a folder that match the next part of a pattern, with the number of parts matched so far."""
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
    """Return the entries of a folder; empty if it cannot be listed."""
    try:
        with os.scandir(folder) as rows:
            return list(rows)
    except OSError:
        return []


__all__ = ["matches"]
