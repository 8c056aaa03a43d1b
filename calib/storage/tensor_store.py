"""`TensorStore`: reference-counted arrays within a memory budget; the rest is spilled to disk or recomputed."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.calib.storage.spill_file import READ_RATE, WRITE_RATE, SpillFile, spill_folder
from sbonnx.errors import OutputError
from sbonnx.options import parse_size
from sbonnx.spec import Array

COPY_RATE: Final = 8e9
"""Assumed rate of memory copies in bytes per second, until one was measured."""

RECENT_BYTES: Final = 128 << 20
"""Bytes after which earlier measurements are weighted by half."""

MEASURED_BYTES: Final = 8 << 20
"""Bytes after which the measured rate is used."""


@dataclass
class _Entry:
    """One stored array: in memory, in the spill file, or a function that recomputes it.

    Attributes:
        readers: number of releases until it is freed.
        reading: pending reads from the file; its place is not freed before they end.
        reads: keys that `make` reads.
    """

    readers: int
    dtype: Any = None
    shape: tuple[int, ...] = ()
    array: Array | None = None
    make: Callable[[], Array] | None = None
    start: int = 0
    size: int = 0
    reading: int = 0
    gone: bool = False
    reads: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class StoreCounters:
    """Contents and activity of a store, in bytes (`resident`, `spilled`, `lazy`, `peak_*`) and number of arrays.

    Attributes:
        resident: held in memory.
        spilled: held on disk.
        lazy: arrays to be recomputed.
        peak_resident, peak_spilled: the highest so far.
        spills: arrays written to disk.
        recomputed: arrays recomputed.
    """

    resident: int = 0
    spilled: int = 0
    lazy: int = 0
    peak_resident: int = 0
    peak_spilled: int = 0
    spills: int = 0
    recomputed: int = 0


class TensorStore:
    """Arrays by key, each freed after its last release. Thread-safe.

    An array that does not fit the budget goes to the spill file (see `SpillFile`); those already resident stay, which
    minimises disk reads for data that is iterated repeatedly in the same order.

        with TensorStore("2 GiB") as store:
            store.put(("conv1", 0), x, readers=2)
            y = store.get(("conv1", 0))
            store.release(("conv1", 0))

    The budget covers the arrays that the store holds in memory, each counted once with its `nbytes` from `put` to its
    last release, also while a caller holds it as well. It does not cover arrays that `get` reads from disk or
    recomputes (owned by the caller, one array per call), arrays being written to disk (owned by the caller until `put`
    returns), the system's cache of the spill file (freed when memory is short), or the contents of string arrays.

    Args:
        budget: bytes to hold in memory: a number, or text such as "2 GiB".
        folder: folder of the spill file; None: see `spill_folder`.
    """

    def __init__(self, budget: str | int = "2 GiB", *, folder: Path | None = None) -> None:
        self.budget = parse_size(budget)
        self._folder = folder
        self._entries: dict[Hashable, _Entry] = {}
        self._coming: set[Hashable] = set()  # keys whose arrays are being copied or written
        self._file: SpillFile | None = None
        self._lock = threading.Lock()
        self._now: dict[str, int] = asdict(StoreCounters())
        self._closed = False
        self._copied = 0  # bytes copied, and the seconds it took
        self._copying = 0.0

    def put(self, key: Hashable, array: Array, *, readers: int = 1, copy: bool = False) -> None:
        """Store `array` for `readers` releases; with zero readers it is not stored.

        Args:
            copy: the caller will overwrite the memory of `array`. Without it the store may hold the array itself (a
                view of a larger one is always copied, because it would keep all of that alive).

        Raises:
            ValueError: the key exists already.
            OutputError: the disk is full.
        """
        array = np.asarray(array)
        with self._lock:
            self._check_new(key)
            if readers < 1:
                return
            stays = array.dtype.kind in "OU" or self._now["resident"] + array.nbytes <= self.budget
            self._coming.add(key)
            if stays:
                self._count(resident=array.nbytes)
        entry = _Entry(readers, array.dtype, array.shape, size=array.nbytes)
        try:
            if stays:
                base = array.base
                more = isinstance(base, np.ndarray) and base.nbytes > array.nbytes  # a view keeps its base alive
                try:
                    entry.array = self._copy(array) if copy or more else array
                except MemoryError:  # the system has less than the budget
                    with self._lock:
                        self._count(resident=-array.nbytes)
                    stays = False
            if not stays:
                entry.start = self._spill_file().write(array)
        except BaseException:
            with self._lock:
                self._coming.discard(key)
                if stays:
                    self._count(resident=-array.nbytes)
            raise
        with self._lock:
            self._coming.discard(key)
            self._check_open()
            self._entries[key] = entry
            if not stays:
                self._count(spilled=array.nbytes, spills=1)

    def put_lazy(
        self,
        key: Hashable,
        make: Callable[[], Array],
        nbytes: int,
        readers: int = 1,
        *,
        reads: Sequence[Hashable] = (),
    ) -> None:
        """Store a function that computes an array instead of the array: each `get` calls it.

        Args:
            make: returns the same array every time, from any thread.
            nbytes: size of the array, for the counters.
            reads: keys that `make` reads: this entry counts as one more reader of each, until its own last release.

        Raises:
            ValueError: the key exists already.
        """
        with self._lock:
            self._check_new(key)
            if readers > 0:
                for read in reads:
                    self._entries[read].readers += 1
                self._entries[key] = _Entry(readers, make=make, size=nbytes, reads=tuple(reads))
                self._count(lazy=nbytes)

    def get(self, key: Hashable) -> Array:
        """Return the array: the one that was put, or a new one read from disk or recomputed. No release.

        Raises:
            KeyError: the key does not exist.
        """
        with self._lock:
            self._check_open()
            entry = self._entries[key]
            if entry.array is not None:
                return entry.array
            if entry.make is not None:
                self._count(recomputed=1)
            else:
                entry.reading += 1
        if entry.make is not None:
            return np.asarray(entry.make())
        try:
            raw = self._spill_file().read(entry.start, entry.size)
        finally:
            with self._lock:
                entry.reading -= 1
                self._free(entry)
        array: Array = raw.view(entry.dtype).reshape(entry.shape)
        return array

    def release(self, key: Hashable) -> None:
        """Release one reader; after the last one the array is freed.

        Raises:
            KeyError: the key does not exist.
        """
        with self._lock:
            self._release(key)

    def take(self, key: Hashable) -> Array:
        """Return the array and release one reader; the caller owns the array."""
        array = self.get(key)
        self.release(key)
        return array

    def drop(self, key: Hashable) -> None:
        """Free an array, whatever its remaining readers; no-op if the key does not exist."""
        with self._lock:
            if key in self._entries:
                self._forget(key)

    def fits(self, nbytes: int) -> bool:
        """Return whether an array of this size would stay in memory now."""
        return self._now["resident"] + nbytes <= self.budget

    def cheaper_to_recompute(self, seconds_to_make: float, nbytes: int, readers: int = 1) -> bool:
        """Return whether recomputing an array for each reader takes less time than keeping it.

            readers * seconds_to_make  <  nbytes / copy rate                                 if it fits the budget,
            readers * seconds_to_make  <  nbytes / write rate + readers * nbytes / read rate      if it does not

        The rates are those of this store (bytes per second of one thread: recent copies, all writes and reads); until 8
        MiB were measured, 8 GB/s, 490 MB/s and 4.6 GB/s. A copy is slowest when memory is touched for the first time:
        keeping less is then faster as well.
        """
        if self.fits(nbytes):
            measured = self._copied >= MEASURED_BYTES
            return readers * seconds_to_make < nbytes / (self._copied / self._copying if measured else COPY_RATE)
        file = self._file
        write, read = (WRITE_RATE, READ_RATE) if file is None else (file.write_rate, file.read_rate)
        return readers * seconds_to_make < nbytes / write + readers * nbytes / read

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def counters(self) -> StoreCounters:
        """Contents and activity of the store so far."""
        return StoreCounters(**self._now)

    def close(self) -> None:
        """Free all arrays and the disk space. Idempotent."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._now.update(resident=0, spilled=0, lazy=0)
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _copy(self, array: Array) -> Array:
        began = time.perf_counter()
        copied = np.array(array)
        seconds = time.perf_counter() - began
        with self._lock:
            if self._copied > RECENT_BYTES:  # copies to reused memory are much faster than to fresh memory
                self._copied, self._copying = self._copied // 2, self._copying / 2
            self._copied += array.nbytes
            self._copying += max(seconds, 1e-9)
        return copied

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the tensor store is closed")

    def _check_new(self, key: Hashable) -> None:
        self._check_open()
        if key in self._entries or key in self._coming:
            raise ValueError(f"'{key}' is in the store already")

    def _count(self, **changes: int) -> None:
        """Add to the counters; the lock is held."""
        now = self._now
        for name, change in changes.items():
            now[name] += change
        now["peak_resident"] = max(now["peak_resident"], now["resident"])
        now["peak_spilled"] = max(now["peak_spilled"], now["spilled"])

    def _release(self, key: Hashable) -> None:
        """Release one reader; the lock is held."""
        entry = self._entries[key]
        entry.readers -= 1
        if entry.readers < 1:
            self._forget(key)

    def _forget(self, key: Hashable) -> None:
        """Remove an entry and release the entries that it reads; the lock is held."""
        entry = self._entries.pop(key)
        entry.gone = True
        kind = "lazy" if entry.make is not None else "resident" if entry.array is not None else "spilled"
        self._count(**{kind: -entry.size})
        self._free(entry)
        for read in entry.reads:
            if read in self._entries:  # it may have been dropped explicitly
                self._release(read)

    def _free(self, entry: _Entry) -> None:
        """Free the place of a removed entry after its last pending read; the lock is held."""
        if entry.gone and not entry.reading and entry.array is None and entry.make is None and self._file is not None:
            self._file.free(entry.start, entry.size)

    def _spill_file(self) -> SpillFile:
        with self._lock:
            self._check_open()
            if self._file is None:
                try:
                    self._file = SpillFile(self._folder)
                except OSError as error:
                    where = self._folder or spill_folder()
                    raise OutputError(
                        f"activations past the memory budget cannot be kept in '{where}' ({error.strerror}): "
                        "point TMPDIR to a folder that can be written to, or raise the memory budget"
                    ) from error
                weakref.finalize(self, self._file.close)
            return self._file
