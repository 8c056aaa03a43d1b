"""Arrays on unnamed scratch files: many per file, mapped read-only, deleted when no longer referenced."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from typing import IO, Final, final

from sbonnx.graph.query import Array
from sbonnx.graph.storage.mapping import WeightBytes
from sbonnx.graph.storage.weights import (
    PACKED_BITS,
    SPILL_BYTES,
    Weights,
    array_chunks,
    byte_size,
    onnx_dtype,
    spill,
)

KEEP_BYTES: Final = 256 << 10
"""Arrays from this size on are moved to a file."""

SEGMENT_BYTES: Final = 256 << 20
"""Size of a file and of its map, which need one descriptor each, for any number of arrays."""

ALIGN: Final = 64
"""Arrays start at multiples of this, in bytes."""


@final
class Scratch:
    """Allocator of arrays on files, one after another. A file is deleted with its last array. Thread-safe."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._size = segment_bytes
        self._lock = threading.Lock()
        self._process = 0
        self._file: IO[bytes] | None = None
        self._descriptor = -1
        self._source = WeightBytes(b"")
        self._used = 0

    def place(self, values: Array) -> Weights:
        """Copy an array to a file.

        Args:
            values: any ONNX type except text.
        """
        kind = onnx_dtype(values.dtype)
        size = byte_size(kind, values.size)
        with self._lock:
            if self._process != os.getpid() or self._used + size > len(self._source):
                self._open(max(self._size, size))
            start = self._used
            self._used = -(-(start + size) // ALIGN) * ALIGN
            descriptor, source, file = self._descriptor, self._source, self._file
        at = start
        for chunk in array_chunks(values):
            at += _write(descriptor, chunk, at)
        del file  # it must stay open until here
        return Weights(source, start, kind, tuple(values.shape))

    def _open(self, size: int) -> None:
        """Open a new file. It is sparse: unused bytes take no disk space."""
        file = tempfile.TemporaryFile(prefix="sbonnx-")  # noqa: SIM115 - it outlives this call
        file.truncate(size)
        self._file, self._descriptor = file, file.fileno()
        self._source = WeightBytes(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._process, self._used = os.getpid(), 0


def _write(descriptor: int, chunk: bytes | memoryview, at: int) -> int:
    """Write a whole chunk at an offset of a file; return its length."""
    view = memoryview(chunk).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], at + done)
    return done


_SCRATCH: Final = Scratch()


def _is_small(values: Array) -> bool:
    """Whether an array stays in memory: on systems without positioned writes, all except very large ones."""
    least = KEEP_BYTES if hasattr(os, "pwrite") else SPILL_BYTES
    return values.nbytes < least or values.dtype.kind in "OUS"


def kept(values: Array) -> Array:
    """Return the values mapped from a scratch file if they are large; types that share bytes stay in memory."""
    if _is_small(values) or onnx_dtype(values.dtype) in PACKED_BITS:
        return values
    return _SCRATCH.place(values).load() if hasattr(os, "pwrite") else spill(values)


def kept_packed(values: Array) -> Array | Weights:
    """Return the values as `kept`; types that share bytes are packed on the file, and unpacked on every read."""
    if _is_small(values):
        return values
    if not hasattr(os, "pwrite"):
        return spill(values)
    placed = _SCRATCH.place(values)
    return placed if onnx_dtype(values.dtype) in PACKED_BITS else placed.load()
