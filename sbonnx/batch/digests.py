"""Digests of files and folders, remembered while they do not change: a second run reads none of them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Any, Final

from sbonnx.graph.digests import combined, file_digest, text
from sbonnx.graph.storage.source import external_names

FILE: Final = "digests.json"
"""In the state folder: [size, mtime in ns, ctime in ns, inode, digest] by digest of the path."""

STAMP: Final = 4
"""Numbers of an entry before the digest."""

SETTLED_NS: Final = 2_000_000_000
"""A file that changed less than this before it was read may change once more without its time saying so."""

MISSING: Final = "missing"
"""The digest of what is not there: the step says so."""

NEWEST: Final = 100_000
"""Files that are remembered; the oldest entries go."""


class Digests:
    """Digests by path. Writes what it learned with `save`; several at once do no harm.

    Args:
        state: folder to remember in; None: nothing is remembered.
    """

    def __init__(self, state: Path | None = None) -> None:
        self._file = None if state is None else state / FILE
        self._known: dict[str, list[Any]] = self._read()
        self._fresh = False
        self.read = 0
        """Files whose bytes were read."""

    def of(self, path: Path) -> str:
        """The digest of a file's bytes, or of a folder: of the names and bytes of all visible files in it.

        `MISSING` where nothing is there, it cannot be read, or is no regular file: reading a FIFO or a device may never
        end.
        """
        try:
            if path.is_dir():
                parts = [f"{one.relative_to(path).as_posix()} {self._of_file(one)}" for one in _files(path)]
                return text(combined("folder", *(part.encode("utf-8", "surrogateescape") for part in parts)))
            return self._of_file(path)
        except (OSError, ValueError):  # ValueError: a path that holds a NUL
            return MISSING

    def of_model(self, path: Path) -> str:
        """The same of a model with the data files that it names; what is no model counts by its bytes."""
        own = self.of(path)
        if own == MISSING or path.is_dir():
            return own
        parts = [f"{name} {self.of(path.parent / name)}" for name in self._beside(path, own)]
        return text(combined("model", own.encode(), *(part.encode("utf-8", "surrogateescape") for part in parts)))

    def external(self, path: Path) -> list[str]:
        """Names, relative to its folder, of the data files that a model names, whether or not they are there."""
        try:
            return self._beside(path, None)
        except (OSError, ValueError):
            return []

    def forget(self, path: Path) -> None:
        """Have a file read again, whatever its stamp says."""
        self._fresh = self._known.pop(_name(path), None) is not None or self._fresh

    def save(self) -> None:
        """Remember. A folder that cannot be written to costs time at the next run and nothing else."""
        if self._file is None or not self._fresh:
            return
        kept = dict(list(self._known.items())[-NEWEST:])
        temporary = self._file.with_name(f".{FILE}.{secrets.token_hex(4)}.tmp")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(kept))
            os.replace(temporary, self._file)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
        self._fresh = False

    def _read(self) -> dict[str, list[Any]]:
        if self._file is None:
            return {}
        try:
            found = json.loads(self._file.read_bytes())
        except (OSError, ValueError):  # not there yet, or cut short: everything is read once more
            return {}
        return found if isinstance(found, dict) else {}

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
        """Names of the data files of a model: it is parsed once, where its digest is known."""
        entry = self._entry(path, _stamp(path))
        if entry is not None and len(entry) > STAMP + 1:
            return [str(name) for name in entry[STAMP + 1]]
        names = [name for name in external_names(path) if is_inside(name)]
        if entry is not None and entry[STAMP] == own:
            self._keep(path, [*entry[: STAMP + 1], names])
        return names

    def _entry(self, path: Path, stamp: list[int]) -> list[Any] | None:
        found = self._known.get(_name(path))
        return found if isinstance(found, list) and len(found) > STAMP and found[:STAMP] == stamp else None

    def _keep(self, path: Path, entry: list[Any]) -> None:
        self._known.pop(_name(path), None)  # to the end: the oldest go first
        self._known[_name(path)] = entry
        self._fresh = True


def _name(path: Path) -> str:
    """Name of an entry: paths may hold what must not be written down."""
    return text(combined("path", os.fsencode(path.absolute())))


def is_inside(name: str) -> bool:
    """Whether a relative name stays in its folder: not empty or absolute, without ".." and NUL."""
    pieces = Path(name).parts
    return bool(pieces) and not Path(name).is_absolute() and ".." not in pieces and "\0" not in name


def _stamp(path: Path) -> list[int]:
    """Size, mtime, ctime and inode. Programs can set mtime back after a change, but not ctime.

    Raises:
        OSError: the path names no regular file.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"'{path}' is not a regular file")
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _files(folder: Path) -> list[Path]:
    """Visible files of a folder and of those in it."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


__all__ = ["MISSING", "Digests", "is_inside"]
