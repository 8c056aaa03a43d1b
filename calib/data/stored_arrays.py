"""Arrays in .npy and .npz files: type and shape from the header, values on demand.

A .npz file of 3 MB can hold 3 GB of zeros: data that does not fit the model is rejected by its header.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np

from sbonnx.errors import DataError, MissingDataError, SbonnxError
from sbonnx.spec import Array
from sbonnx.system.input_files import check_regular, open_regular
from sbonnx.system.sizes import size_text

MOST_FILES: Final = 1000
"""Maximum number of files whose headers are read, at 0.2 ms each; for more files the number of batches is unknown."""


def lengths_of_files(paths: Sequence[Path]) -> list[int] | None:
    """Return the length of the first array with an axis in each .npy or .npz file; None if one of them has none."""
    if len(paths) > MOST_FILES:
        return None
    return _known(_length_in_file(path) for path in paths)


def lengths_of_feeds(feeds: Sequence[Any]) -> list[int] | None:
    """Return the length of the first array with an axis in each raw feed; None if one of them has no known shape."""
    return _known(map(_length, feeds))


def _known(lengths: Iterator[int | None]) -> list[int] | None:
    known_lengths = []
    for length in lengths:
        if length is None:
            return None
        known_lengths.append(length)
    return known_lengths


def _length(feed: Any) -> int | None:
    values = feed.values() if isinstance(feed, Mapping) else feed if isinstance(feed, (list, tuple)) else [feed]
    shapes = (getattr(value, "shape", None) for value in values)
    return next((int(shape[0]) for shape in shapes if shape), None)


def _length_in_file(path: Path) -> int | None:
    try:
        return _length(open_stored(path))
    except DataError:  # reported when the file is read
        return None


MAX_HEADER: Final = 16 << 10
"""Maximum length in bytes of an array header; numpy's own limit is 10,000 characters."""

MAX_MEMBERS: Final = 10_000
"""Maximum number of arrays in one .npz file, which is one feed."""

MAX_EMPTY: Final = 1 << 20
"""Maximum axis length of an array without values. Other arrays are limited by the size of their file."""

STRING_BYTES: Final = 64
"""Approximate memory of a short string in an array of Python objects."""

REASON_LENGTH: Final = 200
"""Maximum number of characters quoted from another library's message about a damaged file."""

METHODS: Final = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA})
"""Compression methods of zip files that every Python supports."""

