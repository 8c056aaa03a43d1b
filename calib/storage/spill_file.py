"""`SpillFile`: arrays in one anonymous file, written and read by several threads at once."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import threading
import time
from bisect import bisect_left, insort
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.errors import OutputError
from sbonnx.spec import Array

PREFIX: Final = "sbonnx-spill-"
"""Prefix of the file's name, on systems where it needs one."""

STALE_SECONDS: Final = 3600.0
"""Seconds without a write after which a named file is stale: its process was killed."""

PAGE: Final = 4096
"""Alignment of arrays in the file: writing to a shared page would read it first."""

WRITE_RATE: Final = 490e6
READ_RATE: Final = 4.6e9
"""Bytes per second of a plain SSD and of a cached file, assumed until rates were measured."""

MEASURED_BYTES: Final = 8 << 20
"""Bytes after which the measured rate is used."""

IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})


def spill_folder() -> Path:
    """Return the folder for spill files: the system's temporary folder, or /var/tmp if that one is in memory.

    TMPDIR (TEMP, TMP) always takes precedence.
    """
    usual = Path(tempfile.gettempdir())
    if any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")) or file_system(usual) not in IN_MEMORY:
        return usual
    other = Path("/var/tmp")
    return other if os.access(other, os.W_OK) and file_system(other) not in IN_MEMORY else usual


