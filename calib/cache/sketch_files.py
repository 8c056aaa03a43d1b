"""Files of sketches: packed arrays that appear whole or not at all, and prove that they are what was written.

sketches-<binding>-<sha256 of the content>.bin
{"format": 1, "head": {...}, "entries": [[key, [[name, type, stored type, shape], ...]], ...]}   \\n
array, array, ...                                       each from a multiple of 8 bytes on
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from sbonnx.errors import DataError, OutputError
from sbonnx.graph.storage.files import move
from sbonnx.input_files import open_regular
from sbonnx.spec import Array

if sys.platform != "win32":
    import fcntl

FORMAT: Final = 1

ALIGNMENT: Final = 8

CHECK_DIGITS: Final = 32
"""Hexadecimal digits of the content's sha256 at the end of a file's name."""

NARROW: Final = (np.uint8, np.uint16, np.uint32)
"""Counts are small: int64 arrays are stored in the first of these that holds them, a quarter of the bytes or less.

Deflating saves as much again and costs 0.1 ms a sketch to write and 0.03 ms to read, a thousand times what the disk
takes; one array a member of an .npz costs 0.2 ms a sketch to read.
"""


STORED: Final = frozenset("biuf")
"""Kinds of types of which arrays are stored."""


@dataclass(frozen=True)
class Packed:
    """The arrays of one sketch.

    Attributes:
        layout: (name, type, type in the file, shape) of each array.
        payload: their bytes, each padded to a multiple of 8.
    """

    layout: tuple[tuple[str, str, str, tuple[int, ...]], ...]
    payload: bytes | memoryview

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Packed:
        """`arrays`, packed; of any type of numpy's own but objects."""
        layout, pieces = [], []
        for name, values in arrays.items():
            stored = _narrow(values)
            layout.append((name, values.dtype.str, stored.dtype.str, tuple(values.shape)))
            raw = stored.tobytes()
            pieces.append(raw + bytes(-len(raw) % ALIGNMENT))
        return cls(tuple(layout), b"".join(pieces))

    @property
    def size(self) -> int:
        """Bytes of the payload by the layout.

        Raises:
            ValueError, TypeError: a type that is not stored, or a shape that no array has.
        """
        total = 0
        for _, kind, stored, shape in self.layout:
            if {np.dtype(kind).kind, np.dtype(stored).kind} - STORED or any(length < 0 for length in shape):
                raise ValueError(f"no arrays are {kind} {shape}")
            total += -(-prod(shape) * np.dtype(stored).itemsize // ALIGNMENT) * ALIGNMENT
        return total

    def arrays(self) -> dict[str, Array]:
        """The arrays by name; those that were not narrowed are read-only views of the payload."""
        found: dict[str, Array] = {}
        at = 0
        for name, kind, stored, shape in self.layout:
            values = np.frombuffer(self.payload, stored, prod(shape), at).reshape(shape)
            found[name] = values.astype(kind, copy=False)
            at += values.nbytes + -values.nbytes % ALIGNMENT
        return found


def _narrow(values: Array) -> Array:
    """The same integers in fewer bytes, where they are int64 and not negative."""
    if values.dtype != np.int64 or not values.size or values.min() < 0:
        return values
    highest = values.max()
    return next((values.astype(kind) for kind in NARROW if highest <= np.iinfo(kind).max), values)


def save_packed(folder: Path, stem: str, head: Mapping[str, Any], entries: Mapping[Any, Packed]) -> str:
    """Write `<stem>-<check>.bin`; the same content has the same name.

    Args:
        head: what to say of the whole, in JSON's types.
        entries: by key, in JSON's types (tuples are read back as lists).

    Returns:
        The name of the file.

    Raises:
        OutputError: the folder cannot be written to.
    """
    index = [[key, packed.layout, len(packed.payload)] for key, packed in entries.items()]
    line = json.dumps({"format": FORMAT, "head": head, "entries": index}).encode()
    first = line + b" " * ((-len(line) - 1) % ALIGNMENT) + b"\n"
    total = hashlib.sha256(first)
    for packed in entries.values():
        total.update(packed.payload)
    path = folder / f"{stem}-{total.hexdigest()[:CHECK_DIGITS]}.bin"
    write_whole(path, [first, *(packed.payload for packed in entries.values())])
    return path.name


def load_packed(path: Path) -> tuple[dict[str, Any], list[tuple[Any, Packed]]] | None:
    """What `save_packed` wrote: the head, and (key, packed) in order. None: the file is damaged or of another format.

    Raises:
        FileNotFoundError: it is not there (any more).
        DataError: the system cannot read it.
    """
    content = read_whole(path)
    if hashlib.sha256(content).hexdigest()[:CHECK_DIGITS] != path.stem.rpartition("-")[2]:
        return None
    try:
        return _unpacked(content)
    except (ValueError, TypeError, KeyError, RecursionError):  # with a digest that is right: not written by sbonnx
        return None


def _unpacked(content: bytes) -> tuple[dict[str, Any], list[tuple[Any, Packed]]] | None:
    """Parse the content of a sketch file; None for another format.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it says nothing that could be.
    """
    line, _, _ = content.partition(b"\n")
    found = json.loads(line)
    if found["format"] != FORMAT:
        return None
    view, at = memoryview(content), len(line) + 1
    entries = []
    for key, layout, size in found["entries"]:
        rows = tuple((name, kind, stored, tuple(shape)) for name, kind, stored, shape in layout)
        packed = Packed(rows, view[at : at + size])
        if packed.size != size or len(packed.payload) != size:
            raise ValueError(f"{size} bytes for arrays of {packed.size}")
        entries.append((key, packed))
        at += size
    return found["head"], entries


def read_whole(path: Path, largest: int | None = None) -> bytes:
    """Content of a file of the cache, of at most `largest` bytes.

    Raises:
        FileNotFoundError: it is not there (any more).
        DataError: it is no regular file, it is larger, or the system cannot read it.
    """
    try:
        with open_regular(path) as file:
            if largest is not None and os.fstat(file.fileno()).st_size > largest:
                raise DataError(f"'{path}' of the calibration cache has more than {largest} bytes: name another folder")
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"'{path}' of the calibration cache cannot be read: {error.strerror or error}") from error


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that appears under its name once it is complete, over one that is there.

    A process that is killed leaves at most a hidden temporary file, which the next `sweep` finds unlocked and removes.
    The data is not forced to the disk: what a loss of power cuts short, the checks of the readers find.

    Raises:
        OutputError: it cannot be written there.
    """
    try:
        with _temporary(path) as file:
            for piece in pieces:
                file.write(piece)
    except OSError as error:
        raise OutputError(f"'{path}' cannot be written: {error.strerror or error}") from error


@contextmanager
def _temporary(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path`, locked while it is written, renamed at the end."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115
        if _lock(file, wait=True) and not _gone(file):
            break
        file.close()  # a sweep came between the making and the locking
    try:
        yield file
        file.flush()
        if sys.platform == "win32":  # an open file has no other name there, and cannot be removed by a sweep either
            file.close()
        move(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        file.close()


def sweep(folder: Path, prefixes: tuple[str, ...]) -> None:
    """Remove temporary files that killed processes left; those that somebody is writing are locked, and stay."""
    for path in folder.glob(".*.tmp"):
        if not path.name[1:].startswith(prefixes) or path.is_symlink() or not path.is_file():
            continue
        try:
            with open_regular(path) as file:
                if not _lock(file, wait=False):
                    continue
                if sys.platform != "win32":  # while it is locked, for its writer may be about to lock it
                    path.unlink(missing_ok=True)
            path.unlink(missing_ok=True)  # no open file can be removed there
        except OSError:  # gone, of another user, or open in another process: not ours to remove
            continue


def _lock(file: IO[bytes], *, wait: bool) -> bool:
    """Lock a file until it is closed or the process ends; False where another holds it."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by another, or a file system without locks, where nothing is swept
        return wait
    return True


def _gone(file: IO[bytes]) -> bool:
    """Whether a file has lost its name since it was opened."""
    return sys.platform != "win32" and os.fstat(file.fileno()).st_nlink == 0
