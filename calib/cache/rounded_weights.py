"""Rounded weights of a run of weight reconstruction, kept in the calibration cache until the next run with others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import final

from sbonnx.calib.cache.entries import ROUNDED, STORED, file_name, read_entry, remove_files, write_entry
from sbonnx.calib.cache.sketch_cache import CalibrationCache
from sbonnx.graph.digests import combined, text
from sbonnx.report.codes import Note
from sbonnx.spec import Array


@final
class RoundedWeights:
    """Arrays of the layers that a run has rounded, by key, in the folder of a calibration cache.

    Opening it removes the layers of all other runs: the folder has those of one run at most. Files are bound to model,
    data and settings as sketches are; damaged ones are removed and noted.

    Args:
        cache: of the model and the data.
        run: digest of everything else that the layers depend on.
        part: names the part of the model, if keys are unique only in it.
    """

    def __init__(self, cache: CalibrationCache, run: str, part: str = "") -> None:
        self._cache, self._run, self._part = cache, run, part
        self._store = cache.store
        self._names = file_name(self._store.binding, "", run)
        if not part:
            folder = self._store.folder
            remove_files(path for path in folder.glob(f"*{ROUNDED}") if not path.name.startswith(f"{self._names}-"))

    def part(self, name: str) -> RoundedWeights:
        """Return the layers of a part of the model."""
        return RoundedWeights(self._cache, self._run, name)

    @property
    def notes(self) -> tuple[Note, ...]:
        """Problems found in the cache."""
        return self._cache.notes

    def load(self, key: str) -> dict[str, Array] | None:
        """Return the arrays of a layer by name; None if it is not in the cache.

        Raises:
            DataError: the system cannot read its file.
        """
        path = self._store.folder / self._name(key)
        arrays = read_entry(path, self._entry(key))
        if arrays is None and path.exists():
            self._store.discard([path])
        return arrays

    def save(self, key: str, arrays: Mapping[str, Array]) -> None:
        """Store the arrays of a layer; those of a type that cannot be stored are left out as a whole.

        Raises:
            OutputError: the folder cannot be written to.
        """
        if all(values.dtype.kind in STORED for values in arrays.values()):
            write_entry(self._store.folder / self._name(key), self._entry(key), arrays)

    def _name(self, key: str) -> str:
        layer = text(combined("layer", self._part.encode(), key.encode()))
        return file_name(self._store.binding, ROUNDED, self._run, layer)

    def _entry(self, key: str) -> dict[str, str]:
        return {"binding": self._store.binding, "run": self._run, "key": json.dumps([self._part, key])}