def file_system(folder: Path, table: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the file system type of `folder` from the system's mount table; None if there is no table."""
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return None
    longest: tuple[int, str | None] = (-1, None)
    for line in lines:
        fields = line.split()
        if len(fields) > 2 and folder.resolve().is_relative_to(fields[1].replace("\\040", " ")):
            longest = max(longest, (len(fields[1]), fields[2]), key=lambda pair: pair[0])
    return longest[1]


def sweep(folder: Path) -> None:
    """Remove the named spill files of ended processes. Only Windows keeps the name while a file is open.

    Other users may write to the folder: links, and files of other users, are not touched.
    """
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # open elsewhere, or removed by another process at this moment
            status = path.lstat()
            own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
            if own and stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > STALE_SECONDS:
                path.unlink()


class _Places:
    """Allocator of places in a file: best fit, else at its end. Adjacent gaps are joined."""

    def __init__(self) -> None:
        self.end = 0
        self._sizes: dict[int, int] = {}  # start of a gap: its size
        self._starts: dict[int, int] = {}  # end of a gap: its start
        self._sorted: list[tuple[int, int]] = []  # (size, start) of every gap

    def take(self, size: int) -> int:
        """Allocate a place and return its start."""
        at = bisect_left(self._sorted, (size, -1))
        if at == len(self._sorted):
            self.end += size
            return self.end - size
        gap, start = self._sorted[at]
        self._remove(start)
        if gap > size:
            self._add(start + size, gap - size)
        return start

    def give(self, start: int, size: int) -> None:
        """Free a place."""
        before = self._starts.get(start)
        if before is not None:
            size += self._remove(before)
            start = before
        if start + size in self._sizes:
            size += self._remove(start + size)
        if start + size == self.end:
            self.end = start
        else:
            self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        self._sizes[start] = size
        self._starts[start + size] = start
        insort(self._sorted, (size, start))

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[start + size]
        del self._sorted[bisect_left(self._sorted, (size, start))]
        return size


class _Meter:
    """Transfer rate in bytes per second, measured or assumed."""

    def __init__(self, assumed: float) -> None:
        self._assumed = assumed
        self._bytes = 0
        self._seconds = 0.0

    def add(self, count: int, seconds: float) -> None:
        """Add a transfer of `count` bytes."""
        self._bytes += count
        self._seconds += seconds

    @property
    def rate(self) -> float:
        """Bytes per second."""
        if self._bytes < MEASURED_BYTES:
            return self._assumed
        return self._bytes / max(self._seconds, 1e-9)


class SpillFile:
    """Arrays on disk, in places that are reused. Reads and writes of different places run concurrently.

    On POSIX the file has no name, so it disappears with the process, even a killed one. On Windows the system deletes
    it when the process ends; a file left by a power failure is removed when the next one is opened.

    Arrays are read with `preadv` into new memory. Measured on 2 cores (SSD, ext4, cached): 7 GB/s for arrays of 4 MiB,
    the same into reused memory; memory maps give 11 to 15 GB/s there, the same at 256 KiB and half at 64 KiB. Writing
    is 0.4 to 0.6 GB/s, so reading is not the bottleneck of spilling. A map would also turn a disk failure into a signal
    and would show later writes over a freed place.

    Args:
        folder: folder of the file; None: see `spill_folder`.

    Raises:
        OSError: no file can be created there.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = spill_folder() if folder is None else folder
        sweep(self.folder)
        self._file: Any = tempfile.TemporaryFile(prefix=PREFIX, dir=self.folder, buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()
        self._places = _Places()
        self._busy = 0
        self._closed = False
        self._write_meter, self._read_meter = _Meter(WRITE_RATE), _Meter(READ_RATE)

    @property
    def size(self) -> int:
        """Bytes up to the end of the last place."""
        return self._places.end

    @property
    def write_rate(self) -> float:
        """Bytes per second of one thread, over all writes so far."""
        return self._write_meter.rate

    @property
    def read_rate(self) -> float:
        """Bytes per second of one thread, over all reads so far."""
        return self._read_meter.rate

    def write(self, array: Array) -> int:
        """Write `array` to a free place and return its start.

        Raises:
            OutputError: the disk is full.
        """
        # a view as bytes, because ml_dtypes arrays have no buffer interface
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with self._lock:
            self._enter()
            start = self._places.take(_pages(raw.nbytes))
        began = time.perf_counter()
        try:
            self._write_at(start, raw.data)
        except OSError as error:
            self.free(start, raw.nbytes)
            raise OutputError(
                f"no room for {raw.nbytes} bytes of activations in '{self.folder}' ({error.strerror}): "
                "point TMPDIR to a larger disk or raise the memory budget"
            ) from error
        finally:
            self._leave(self._write_meter, raw.nbytes, began)
        return start

    def read(self, start: int, size: int) -> Array:
        """Read the bytes of a place, uint8 (size,), into new memory.

        Raises:
            OutputError: the disk fails, or the file was changed.
        """
        raw = np.empty(size, np.uint8)
        with self._lock:
            self._enter()
        began = time.perf_counter()
        try:
            done = self._read_at(start, raw.data)
        except OSError as error:
            raise OutputError(
                f"activations cannot be read back from '{self.folder}' ({error.strerror}): point TMPDIR to another disk"
            ) from error
        finally:
            self._leave(self._read_meter, size, began)
        if done != size:
            raise OutputError(f"the file of activations in '{self.folder}' was cut short: point TMPDIR to another disk")
        return raw

    def free(self, start: int, size: int) -> None:
        """Free a place."""
        with self._lock:
            self._places.give(start, _pages(size))

    def close(self) -> None:
        """Free the disk space after pending reads and writes. Idempotent."""
        with self._lock:
            self._closed = True
            if not self._busy:
                self._file.close()

    def _enter(self) -> None:
        """Register a pending read or write; the lock is held."""
        if self._closed:
            raise ValueError("the tensor store is closed")
        self._busy += 1

    def _leave(self, meter: _Meter, size: int, began: float) -> None:
        """End a pending read or write.

        The last one after `close` closes the file; closing earlier could reuse its descriptor for another file.
        """
        seconds = time.perf_counter() - began
        with self._lock:
            meter.add(size, seconds)
            self._busy -= 1
            if self._closed and not self._busy:
                self._file.close()

    def _write_at(self, start: int, left: memoryview) -> None:
        if not hasattr(os, "pwrite"):
            with self._lock:
                self._file.seek(start)
                while len(left):
                    left = left[self._file.write(left) :]
            return
        while len(left):
            count = os.pwrite(self._file.fileno(), left, start)
            left, start = left[count:], start + count

    def _read_at(self, start: int, left: memoryview) -> int:
        """Fill `left` up to the end of the file; return the number of bytes read."""
        done = 0
        while done < len(left):
            if hasattr(os, "preadv"):
                count = os.preadv(self._file.fileno(), [left[done:]], start + done)
            else:
                with self._lock:
                    self._file.seek(start + done)
                    count = self._file.readinto(left[done:])
            if not count:
                break
            done += count
        return done


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
