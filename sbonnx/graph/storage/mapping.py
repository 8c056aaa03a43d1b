"""Memory maps of files that others may modify."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from sbonnx.errors import ModelError
from sbonnx.native import compiled

pages: Final = compiled("sbonnx.graph._pages")


class FileState(NamedTuple):
    """Identity of a file, and the properties that change when it is modified."""

    place: tuple[int, int]
    size: int
    written: int


class WeightBytes:
    """Bytes that contain weights: a mapped file, or bytes in memory. The map lives as long as any weight in it.

    A file may be modified while it is mapped. Pages beyond a truncated end read as zeros (`_pages`), and
    `require_unchanged` detects it. Replacing the file by another one does not affect the map.
    """

    def __init__(self, buffer: mmap.mmap | bytes, path: Path | None = None, state: FileState | None = None) -> None:
        self.buffer = buffer
        self.path = path
        self.state = state

    @classmethod
    def map(cls, path: Path) -> WeightBytes:
        """Map a file, read-only."""
        with open(path, "rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return cls(guarded(buffer), path.absolute(), _state(os.fstat(file.fileno())))

    def __len__(self) -> int:
        return len(self.buffer)

    def require_unchanged(self) -> None:
        """Check that the mapped file has not changed.

        Raises:
            ModelError: the file was modified.
        """
        if self.path is None or self.state is None:
            return
        try:
            now = _state(self.path.stat())
        except OSError:  # deleted, or not accessible: the map is unaffected
            return
        if now.place == self.state.place and now != self.state:
            raise ModelError(
                f"'{self.path}' was written to while it was read (it had {self.state.size} bytes, and has {now.size}): "
                "run again when it is complete"
            )


def _state(status: os.stat_result) -> FileState:
    return FileState((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)


def guarded(buffer: mmap.mmap) -> mmap.mmap:
    """Make missing pages of a truncated file read as zeros. Without the C module, reading them crashes the process."""
    if pages is not None:
        start = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        pages.guard(start, len(buffer))
        weakref.finalize(buffer, pages.release, start).atexit = False
    return buffer
