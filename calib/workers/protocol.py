"""Protocol between the main process and its workers: messages on pipes, and shared memory.

Messages are pickled tuples after their length, on pipes. Large data is in anonymous files that both have open: the
models, and a tray for each sample in flight. Nothing is left on disk, however the processes end.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np

from sbonnx.calib.data import Feed
from sbonnx.calib.engine.sample_runner import Key, Wish
from sbonnx.calib.engine.session import SessionModel
from sbonnx.spec import Array

ALIGNMENT: Final = 64
"""Alignment of arrays in bytes, for vector instructions."""

LENGTH: Final = 8
"""Size in bytes of the length field of a message."""

SLACK: Final = 1 << 16
"""Trays grow by multiples of this many bytes."""


@dataclass(frozen=True)
class WorkerPiece:
    """The part of a `Segment` that a worker needs; `name` is for messages."""

    outputs: tuple[str, ...]
    observed: tuple[str, ...]
    conditions: tuple[tuple[str, bool], ...]
    reads: tuple[str, ...]
    name: str


@dataclass(frozen=True)
class StoredModel:
    """Location of a `SessionModel` in the file of models.

    Attributes:
        content: (start, bytes).
        weights: (name, type, shape, start) of each.
    """

    content: tuple[int, int]
    weights: tuple[tuple[str, Any, tuple[int, ...], int], ...]
    level: str
    aliases: dict[str, str]


@dataclass(frozen=True)
class Job:
    """Work description for a worker.

    Attributes:
        pieces: segments in the order to run them.
        models: their models; None for a piece with nothing to run.
        wishes: what to observe.
        threads: samples at a time.
    """

    pieces: tuple[WorkerPiece, ...]
    models: tuple[StoredModel | None, ...]
    wishes: dict[Key, Wish]
    threads: int


@dataclass(frozen=True)
class Parcel:
    """A feed in a tray.

    Attributes:
        head: the pickled feed without the bytes of its arrays.
        places: (start, bytes) of each array.
        size: bytes of the tray.
    """

    head: bytes
    places: tuple[tuple[int, int], ...]
    size: int


def send(pipe: IO[bytes], message: tuple[Any, ...]) -> None:
    """Write a message to an unbuffered pipe.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
    """
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    rest = memoryview(len(data).to_bytes(LENGTH, "little") + data)
    while rest:
        rest = rest[pipe.write(rest) :]


def receive(pipe: IO[bytes]) -> tuple[Any, ...] | None:
    """Read the next message; None if the other side has closed the pipe."""
    length = _read(pipe, LENGTH)
    data = None if length is None else _read(pipe, int.from_bytes(length, "little"))
    if data is None:
        return None
    message: tuple[Any, ...] = pickle.loads(data)
    return message


def _read(pipe: IO[bytes], size: int) -> bytes | None:
    """Read `size` bytes; None if the pipe ends before."""
    data = bytearray()
    while len(data) < size:
        piece = pipe.read(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def nameless_file() -> IO[bytes]:
    """Create an anonymous file: in memory on Linux, else in the temporary folder."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("sbonnx"), "w+b", buffering=0)
    return tempfile.TemporaryFile(prefix="sbonnx-", buffering=0)


class Tray:
    """Shared memory for one feed at a time, writer side. Must be closed."""

    def __init__(self) -> None:
        self._file = nameless_file()
        self._size = 0
        self._bytes = np.zeros(0, np.uint8)

    @property
    def fd(self) -> int:
        """File descriptor, to be inherited."""
        return self._file.fileno()

    def fill(self, feed: Feed) -> Parcel:
        """Write a feed over the previous one. Arrays of Python objects are part of the message."""
        arrays = {name: np.asarray(x, order="C") for name, x in feed.items()}
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
        raws = [buffer.raw() for buffer in buffers]
        places, end = [], 0
        for raw in raws:
            places.append((end, raw.nbytes))
            end += _aligned(raw.nbytes)
        self._grow(end)
        for raw, (start, size) in zip(raws, places, strict=True):
            if size:
                np.copyto(self._bytes[start : start + size], np.frombuffer(raw, np.uint8))
        return Parcel(head, tuple(places), self._size)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._bytes = np.zeros(0, np.uint8)
        self._file.close()

    def _grow(self, size: int) -> None:
        """Ensure room for `size` bytes."""
        if size > self._size:
            self._size = -(-size // SLACK) * SLACK
            self._file.truncate(self._size)
            self._bytes = np.frombuffer(mmap.mmap(self.fd, self._size), np.uint8)


class TrayReader:
    """Reader side of a `Tray`, over the inherited file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = 0
        self._view = memoryview(b"")

    def take(self, parcel: Parcel) -> Feed:
        """Return the feed as read-only views, which change when the tray is filled again."""
        if parcel.size > self._size:
            self._size = parcel.size
            self._view = memoryview(mmap.mmap(self._fd, self._size, access=mmap.ACCESS_READ))
        buffers = [self._view[start : start + size] for start, size in parcel.places]
        feed: Feed = pickle.loads(parcel.head, buffers=buffers)
        return feed


def store(models: Sequence[SessionModel | None], file: IO[bytes]) -> tuple[StoredModel | None, ...]:
    """Write models to a file and return their locations. Weights that several models use are written once."""
    known: dict[int, int] = {}  # id of an array: its position
    return tuple(None if model is None else _store(model, file, known) for model in models)


def _store(model: SessionModel, file: IO[bytes], known: dict[int, int]) -> StoredModel:
    content = (_write(np.frombuffer(model.content, np.uint8), file), len(model.content))
    rows = []
    for name, values in model.weights.items():
        if id(values) not in known:
            known[id(values)] = _write(np.ascontiguousarray(values), file)
        rows.append((name, values.dtype, values.shape, known[id(values)]))
    return StoredModel(content, tuple(rows), model.level, dict(model.aliases))


def _write(values: Array, file: IO[bytes]) -> int:
    """Write an array at the next aligned position and return that."""
    start = _aligned(file.seek(0, os.SEEK_END))
    file.seek(start)
    rest = values.reshape(-1).view(np.uint8).data
    while rest:  # one call writes at most 2 GiB
        rest = rest[file.write(rest) :]
    return start


def load(stored: StoredModel, fd: int) -> SessionModel:
    """Load the model from the inherited file; its weights are memory-mapped, not read."""
    whole = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    start, size = stored.content
    weights: Mapping[str, Array] = {
        name: np.frombuffer(whole, kind, int(np.prod(shape, dtype=np.int64)), place).reshape(shape)
        for name, kind, shape, place in stored.weights
    }
    return SessionModel(whole[start : start + size], weights, stored.level, stored.aliases)


def _aligned(size: int) -> int:
    """Round `size` up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
