"""Files that are mapped while others may write to them."""

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
    """A file as it was: which one it is, and what changes when it is written to."""

    place: tuple[int, int]
    size: int
    written: int


class WeightBytes:
    """The bytes behind weights: a mapped file, or bytes in memory. The map lives as long as any weight in it.

    A file may be written to while it is mapped. Pages that are gone read as zeros (`_pages`), and
    `require_unchanged` finds out; a file that is replaced by another one does not change the map.
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
        """That what was mapped is still there.

        Raises:
            ModelError: the file was written to.
        """
        if self.path is None or self.state is None:
            return
        try:
            now = _state(self.path.stat())
        except OSError:  # deleted, or out of reach: the map is what it was
            return
        if now.place == self.state.place and now != self.state:
            raise ModelError(
                f"'{self.path}' was written to while it was read (it had {self.state.size} bytes, and has {now.size}): "
                "run again when it is complete"
            )


def _state(status: os.stat_result) -> FileState:
    return FileState((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)


def guarded(buffer: mmap.mmap) -> mmap.mmap:
    """The map, whose pages read as zeros where its file was cut off. Without a compiler that ends the process."""
    if pages is not None:
        start = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        pages.guard(start, len(buffer))
        weakref.finalize(buffer, pages.release, start).atexit = False
    return buffer
