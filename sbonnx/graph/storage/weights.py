"""Weights in files: mapped when read, streamed when written, never entirely in memory.

A mapped file may be modified meanwhile: `WeightBytes` detects it. New large arrays are moved to unnamed scratch files.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, final

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues

from sbonnx.errors import ModelError
from sbonnx.spec import Array
from sbonnx.system.native import compiled

INLINE_BYTES: Final = 1024
"""Tensors up to this size are stored in the skeleton with their values: shape inference reads axes, shapes etc."""

SCRATCH_BYTES: Final = 256 << 10
"""Arrays from this size on are moved to a scratch file that many arrays share."""

SPILL_BYTES: Final = 64 << 20
"""Arrays from this size on are moved to a file each, if files cannot be shared."""

CHUNK_BYTES: Final = 16 << 20
"""Weights are written in pieces of this size."""

SEGMENT_BYTES: Final = 256 << 20
"""Size of a shared scratch file and of its map, which need one descriptor each, for any number of arrays."""

ALIGN: Final = 64
"""Arrays in a shared scratch file start at multiples of this, in bytes."""

_SMALL = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
PACKED_BITS: Final = {int(kind): _SMALL[name] for name, kind in TensorProto.DataType.items() if name in _SMALL}
"""Types whose elements share bytes in a file, lowest bits first; numpy uses one byte for each."""

pages: Final = compiled("sbonnx.graph._pages")


def numpy_dtype(onnx_type: int) -> np.dtype[Any]:
    """Return the numpy (or ml_dtypes) type of an ONNX element type; object for strings.

    Raises:
        ModelError: the installed onnx does not know the element type.
    """
    if onnx_type == TensorProto.STRING:
        return np.dtype(object)
    try:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(onnx_type))
    except KeyError:
        raise ModelError(
            f"element type {onnx_type} is not known to onnx {onnx.__version__}: install a newer onnx"
        ) from None


def onnx_dtype(dtype: Any) -> int:
    """Return the ONNX element type of a numpy (or ml_dtypes) type; object means string."""
    if isinstance(dtype, int):
        return dtype
    kind = np.dtype(dtype)
    if kind.kind in "OUS":
        return TensorProto.STRING
    return int(onnx.helper.np_dtype_to_tensor_dtype(kind))


def byte_size(onnx_type: int, elements: int) -> int:
    """Compute the number of bytes that `elements` values of a type take in a file."""
    if onnx_type in PACKED_BITS:
        return (elements * PACKED_BITS[onnx_type] + 7) // 8
    return elements * numpy_dtype(onnx_type).itemsize


class FileState(NamedTuple):
    """Identity of a file, and the properties that change when it is modified."""

    inode: tuple[int, int]
    size: int
    modified: int


def _state(status: os.stat_result) -> FileState:
    return FileState((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)


_MAPPED: Final[weakref.WeakSet[mmap.mmap]] = weakref.WeakSet()
"""Maps in use: arrays keep the map, and not the `WeightBytes` that they were loaded from."""


class WeightBytes:
    """Bytes that contain weights: a mapped file, or bytes in memory. The map lives as long as any weight in it.

    A file may be modified while it is mapped. Pages beyond a truncated end read as zeros (`_pages`), and
    `require_unchanged` detects it. Replacing the file by another one does not affect the map.
    """

    def __init__(self, buffer: mmap.mmap | bytes, path: Path | None = None, state: FileState | None = None) -> None:
        self.buffer = buffer
        self.path = path
        self.state = state
        if isinstance(buffer, mmap.mmap):
            _MAPPED.add(buffer)

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
        if now.inode == self.state.inode and now != self.state:
            raise ModelError(
                f"'{self.path}' was written to while it was read (it had {self.state.size} bytes, and has {now.size}): "
                "run again when it is complete"
            )


def guarded(buffer: mmap.mmap) -> mmap.mmap:
    """Make missing pages of a truncated file read as zeros. Without the C module, reading them crashes the process."""
    if pages is not None:
        start = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        pages.guard(start, len(buffer))
        weakref.finalize(buffer, pages.release, start).atexit = False
    return buffer


class MappedWeights(LazyValues):  # type: ignore[misc]
    """Values of a constant in a file. `load` maps them read-only; nothing is read before it is used."""

    def __init__(self, source: WeightBytes, offset: int, onnx_type: int, dims: tuple[int, ...]) -> None:
        self.source = source
        self.offset = offset
        self.onnx_type = onnx_type
        self.shape = dims
        self.dtype = numpy_dtype(onnx_type)
        elements = prod(dims)
        self.nbytes = elements * self.dtype.itemsize
        self.stored_bytes = byte_size(onnx_type, elements)

    def load(self) -> Array:
        """Return the values, shape `dims`: a view of the file; types that share bytes are unpacked."""
        self.source.require_unchanged()
        if self.onnx_type in PACKED_BITS:
            raw = memoryview(self.source.buffer)[self.offset : self.offset + self.stored_bytes]
            proto = TensorProto(data_type=self.onnx_type, dims=self.shape, raw_data=bytes(raw))
            values: Array = numpy_helper.to_array(proto)
            values.setflags(write=False)
            return values
        count = self.nbytes // self.dtype.itemsize
        flat: Array = np.frombuffer(self.source.buffer, self.dtype, count, self.offset)
        return flat.reshape(self.shape)

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield the stored bytes (from `start` to `stop`) in pieces; pages are released after use."""
        view = memoryview(self.source.buffer)
        end = self.offset + (self.stored_bytes if stop is None else stop)
        for first in range(self.offset + start, end, CHUNK_BYTES):
            last = min(first + CHUNK_BYTES, end)
            content = bytes(view[first:last])  # a copy: a system call that writes missing pages would fail
            self.source.require_unchanged()
            yield content
            _release_pages(self.source.buffer, first, last)


