"""Files of a cache folder: named arrays with a checksum, written atomically.

A process may be killed at any moment, and several may use a folder at once: a file is complete or does not exist. One
rule for damage: a file that is not exactly what was asked for is removed, and its content is computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from sbonnx.calib.sketches import Sketch
from sbonnx.errors import DataError, OutputError
from sbonnx.spec import Array
from sbonnx.system.input_files import read_regular

if sys.platform != "win32":
    import fcntl

FORMAT: Final = 3
"""Version of the files. 1 was a folder of other binary files, 2 an SQLite database."""

HEADER: Final = "calibration_cache.json"
"""Name of the file that says which model and data a folder belongs to."""

SKETCH: Final = ".sketch"
CHECKPOINT: Final = ".checkpoint"
ROUNDED: Final = ".rounded"
"""Suffixes of entries."""

LARGEST: Final = 1 << 40
"""Size limit in bytes of a file to read."""

ABANDONED: Final = 3600.0
"""Seconds after which an unfinished file is that of a killed process, on systems that cannot lock it."""

UNFINISHED: Final = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
"""Names of unfinished files."""

NARROW: Final = (np.uint8, np.uint16, np.uint32)
"""Types for storing int64 counts: the first one that holds them, in a quarter of the bytes or less."""

STORED: Final = frozenset("biuf")
"""Kinds of the types that can be stored."""


def file_name(binding: str, suffix: str, *parts: str) -> str:
    """Return the name of an entry: parts of digests, which the entry repeats in full."""
    return "-".join([binding[:16], *(part[:32] for part in parts)]) + suffix


def write_file(path: Path, content: bytes) -> None:
    """Write a file that appears as a whole and replaces an existing one.

    It is not flushed to the disk: after a power failure its checksum is wrong, and its content is computed again.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        temporary, file = _create_locked(path)
        try:
            with file:
                file.write(content)
                if sys.platform == "win32":  # an open file cannot be renamed
                    file.close()
                else:
                    file.flush()
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"'{path}' cannot be written: {error.strerror or error}") from error


def _create_locked(path: Path) -> tuple[Path, IO[bytes]]:
    """Create an unfinished file that is locked (flock) until it is closed, or until its process ends."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        file = temporary.open("xb")
        if _locked(file) is not False and os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # `remove_abandoned` of another process came between


def _locked(file: IO[bytes]) -> bool | None:
    """Lock an open file; False if another process holds the lock, None if files cannot be locked here."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def write_entry(path: Path, identity: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write arrays of any built-in numpy type except object, and what they are.

    Raises:
        OutputError: the file cannot be written.
    """
    layout, pieces = [], []
    for name, values in arrays.items():
        stored = _narrow(values)
        layout.append([name, values.dtype.str, stored.dtype.str, list(values.shape)])
        pieces.append(stored.tobytes())
    content = json.dumps([identity, layout]).encode() + b"\n" + b"".join(pieces)
    write_file(path, hashlib.sha256(content).digest() + content)


def read_entry(path: Path, identity: Mapping[str, Any]) -> dict[str, Array] | None:
    """Return the arrays of an entry; None if it does not exist, or is damaged, or is another one.

    Arrays that were not narrowed are read-only views of the content.

    Raises:
        DataError: the system cannot read it.
    """
    try:
        content = read_regular(path, LARGEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"'{path}' of the calibration cache cannot be read: {error.strerror or error}") from error
    try:
        if hashlib.sha256(memoryview(content)[32:]).digest() != content[:32]:
            return None
        end = content.index(b"\n", 32)
        stored_identity, layout = json.loads(content[32:end])
        if stored_identity != identity:
            return None
        return _unpacked(layout, content, end + 1)
    except (ValueError, TypeError, LookupError, RecursionError):  # not written by `write_entry`
        return None


def _unpacked(layout: Iterable[Any], content: bytes, at: int) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for name, kind, stored, shape in layout:
        if {np.dtype(kind).kind, np.dtype(stored).kind} - STORED or any(length < 0 for length in shape):
            raise ValueError(f"{kind} {shape} is not a stored array")
        values = np.frombuffer(content, stored, prod(shape), at).reshape(shape)
        arrays[name] = values.astype(kind, copy=False)
        at += values.nbytes
    return arrays


def _narrow(values: Array) -> Array:
    """Convert non-negative int64 to the smallest unsigned type that holds all values."""
    if values.dtype != np.int64 or not values.size or values.min() < 0:
        return values
    highest = values.max()
    return next((values.astype(kind) for kind in NARROW if highest <= np.iinfo(kind).max), values)


def remove_files(paths: Iterable[Path]) -> None:
    """Remove entries; those that are missing or cannot be removed are left out: nothing depends on their absence."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def remove_abandoned(folder: Path) -> None:
    """Remove unfinished files of killed processes: those that no process has locked.

    Where there are no locks, age decides: see `ABANDONED`.
    """
    with suppress(OSError):
        for path in [path for path in folder.iterdir() if UNFINISHED.fullmatch(path.name)]:
            with suppress(OSError), path.open("r+b") as file:
                locked = _locked(file)
                if locked or (locked is None and time.time() - os.fstat(file.fileno()).st_mtime > ABANDONED):
                    path.unlink()


def sketch_of(arrays: Mapping[str, Array] | None) -> Sketch | None:
    """Return the sketch of the arrays of an entry; None if they are none."""
    if arrays is None:
        return None
    try:
        return Sketch.from_arrays(arrays)
    except (ValueError, TypeError, LookupError):
        return None


def merge_folders(parts: Iterable[Path], target: Path) -> None:
    """Merge the complete sketches of caches of parts of the data, key by key, into the cache `target`.

    Entries that exist in `target` stay. A sketch that some part lacks is left out.

    Raises:
        OutputError: `target` cannot be written.
    """
    first, *others = parts
    for path in sorted(first.glob(f"*{SKETCH}")):
        if (target / path.name).exists():
            continue
        identity = _identity(path)
        sketches = [sketch_of(read_entry(part / path.name, identity)) for part in (first, *others)]
        whole = sketches[0]
        if whole is None or None in sketches:
            continue
        for sketch in sketches[1:]:
            whole.merge(sketch)  # type: ignore[arg-type]  # none of them is None
        _adopt(first / HEADER, target)
        write_entry(target / path.name, identity, whole.to_arrays())


def _identity(path: Path) -> dict[str, Any]:
    """Return what an entry says that it is; empty if it cannot be read."""
    try:
        identity: dict[str, Any] = json.loads(path.read_bytes()[32:].split(b"\n", 1)[0])[0]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return {}
    return identity


def _adopt(header: Path, target: Path) -> None:
    """Copy the header of a cache to a folder without one, which is created."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        content = header.read_bytes()
    except OSError as error:
        raise OutputError(f"'{target}' cannot be made from '{header}': {error.strerror or error}") from error
    if not (target / HEADER).exists():
        write_file(target / HEADER, content)
