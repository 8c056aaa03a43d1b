"""`TensorStore`: arrays with reference counts, within a memory budget, the rest on disk."""

from __future__ import annotations

import re
import tempfile
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np

from sbonnx.errors import OutputError, RecipeError
from sbonnx.spec import Array

UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_size(size: str | int) -> int:
    """Bytes of "2 GiB", "512MB", "1.5g" or a plain number.

    Raises:
        RecipeError: not a size, or negative.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", str(size).lower())
    if not found or found[2] not in UNITS:
        raise RecipeError(f"'{size}' is no size of memory; write '2 GiB', '512 MB' or a number of bytes")
    return int(float(found[1]) * UNITS[found[2]])


@dataclass
class _Entry:
    """One stored array: in memory, or its place in the spill file."""

    readers: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    array: Array | None
    offset: int = 0
    size: int = 0


@dataclass(frozen=True)
class StoreCounters:
    """What a store did, in bytes and pieces; `peak_*` are the highest so far."""

    resident: int = 0
    spilled: int = 0
    peak_resident: int = 0
    peak_spilled: int = 0
    spills: int = 0


class TensorStore:
    """Arrays by key, each released when its last reader is done. Safe to use from several threads.

    An array that no longer fits the budget goes to the spill file; those already resident stay, which
    for data walked again and again in the same order reads the least from disk. The file has no name (where the
    system allows that), so it vanishes with the process, even a killed one.

        with TensorStore("2 GiB") as store:
            store.put(("conv1", 0), x, readers=2)
            y = store.get(("conv1", 0))
            store.release(("conv1", 0))

    Args:
        budget: bytes to hold in memory: a number, or text such as "2 GiB".
        folder: where the spill file lies; None: the system's temporary folder.
    """

    def __init__(self, budget: str | int = "2 GiB", *, folder: Path | None = None) -> None:
        self.budget = parse_size(budget)
        self._folder = folder
        self._entries: dict[Hashable, _Entry] = {}
        self._file: IO[bytes] | None = None
        self._close_file: weakref.finalize[..., TensorStore] | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}  # offsets of freed places by size: activations repeat sizes exactly
        self._lock = threading.Lock()
        self._resident = self._spilled = self._peak_resident = self._peak_spilled = self._spills = 0
        self._closed = False

    def put(self, key: Hashable, array: Array, *, readers: int = 1) -> None:
        """Keep `array` for `readers` releases; with none it is not kept. The array is not copied while it is resident.

        Raises:
            ValueError: the key is taken.
            OutputError: the disk is full.
        """
        array = np.asarray(array)
        with self._lock:
            self._check_open()
            if key in self._entries:
                raise ValueError(f"'{key}' is in the store already")
            if readers < 1:
                return
            entry = _Entry(readers, array.dtype, array.shape, array)
            if array.dtype.kind not in "OU" and self._resident + array.nbytes > self.budget:
                self._spill(entry, array)
            else:
                self._resident += array.nbytes
                self._peak_resident = max(self._peak_resident, self._resident)
            self._entries[key] = entry

    def get(self, key: Hashable) -> Array:
        """The array; a fresh copy when it was spilled. Does not count as a release."""
        with self._lock:
            self._check_open()
            entry = self._entries[key]
            return entry.array if entry.array is not None else self._read(entry)

    def release(self, key: Hashable) -> None:
        """One reader is done; after the last the array is gone and its room free."""
        with self._lock:
            entry = self._entries[key]
            entry.readers -= 1
            if entry.readers > 0:
                return
            del self._entries[key]
            if entry.array is not None:
                self._resident -= entry.array.nbytes
            else:
                self._spilled -= entry.size
                self._free.setdefault(entry.size, []).append(entry.offset)

    def take(self, key: Hashable) -> Array:
        """`get`, then `release`."""
        array = self.get(key)
        self.release(key)
        return array

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def counters(self) -> StoreCounters:
        """What the store holds and did so far."""
        return StoreCounters(self._resident, self._spilled, self._peak_resident, self._peak_spilled, self._spills)

    def close(self) -> None:
        """Forget everything and free the disk. Twice is once."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._resident = self._spilled = 0
            if self._close_file is not None:
                self._close_file()
            self._file = None

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        """Guard against use after `close`."""
        if self._closed:
            raise ValueError("the tensor store is closed")

    def _spill(self, entry: _Entry, array: Array) -> None:
        """Write `array` to the file, at a free place of its size or at the end."""
        entry.array, entry.size = None, array.nbytes
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="sbonnx-", dir=self._folder, buffering=0)  # noqa: SIM115
                self._close_file = weakref.finalize(self, self._file.close)
            places = self._free.get(entry.size)
            entry.offset = places.pop() if places else self._end
            self._file.seek(entry.offset)
            # a view as bytes: ml_dtypes arrays have no buffer interface of their own
            left = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            while len(left):
                left = left[self._file.write(left) :]
        except OSError as error:
            where = self._folder or tempfile.gettempdir()
            raise OutputError(
                f"no room for {entry.size} bytes of activations in '{where}' ({error.strerror}): "
                "point TMPDIR to a larger disk or raise the memory budget"
            ) from error
        self._end = max(self._end, entry.offset + entry.size)
        self._spilled += entry.size
        self._peak_spilled = max(self._peak_spilled, self._spilled)
        self._spills += 1

    def _read(self, entry: _Entry) -> Array:
        """Read a spilled array back."""
        if self._file is None:
            raise ValueError("the tensor store is closed")
        raw = np.empty(entry.size, np.uint8)
        left = raw.data
        self._file.seek(entry.offset)
        while len(left):
            count = self._file.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise OutputError("the spill file of the activations was cut short: was the temporary folder emptied?")
            left = left[count:]
        return raw.view(entry.dtype).reshape(entry.shape)
