"""Files of sketches: packed arrays, written atomically and verified by a checksum.

sketches-<binding>-<sha256 of the content>.bin
{"format": 1, "head": {...}, "entries": [[key, [[name, type, stored type, shape], ...]], ...]}   \\n
array, array, ...                                       each aligned to 8 bytes
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
"""Types for storing int64 counts: the first one that holds them, in a quarter of the bytes or less.

Compression would save as much again, but costs 0.1 ms per sketch to write and 0.03 ms to read, a thousand times as long
as the disk takes; an .npz with one member per array costs 0.2 ms per sketch to read.
"""


STORED: Final = frozenset("biuf")
"""Kinds of the types that can be stored."""


@dataclass(frozen=True)
class Packed:
    """Packed arrays of one sketch.

    Attributes:
        layout: (name, type, type in the file, shape) of each array.
        payload: their bytes, each padded to a multiple of 8.
    """

    layout: tuple[tuple[str, str, str, tuple[int, ...]], ...]
    payload: bytes | memoryview

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Packed:
        """Pack arrays of any built-in numpy type except object."""
        layout, pieces = [], []
        for name, values in arrays.items():
            stored = _narrow(values)
            layout.append((name, values.dtype.str, stored.dtype.str, tuple(values.shape)))
            raw = stored.tobytes()
            pieces.append(raw + bytes(-len(raw) % ALIGNMENT))
        return cls(tuple(layout), b"".join(pieces))

    @property
    def size(self) -> int:
        """Size of the payload in bytes, computed from the layout.

        Raises:
            ValueError, TypeError: a type that is not stored, or an invalid shape.
        """
        total = 0
        for _, kind, stored, shape in self.layout:
            if {np.dtype(kind).kind, np.dtype(stored).kind} - STORED or any(length < 0 for length in shape):
                raise ValueError(f"no arrays are {kind} {shape}")
            total += -(-prod(shape) * np.dtype(stored).itemsize // ALIGNMENT) * ALIGNMENT
        return total

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name; those that were not narrowed are read-only views of the payload."""
        found: dict[str, Array] = {}
        at = 0
        for name, kind, stored, shape in self.layout:
            values = np.frombuffer(self.payload, stored, prod(shape), at).reshape(shape)
            found[name] = values.astype(kind, copy=False)
            at += values.nbytes + -values.nbytes % ALIGNMENT
        return found


def _narrow(values: Array) -> Array:
    """Convert non-negative int64 to the smallest unsigned type that holds all values."""
    if values.dtype != np.int64 or not values.size or values.min() < 0:
        return values
    highest = values.max()
    return next((values.astype(kind) for kind in NARROW if highest <= np.iinfo(kind).max), values)


def save_packed(folder: Path, stem: str, head: Mapping[str, Any], entries: Mapping[Any, Packed]) -> str:
    """Write `<stem>-<check>.bin`; equal contents have equal names.

    Args:
        head: metadata of the file, of JSON types.
        entries: packed sketches by key; keys of JSON types (tuples are read back as lists).

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
    """Read a file of `save_packed`: the head, and (key, packed) in order. None: damaged, or of another format.

    Raises:
        FileNotFoundError: it does not exist (any more).
        DataError: the system cannot read it.
    """
    content = read_whole(path)
    if hashlib.sha256(content).hexdigest()[:CHECK_DIGITS] != path.stem.rpartition("-")[2]:
        return None
    try:
        return _unpacked(content)
    except (ValueError, TypeError, KeyError, RecursionError):  # the digest is correct: not written by sbonnx
        return None


def _unpacked(content: bytes) -> tuple[dict[str, Any], list[tuple[Any, Packed]]] | None:
    """Parse the content of a sketch file; None for another format.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: invalid content.
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
    """Read a file of the cache, of at most `largest` bytes.

    Raises:
        FileNotFoundError: it does not exist (any more).
        DataError: it is not a regular file, is too large, or the system cannot read it.
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
    """Write a file atomically; replaces an existing one.

    A killed process leaves at most a hidden temporary file, which the next `sweep` finds unlocked and removes. The data
    is not synced to disk: if a loss of power truncates it, the checksum detects that on reading.

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
    """Yield a temporary file next to `path`, locked while it is written and renamed at the end."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115
        if _lock(file, wait=True) and not _gone(file):
            break
        file.close()  # a sweep removed it between creation and locking
    try:
        yield file
        file.flush()
        if sys.platform == "win32":  # Windows cannot rename an open file, and a sweep cannot remove it either
            file.close()
        move(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        file.close()


def sweep(folder: Path, prefixes: tuple[str, ...]) -> None:
    """Remove temporary files of killed processes; files that are being written are locked, and stay."""
    for path in folder.glob(".*.tmp"):
        if not path.name[1:].startswith(prefixes) or path.is_symlink() or not path.is_file():
            continue
        try:
            with open_regular(path) as file:
                if not _lock(file, wait=False):
                    continue
                if sys.platform != "win32":  # while it is locked, because its writer may be about to lock it
                    path.unlink(missing_ok=True)
            path.unlink(missing_ok=True)  # Windows cannot remove an open file
        except OSError:  # already removed, of another user, or open in another process: must stay
            continue


def _lock(file: IO[bytes], *, wait: bool) -> bool:
    """Lock a file until it is closed or the process ends; False if another process holds the lock."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by another process, or a file system without locks, where nothing is swept
        return wait
    return True


def _gone(file: IO[bytes]) -> bool:
    """Return whether a file was deleted since it was opened."""
    return sys.platform != "win32" and os.fstat(file.fileno()).st_nlink == 0
