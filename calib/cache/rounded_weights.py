"""Rounded weights of a run of weight reconstruction, kept in the calibration cache until the next run with others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, final

from sbonnx.calib.cache.sketch_cache import CalibrationCache
from sbonnx.calib.cache.sketch_database import (
    STORED,
    DamagedError,
    SketchRow,
    get_rows,
    pack,
    reading,
    unpack,
)
from sbonnx.spec import Array

PREFIX: Final = "rounding "
"""Beginning of the names of these runs in the database; checkpoints of sketches have names of digits."""

LARGEST: Final = 1_000_000_000
"""Bytes of a value in a database of SQLite, at most."""


@final
class RoundedWeights:
    """Arrays of the layers that a run has rounded, by key, in the database of a calibration cache.

    Opening it removes the layers of all other runs: the folder has those of one run at most. Rows have checksums and
    are bound to model, data and settings as sketches are; damaged ones are skipped and noted.

    Args:
        cache: of the model and the data.
        run: digest of everything else that the layers depend on.
        part: names the part of the model, if keys are unique only in it.

    Raises:
        OutputError: the folder cannot be written to.
    """

    def __init__(self, cache: CalibrationCache, run: str, part: str = "") -> None:
        self._cache, self._digest, self._part = cache, run, part
        self._store = cache.store
        self._run = PREFIX + run
        if not part:
            others = "run != ? AND substr(run, 1, ?) = ?"
            self._remove(others, (self._run, len(PREFIX), PREFIX))

    def part(self, name: str) -> RoundedWeights:
        """Return the layers of a part of the model."""
        return RoundedWeights(self._cache, self._digest, name)

    @property
    def notes(self) -> tuple[str, ...]:
        """Problems found in the cache."""
        return self._cache.notes

    def load(self, key: str) -> dict[str, Array] | None:
        """Return the arrays of a layer by name; None if it is not in the cache."""
        where, values = "binding = ? AND run = ? AND key = ?", (self._store.binding, self._run, self._key(key))
        try:
            with reading(self._store.path) as db:
                row = next(get_rows(db, where, values), _MISSING)
        except FileNotFoundError:
            return None
        except DamagedError:
            self._store.discard()
            return None
        if row is _MISSING:
            return None
        try:
            if row is not None:
                return unpack(row.layout, row.payload)
        except (TypeError, ValueError):
            pass  # noted below
        self._store.note_damage(1)
        return None

    def save(self, key: str, arrays: Mapping[str, Array]) -> None:
        """Store the arrays of a layer; those of a type or size that the database has not are left out as a whole.

        Raises:
            OutputError: the folder cannot be written to.
        """
        if any(values.dtype.kind not in STORED for values in arrays.values()):
            return
        if sum(values.nbytes for values in arrays.values()) >= LARGEST:
            return
        layout, payload = pack(arrays)
        self._store.write([SketchRow(self._store.binding, self._run, 0, 1, self._key(key), layout, payload)])

    def _key(self, key: str) -> str:
        return json.dumps([self._part, key])

    def _remove(self, where: str, values: tuple[object, ...]) -> None:
        try:
            with reading(self._store.path) as db:
                if db.execute(f"SELECT 1 FROM sketches WHERE {where} LIMIT 1", values).fetchone() is None:
                    return
        except (FileNotFoundError, DamagedError):
            return
        self._store.write([], delete=(where, values))


_MISSING: Final = SketchRow("", "", 0, 0, "", "", b"")