_NPY: Final = b"\x93NUMPY"
_ZIP: Final = (b"PK\x03\x04", b"PK\x05\x06")
_READ_HEADER: Final[dict[tuple[int, int], Callable[..., Any]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # same as 2.0, except for field names
}


class _Header(NamedTuple):
    """Shape, dtype and order of a .npy header, and its length in bytes."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]
    length: int

    @property
    def size(self) -> int:
        """Bytes of the header and the values."""
        return self.length + prod(self.shape) * self.dtype.itemsize


class StoredArray:
    """Lazily read array in .npy format.

    Args:
        what: name in messages.
        start: opens it at its first byte.
        size: its bytes including the header, uncompressed.
    """

    def __init__(self, what: str, start: Callable[[], IO[bytes]], size: int) -> None:
        self._what = what
        self._start = start
        self._size = size
        self._keeps = 0
        self._kept: Array | None = None

    def keep(self, most: int) -> None:
        """Keep the values from the next `load` on, if they have at most `most` bytes: later ones return the same array.

        As with arrays that are given in memory, nothing writes to it.
        """
        self._keeps = most

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape from the header.

        Raises:
            DataError: the header cannot be read or is invalid.
        """
        return self._header.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type from the header; raises as `shape` does."""
        return self._header.dtype

    def load(self) -> Array:
        """Read the values.

        Raises:
            DataError: they cannot be read, or memory is too small for them.
        """
        if self._kept is not None:
            return self._kept
        needed = prod(self.shape) * (STRING_BYTES if self.dtype.kind in "SU" else self.dtype.itemsize)
        if needed > (memory := _machine_memory()):
            raise DataError(
                f"{self._what} holds {size_text(needed)}, more than the memory of this machine "
                f"({size_text(memory)}): cut it into several files"
            )
        header = self._header
        with _faults_of(self._what):
            if header.size <= len(self._head):
                flat = np.frombuffer(self._head[header.length : header.size], header.dtype)
                values: Array = flat.reshape(header.shape, order="F" if header.fortran_order else "C").copy()
            else:
                with self._start() as file:
                    values = np.lib.format.read_array(file, allow_pickle=False)
                    file.read(1)  # reads to the end of a zip member, which verifies its checksum
        if values.nbytes <= self._keeps:
            self._kept = values
        return values

    def first(self, count: int) -> Array:
        """Read at most `count` items of the first axis, and no more of the file where its order allows that.

        Raises:
            DataError: as `load`.
        """
        header = self._header
        if header.fortran_order or not header.shape or count >= header.shape[0]:
            return self.load()[:count]
        shape = (count, *header.shape[1:])
        with _faults_of(self._what), self._start() as file:
            file.read(header.length)
            content = file.read(prod(shape) * header.dtype.itemsize)
            values: Array = np.frombuffer(content, header.dtype, prod(shape)).reshape(shape).copy()
        return values

    @cached_property
    def _head(self) -> bytes:
        with _faults_of(self._what), self._start() as file:
            return file.read(MAX_HEADER)

    @cached_property
    def _header(self) -> _Header:
        header = _read_header(self._head, self._what)
        shape, dtype = header.shape, header.dtype
        if dtype.hasobject:
            reason = "it holds pickled objects, which are not read because they may run code; save plain arrays"
        elif (
            any(size < 0 for size in shape)
            or (not dtype.itemsize and prod(shape) > 0)
            or (0 in shape and max(shape) > MAX_EMPTY)  # would be cut into millions of batches
        ):
            reason = f"its header says {dtype} {shape}, which no array has; save it again"
        elif header.size > self._size:
            reason = f"it is cut off ({self._size} bytes, and its header says {header.size}); copy or save it again"
        else:
            return header
        raise DataError(f"{self._what} cannot be read: {reason}")


def _read_header(head: bytes, what: str) -> _Header:
    """Parse the header of a .npy file.

    Raises:
        DataError: the bytes are not a header, or of an unknown format version.
    """
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _READ_HEADER:
            raise ValueError(f"version {version[0]}.{version[1]} of the .npy format is not known")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers of Python 2: the warning is given when the values are read
            shape, fortran_order, dtype = _READ_HEADER[version](file)
    except Exception as error:  # numpy evaluates the text with `ast`: SyntaxError, RecursionError, MemoryError, ...
        raise DataError(f"{what} cannot be read: its header is damaged ({first_line(error)}); save it again") from error
    return _Header(tuple(shape), fortran_order, dtype, file.tell())


def open_stored(path: Path) -> StoredArray | dict[str, StoredArray]:
    """Open the array of a .npy file, or those of a .npz file by name.

    Raises:
        DataError: the file has another format, is truncated, holds no arrays, or has one twice.
    """
    what = f"'{path}'"
    with _faults_of(what):
        size = check_regular(path)
        with open_regular(path) as file:
            magic = file.read(len(_NPY))
    return _opened(what, magic, path, partial(open_regular, path), size)


def stored_in(content: bytes, what: str) -> StoredArray | dict[str, StoredArray]:
    """Open the content of such a file, as `open_stored` does."""
    return _opened(what, content[: len(_NPY)], io.BytesIO(content), lambda: io.BytesIO(content), len(content))


def _opened(
    what: str, magic: bytes, archive: Path | IO[bytes], start: Callable[[], IO[bytes]], size: int
) -> StoredArray | dict[str, StoredArray]:
    """Open the arrays of a file that begins with `magic`."""
    if magic == _NPY:
        return StoredArray(what, start, size)
    if not magic.startswith(_ZIP):
        cut_off = not magic or _NPY.startswith(magic) or any(magic_of_zip.startswith(magic) for magic_of_zip in _ZIP)
        reason = "it is empty or cut off" if cut_off else "it is no .npy or .npz file"
        raise DataError(f"{what} cannot be read: {reason}; save it with np.save or np.savez")
    with _faults_of(what):
        return _members(zipfile.ZipFile(archive), what)


def _members(archive: zipfile.ZipFile, what: str) -> dict[str, StoredArray]:
    """Return the arrays of a zip file, which is closed with the last of them."""
    if len(archive.infolist()) > MAX_MEMBERS:
        raise DataError(f"{what} holds {len(archive.infolist())} arrays, and a file is one feed: save one file a feed")
    arrays: dict[str, StoredArray] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name in arrays:
            raise DataError(f"{what} holds two arrays '{name}': save it again")
        arrays[name] = StoredArray(f"array '{name}' of {what}", partial(_open_member, archive, info), info.file_size)
    if not arrays:
        raise DataError(f"{what} holds no arrays: save it with np.savez(path, input_name=array)")
    return arrays


def _open_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    if info.flag_bits & 1:
        raise ValueError("it is encrypted; save it without a password")
    if info.compress_type not in METHODS:
        raise ValueError(f"it is compressed by method {info.compress_type} of zip; save it with np.savez_compressed")
    return archive.open(info)


@contextlib.contextmanager
def _faults_of(what: str) -> Iterator[None]:
    """Convert every error of reading a damaged file to a DataError of one line.

    zipfile, its decompressors and numpy have no common base class of errors.
    """
    try:
        yield
    except SbonnxError:
        raise
    except FileNotFoundError as error:
        raise MissingDataError(f"there is no file {what}: check the path of the data") from error
    except Exception as error:
        reason = first_line(error)
        if isinstance(error, MemoryError):
            reason = "there is not enough memory for it; cut it into several files"
        elif isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        elif isinstance(error, (zipfile.BadZipFile, EOFError)):
            reason = f"it is cut off or damaged ({reason}); copy or save it again"
        raise DataError(f"{what} cannot be read: {reason}") from error


def first_line(error: Exception) -> str:
    """Return the first line of another library's message about a damaged file."""
    return (str(error).splitlines() or [type(error).__name__])[0][:REASON_LENGTH]


def _machine_memory() -> int:
    """Return the physical memory of this machine in bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not POSIX
        return 1 << 62
