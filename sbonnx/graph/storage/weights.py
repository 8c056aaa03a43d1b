"""Weights on disk: mapped when read, streamed when written, never entirely in memory."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from math import prod
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues

from sbonnx.errors import ModelError
from sbonnx.graph.query import Array
from sbonnx.graph.storage.mapping import WeightBytes

INLINE_BYTES: Final = 1024
"""Tensors up to this size are stored in the skeleton with their values: shape inference reads axes, shapes etc."""

SPILL_BYTES: Final = 64 << 20
"""New constants from this size on are moved to a scratch file."""

CHUNK_BYTES: Final = 16 << 20
"""Weights are written in pieces of this size."""

_SMALL = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
PACKED_BITS: Final = {int(kind): _SMALL[name] for name, kind in TensorProto.DataType.items() if name in _SMALL}
"""Types whose elements share bytes in a file, lowest bits first; numpy uses one byte for each."""


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


class Weights(LazyValues):  # type: ignore[misc]
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
            return _unpack(self)
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
            _forget_pages(self.source.buffer, first, last)


def _unpack(weights: Weights) -> Array:
    raw = memoryview(weights.source.buffer)[weights.offset : weights.offset + weights.stored_bytes]
    proto = TensorProto(data_type=weights.onnx_type, dims=weights.shape, raw_data=bytes(raw))
    values: Array = numpy_helper.to_array(proto)
    values.setflags(write=False)
    return values


def _forget_pages(buffer: mmap.mmap | bytes, first: int = 0, last: int | None = None) -> None:
    """Release mapped pages (those of the bytes from `first` to `last`): they are clean and can be read again."""
    if isinstance(buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        start = first - first % mmap.PAGESIZE
        buffer.madvise(mmap.MADV_DONTNEED, start, (len(buffer) if last is None else last) - start)


def _mapping(values: Array) -> mmap.mmap | None:
    """Return the map that an array is a view of, or None."""
    owner: Any = values
    while owner is not None and not isinstance(owner, mmap.mmap):
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return owner


def spill(values: Array) -> Array:
    """Return the values mapped read-only from an unnamed scratch file, which is deleted with the array."""
    with tempfile.TemporaryFile(prefix="sbonnx-") as file:
        for chunk in array_chunks(values):
            file.write(chunk)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if values.dtype.itemsize * values.size != len(mapped):  # sub-byte types are packed by array_chunks
        return Weights(WeightBytes(mapped), 0, onnx_dtype(values.dtype), values.shape).load()
    return np.frombuffer(mapped, values.dtype).reshape(values.shape)


def array_chunks(values: Array) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an array as ONNX stores them (little-endian, sub-byte types packed), in pieces."""
    if onnx_dtype(values.dtype) in PACKED_BITS:
        yield bytes(numpy_helper.from_array(np.ascontiguousarray(values)).raw_data)
        return
    mapped = _mapping(values)
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, CHUNK_BYTES):
        piece = flat[start : start + CHUNK_BYTES]
        yield piece.data if mapped is None else piece.tobytes()
        if mapped is not None:
            _forget_pages(mapped)


def stored_bytes(values: Array | Weights) -> int:
    """Return the number of bytes that the values take in a file."""
    if isinstance(values, Weights):
        return values.stored_bytes
    return byte_size(onnx_dtype(values.dtype), values.size)


def chunks(values: Array | Weights) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an array or of mapped weights, in pieces."""
    return values.chunks() if isinstance(values, Weights) else array_chunks(values)