def _release_pages(buffer: mmap.mmap | bytes, first: int = 0, last: int | None = None) -> None:
    """Release mapped pages (those of the bytes from `first` to `last`): they are clean and can be read again."""
    if isinstance(buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        start = first - first % mmap.PAGESIZE
        buffer.madvise(mmap.MADV_DONTNEED, start, (len(buffer) if last is None else last) - start)


def release_pages() -> None:
    """Release the pages of all maps that were read: they do not count as memory of the process until read again."""
    for buffer in list(_MAPPED):
        _release_pages(buffer)


def array_chunks(values: Array) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an array as ONNX stores them (little-endian, sub-byte types packed), in pieces."""
    if onnx_dtype(values.dtype) in PACKED_BITS:
        yield bytes(numpy_helper.from_array(np.ascontiguousarray(values)).raw_data)
        return
    mapped: Any = values  # at the end: the map that `values` is a view of, or None
    while mapped is not None and not isinstance(mapped, mmap.mmap):
        mapped = mapped.obj if isinstance(mapped, memoryview) else getattr(mapped, "base", None)
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, CHUNK_BYTES):
        piece = flat[start : start + CHUNK_BYTES]
        yield piece.data if mapped is None else piece.tobytes()
        if mapped is not None:
            _release_pages(mapped)


def stored_bytes(values: Array | MappedWeights) -> int:
    """Return the number of bytes that the values take in a file."""
    if isinstance(values, MappedWeights):
        return values.stored_bytes
    return byte_size(onnx_dtype(values.dtype), values.size)


def chunks(values: Array | MappedWeights) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an array or of mapped weights, in pieces."""
    return values.chunks() if isinstance(values, MappedWeights) else array_chunks(values)


def spill(values: Array) -> Array:
    """Return the values mapped read-only from an unnamed scratch file, which is deleted with the array."""
    with tempfile.TemporaryFile(prefix="sbonnx-") as file:
        for chunk in array_chunks(values):
            file.write(chunk)
        file.flush()
        source = WeightBytes(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return MappedWeights(source, 0, onnx_dtype(values.dtype), values.shape).load()


@final
class ScratchFiles:
    """Allocator of arrays on unnamed files, one after another. A file is deleted with its last array. Thread-safe."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._size = segment_bytes
        self._lock = threading.Lock()
        self._process = 0
        self._file: IO[bytes] | None = None
        self._source = WeightBytes(b"")
        self._used = 0

    def place(self, values: Array) -> MappedWeights:
        """Copy an array to a file.

        Args:
            values: any ONNX type except text.
        """
        return self.place_chunks(array_chunks(values), onnx_dtype(values.dtype), values.shape)

    def place_chunks(
        self, chunks: Iterable[bytes | memoryview], onnx_type: int, dims: tuple[int, ...]
    ) -> MappedWeights:
        """Write the stored bytes of values of a type and shape, in pieces, to a file."""
        size = byte_size(onnx_type, prod(dims))
        with self._lock:
            if self._file is None or self._process != os.getpid() or self._used + size > len(self._source):
                file: IO[bytes] = tempfile.TemporaryFile(prefix="sbonnx-")  # noqa: SIM115 - it outlives this call
                file.truncate(max(self._size, size))  # sparse: unused bytes take no disk space
                self._file, self._process, self._used = file, os.getpid(), 0
                self._source = WeightBytes(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            start = self._used
            self._used = -(-(start + size) // ALIGN) * ALIGN
            source, file = self._source, self._file  # `file` must stay open until all is written
        at = start
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            while view:
                written = os.pwrite(file.fileno(), view, at)
                at, view = at + written, view[written:]
        return MappedWeights(source, start, onnx_type, tuple(dims))


_SCRATCH: Final = ScratchFiles()


def _is_small(values: Array) -> bool:
    """Whether an array stays in memory: on systems without positioned writes, all except very large ones."""
    least = SCRATCH_BYTES if hasattr(os, "pwrite") else SPILL_BYTES
    return values.nbytes < least or values.dtype.kind in "OUS"


def spill_large(values: Array) -> Array:
    """Return the values mapped from a scratch file if they are large; types that share bytes stay in memory."""
    if _is_small(values) or onnx_dtype(values.dtype) in PACKED_BITS:
        return values
    return _SCRATCH.place(values).load() if hasattr(os, "pwrite") else spill(values)


def spill_pieces(pieces: Iterable[Array], shape: tuple[int, ...]) -> Array:
    """Return bytes of a shape, mapped from a scratch file if they are many, so that one piece at a time is in memory.

    Args:
        pieces: uint8, slices of the result along its first axis, in order.
    """
    if prod(shape) < SCRATCH_BYTES or not hasattr(os, "pwrite"):
        return spill_large(np.concatenate(list(pieces)))
    written = (chunk for piece in pieces for chunk in array_chunks(piece))
    return _SCRATCH.place_chunks(written, onnx_dtype(np.uint8), shape).load()


def spill_packed(values: Array) -> Array | MappedWeights:
    """Move values as `spill_large`; types that share bytes are packed in the file, and unpacked on every read."""
    if _is_small(values):
        return values
    if not hasattr(os, "pwrite"):
        return spill(values)
    placed = _SCRATCH.place(values)
    return placed if onnx_dtype(values.dtype) in PACKED_BITS else placed.load()
