"""Digests of files and folders, cached by file stamp, so that unchanged files are not read again."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any, Final

from sbonnx.calib.cache.entries import write_file
from sbonnx.errors import OutputError
from sbonnx.graph.digests import combined, file_digest, text
from sbonnx.graph.storage.model_file import external_names

FILE: Final = "digests.json"
"""Cache file in the state folder: [size, mtime in ns, ctime in ns, inode, digest] by digest of the path."""

STAMP: Final = 4
"""Number of stamp values before the digest in an entry."""

SETTLED_NS: Final = 2_000_000_000
"""Minimum age of a change. A younger file may change again within the resolution of its timestamps."""

MISSING: Final = "missing"
"""Digest of a missing file; the step reports the error."""

NEWEST: Final = 100_000
"""Maximum number of cached files; the oldest entries are dropped."""


class Digests:
    """Digests by path. `save` writes the cache; concurrent instances are safe.

    Args:
        state: folder of the cache; None: no cache.
    """

    def __init__(self, state: Path | None = None) -> None:
        self._file = None if state is None else state / FILE
        self._known: dict[str, list[Any]] = self._read()
        self._fresh = False
        self.read = 0
        """Number of files whose content was read."""

    def of(self, path: Path) -> str:
        """Return the digest of a file's bytes, or of a folder: names and bytes of all visible files in it.

        Returns `MISSING` if there is nothing, it cannot be read, or it is not a regular file, because reading a FIFO
        or a device may block forever.
        """
        try:
            if path.is_dir():
                files = sorted((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
                visible = [(name, file) for name, file in files if not any(part.startswith(".") for part in name.parts)]
                parts = [f"{name.as_posix()} {self._of_file(file)}" for name, file in visible]
                return text(combined("folder", *(part.encode("utf-8", "surrogateescape") for part in parts)))
            return self._of_file(path)
        except (OSError, ValueError):  # ValueError: a path with a NUL character
            return MISSING

    def of_model(self, path: Path) -> str:
        """Return the digest of a model including its external data files; other files are digested by their bytes."""
        own = self.of(path)
        if own == MISSING or path.is_dir():
            return own
        parts = [f"{name} {self.of(path.parent / name)}" for name in self._beside(path, own)]
        return text(combined("model", own.encode(), *(part.encode("utf-8", "surrogateescape") for part in parts)))

    def external(self, path: Path) -> list[str]:
        """Return the names of a model's external data files, relative to its folder, whether or not they exist."""
        try:
            return self._beside(path, None)
        except (OSError, ValueError):
            return []

    def forget(self, path: Path) -> None:
        """Drop a file from the cache, so that it is read again."""
        self._fresh = self._known.pop(_name(path), None) is not None or self._fresh

    def save(self) -> None:
        """Write the cache. If the folder is not writable, the only cost is time in the next run."""
        if self._file is None or not self._fresh:
            return
        kept = dict(list(self._known.items())[-NEWEST:])
        with contextlib.suppress(OSError, OutputError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._file, json.dumps(kept).encode())
        self._fresh = False

    def _read(self) -> dict[str, list[Any]]:
        if self._file is None:
            return {}
        try:
            entries = json.loads(self._file.read_bytes())
        except (OSError, ValueError):  # missing or truncated: everything is read again
            return {}
        return entries if isinstance(entries, dict) else {}

    def _of_file(self, path: Path) -> str:
        stamp = _stamp(path)
        entry = self._entry(path, stamp)
        if entry is not None:
            return str(entry[STAMP])
        total = file_digest(path)
        self.read += 1
        digest = total.hex()
        if stamp == _stamp(path) and time.time_ns() - max(stamp[1:3]) > SETTLED_NS:
            self._keep(path, [*stamp, digest])
        return digest

    def _beside(self, path: Path, own: str | None) -> list[str]:
        """Return the names of a model's external data files, cached together with its digest."""
        entry = self._entry(path, _stamp(path))
        if entry is not None and len(entry) > STAMP + 1:
            return [str(name) for name in entry[STAMP + 1]]
        names = [name for name in external_names(path) if is_inside(name)]
        if entry is not None and entry[STAMP] == own:
            self._keep(path, [*entry[: STAMP + 1], names])
        return names

    def _entry(self, path: Path, stamp: list[int]) -> list[Any] | None:
        entry = self._known.get(_name(path))
        return entry if isinstance(entry, list) and len(entry) > STAMP and entry[:STAMP] == stamp else None

    def _keep(self, path: Path, entry: list[Any]) -> None:
        self._known.pop(_name(path), None)  # move to the end: the oldest entries are dropped first
        self._known[_name(path)] = entry
        self._fresh = True


def _name(path: Path) -> str:
    """Return the name of an entry. It is a digest, because paths may contain secrets."""
    return text(combined("path", os.fsencode(path.absolute())))


def is_inside(name: str) -> bool:
    """Return whether a relative name stays in its folder: not empty or absolute, without ".." and NUL."""
    pieces = Path(name).parts
    return bool(pieces) and not Path(name).is_absolute() and ".." not in pieces and "\0" not in name


def _stamp(path: Path) -> list[int]:
    """Return size, mtime, ctime and inode. Programs can reset mtime after a change, but not ctime.

    Raises:
        OSError: the path is not a regular file.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"'{path}' is not a regular file")
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
