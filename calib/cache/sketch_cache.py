"""Calibration cache: statistics of one model on one data set, and the progress of an interrupted run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from sbonnx.calib.cache.data_digest import data_digest
from sbonnx.calib.cache.sketch_database import (
    DATABASE,
    FORMAT,
    DamagedError,
    SketchRow,
    get_identity,
    get_rows,
    put_identity,
    put_rows,
    reading,
    remove_database,
    writing,
)
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.sample_runner import Key, StatsRequest
from sbonnx.calib.sketches import Sketch
from sbonnx.calib.sketches.sketch import FORMAT as SKETCH_FORMAT
from sbonnx.errors import DataError, OutputError, SbonnxError
from sbonnx.graph import Graph
from sbonnx.graph.digests import combined, outputs_digest, tensor_digests, text
from sbonnx.input_files import read_regular

CHECKPOINT_EVERY: Final = 30.0
"""Seconds between checkpoints: the most work that a killed run loses."""

EVERYTHING: Final = StatsRequest("histogram", track=True)
"""Statistics that are measured for the cache: sufficient for any observer."""

PRUNING: Final = "pruning"
"""Folder in a cache with the measurements of pruning, and the caches of pruned models."""

OLD_HEADER: Final = "cache.json"
OLD_KIND: Final = b"sbonnx calibration cache"
MAX_OLD_HEADER: Final = 1 << 20


class SketchKey(NamedTuple):
    """Key of a sketch: the tensor's digest (see `tensor_digests`), and the channel axis."""

    tensor: str
    axis: int | None = None


def run_key(keys: Iterable[SketchKey]) -> str:
    """Compute the name of a run from the sketches that it makes."""
    return text(combined("plan", *(row.encode() for row in sorted({repr(tuple(key)) for key in keys}))))


class SketchCache:
    """Sketches of one model's tensors on one data set, in a database in a folder.

        cache = SketchCache(folder, model="m.onnx", model_digest=..., data="folder 'calib'", data_digest=...,
                            settings={"onnxruntime": "1.31.1", "device": "cpu", "optimisation": "all"})
        sketches = cache.load(keys)     # those that are not in it have to be measured
        cache.save({SketchKey(digests["conv1"]): sketch})

    The cache of another model or of other data is an error. Other settings (a newer onnxruntime, another device) change
    the last bits: their sketches are in the same database, and each run reads only those of its own settings; `notes`
    says so if there are none yet. Sketches that no run needs any more are not removed until the folder is deleted.

    A process may be killed at any moment, and several processes may use the folder at once. Each row has a checksum and
    is bound to model, data and settings: damaged rows are skipped, noted, and measured again. Not thread-safe.

    Args:
        folder: created if missing (its parent is not).
        model, data: names for messages.
        model_digest, data_digest: see `outputs_digest` and `data_digest`.
        settings: other settings that the results depend on.

    Attributes:
        path: of the database.
        binding: digest of model, data and settings.
        notes: problems and unused contents, one sentence each.

    Raises:
        DataError: the folder is the cache of another model or other data, of a later version of sbonnx, or not a cache.
        OutputError: it cannot be created or written to.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        model_digest: str,
        data: str,
        data_digest: str,
        settings: Mapping[str, str],
    ) -> None:
        self.folder = folder
        self.path = folder / DATABASE
        self.notes: list[str] = []
        self._identity: dict[str, Any] = {
            "model": {"name": model, "digest": model_digest},
            "data": {"name": data, "digest": data_digest},
            "settings": {**dict(sorted(settings.items())), "sketches": str(SKETCH_FORMAT)},
        }
        self._content = json.dumps(self._identity, indent=1)
        bound = [str(FORMAT), model_digest, data_digest, json.dumps(self._identity["settings"], sort_keys=True)]
        self.binding = text(combined("binding", *(part.encode() for part in bound)))
        self._stored: set[SketchKey] = set()  # complete sketches that are known to be in the database
        self._begin()

    def load(self, keys: Iterable[SketchKey]) -> dict[SketchKey, Sketch]:
        """Return new copies of those sketches that are in the cache; none if one of them is damaged.

        A run that observes fewer tensors may compute them with other last bits, so all of them are measured again.
        """
        found: dict[SketchKey, Sketch] = {}
        damaged = 0
        try:
            with reading(self.path) as db:
                for key in keys:
                    where, wanted = "binding = ? AND run = '' AND samples = 0 AND key = ?", json.dumps(key)
                    for row in get_rows(db, where, (self.binding, wanted)):
                        sketch = _unpacked(row)
                        # a damaged index finds whole rows of other keys
                        if sketch is None or row is None or (row.binding, row.key) != (self.binding, wanted):
                            damaged += 1
                        else:
                            found[key] = sketch
        except FileNotFoundError:
            return {}
        except DamagedError:
            self.discard()
            return {}
        if damaged:
            self.note_damage(damaged)
            return {}
        self._stored.update(found)
        return found

    def save(self, sketches: Mapping[SketchKey, Sketch]) -> None:
        """Store complete sketches.

        Raises:
            ValueError: a sketch does not match its key, or is not of `EVERYTHING`.
            OutputError: the folder cannot be written to.
        """
        rows = [self._row(key, sketch) for key, sketch in sketches.items() if key not in self._stored]
        if rows:
            self.write(rows)
            self._stored.update(sketches)

    def load_checkpoint(self, run: str) -> tuple[int, dict[SketchKey, Sketch]] | None:
        """Return (samples done, sketches to continue with) of the checkpoint with the most samples, or None.

        Args:
            run: see `run_key`.
        """
        where, values = "binding = ? AND run = ?", (self.binding, run)
        try:
            with reading(self.path) as db:
                query = f"SELECT DISTINCT samples FROM sketches WHERE {where} ORDER BY samples DESC"
                for samples in [samples for (samples,) in db.execute(query, values)]:
                    rows = list(get_rows(db, f"{where} AND samples = ?", (*values, samples)))
                    unpacked = [(row, _unpacked(row)) for row in rows]
                    found = {
                        SketchKey(*json.loads(row.key)): sketch
                        for row, sketch in unpacked
                        if row is not None and sketch is not None
                    }
                    own = all(row is not None and (row.run, row.samples) == (run, samples) for row in rows)
                    if own and rows[0] is not None and len(found) == len(rows) == rows[0].row_count:
                        return samples, found
                    self.note_damage(len(rows))
        except FileNotFoundError:
            pass
        except DamagedError:
            self.discard()
        return None

    def save_checkpoint(self, samples: int, sketches: Mapping[SketchKey, Sketch], run: str) -> None:
        """Store the sketches after the first `samples` samples. Replaces the previous checkpoint.

        Args:
            sketches: all sketches of the run.
            run: see `run_key`; only the same run reads it.

        Raises:
            ValueError: as in `save`.
            OutputError: the folder cannot be written to.
        """
        rows = [self._row(key, sketch, run, samples, len(sketches)) for key, sketch in sketches.items()]
        self.write(rows, delete=("binding = ? AND run = ? AND samples <= ?", (self.binding, run, samples)))

    def clear_checkpoint(self, run: str) -> None:
        """Remove the checkpoints of a run.

        Raises:
            OutputError: the folder cannot be written to.
        """
        where, values = "binding = ? AND run = ?", (self.binding, run)
        try:
            with reading(self.path) as db:
                if db.execute(f"SELECT 1 FROM sketches WHERE {where} LIMIT 1", values).fetchone() is None:
                    return
        except (FileNotFoundError, DamagedError):
            return
        self.write([], delete=(where, values))

    # --- the folder -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Check that the folder belongs to this model and data, or create it."""
        new = not self.folder.exists()
        try:
            self.folder.mkdir(exist_ok=True)
            entries = (path.name for path in self.folder.iterdir())
            names = sorted(name for name in entries if not name.startswith(".") and name != PRUNING)
        except OSError as error:
            raise OutputError(
                f"'{self.folder}' cannot be the folder of the calibration cache ({error.strerror or error}): "
                "name one that can be written to, in a folder that exists"
            ) from error
        try:
            with reading(self.path) as db:
                content = get_identity(db)
                measured = any(True for _ in get_rows(db, "binding = ? AND run = '' LIMIT 1", (self.binding,)))
        except FileNotFoundError:
            self._create(names, new=new)
            return
        except DamagedError:
            self.discard()
            return
        if content is None:
            self.notes.append(f"the header of the calibration cache '{self.path}' was damaged and is written again")
            with writing(self.path, self._content) as db:
                put_identity(db, self._content)
        else:
            self._check_identity(json.loads(content), measured=measured)

    def _create(self, names: list[str], *, new: bool) -> None:
        """Create the database in a folder without one.

        Args:
            names: files in the folder.
            new: whether to remove the folder if that fails.
        """
        old = False  # a cache of binary files of an earlier version
        if OLD_HEADER in names:
            with suppress(OSError):
                old = OLD_KIND in read_regular(self.folder / OLD_HEADER, MAX_OLD_HEADER)
        foreign = [name for name in names if not (old and (name == OLD_HEADER or name.endswith(".bin")))]
        if any(not name.startswith(DATABASE) for name in foreign):  # another process may have created it meanwhile
            raise DataError(
                f"folder '{self.folder}' contains '{foreign[0]}' and is not a calibration cache: "
                "name an empty or a new folder"
            )
        if old:
            self.notes.append(
                f"the calibration cache '{self.folder}' was written by an earlier version of sbonnx: it is measured "
                f"again, and its files {OLD_HEADER} and *.bin can be deleted"
            )
        try:
            self.write([])
        except BaseException:
            with suppress(OSError, SbonnxError, DamagedError):
                try:
                    with reading(self.path):
                        pass  # another process has created it meanwhile
                except FileNotFoundError:
                    self.path.unlink(missing_ok=True)
                    if new:
                        self.folder.rmdir()
            raise

    def _check_identity(self, found: dict[str, Any], *, measured: bool) -> None:
        """Raise DataError if the folder belongs to another model or other data."""
        other = [part for part in ("model", "data") if found[part]["digest"] != self._identity[part]["digest"]]
        if other:
            raise DataError(
                f"the calibration cache '{self.folder}' was made from {_describe(found)}, not from "
                f"{_describe(self._identity)}, which differs in {' and '.join(other)}: "
                "name another folder, or delete it"
            )
        theirs, ours = found["settings"], self._identity["settings"]
        if theirs != ours and not measured:
            changes = [
                f"{name} {ours.get(name, 'none')} (there: {theirs.get(name, 'none')})"
                for name in sorted({*theirs, *ours})
                if theirs.get(name) != ours.get(name)
            ]
            self.notes.append(f"the calibration cache '{self.folder}' has no sketches yet of {', '.join(changes)}")

    def write(self, rows: Iterable[SketchRow], delete: tuple[str, tuple[Any, ...]] | None = None) -> None:
        """Delete and store rows in one transaction; a damaged database is replaced.

        Raises:
            OutputError: the folder cannot be written to.
        """
        for attempt in range(2):
            try:
                with writing(self.path, self._content) as db:
                    if delete is not None:
                        db.execute(f"DELETE FROM sketches WHERE {delete[0]}", delete[1])
                    put_rows(db, rows)
                return
            except DamagedError as error:
                if attempt:
                    raise OutputError(f"'{self.path}' cannot be written: {error}") from error
                self.discard()

    def _row(self, key: SketchKey, sketch: Sketch, run: str = "", samples: int = 0, count: int = 1) -> SketchRow:
        """Convert a sketch to a row, after a check that it matches its key."""
        found, wanted = (sketch.axis, sketch.detail, sketch.tracks), (key.axis, EVERYTHING.detail, EVERYTHING.track)
        if found != wanted:
            raise ValueError(f"a sketch of (axis, detail, track) {found} under the key {tuple(key)}, not {wanted}")
        return SketchRow.of(self.binding, json.dumps(key), sketch, run, samples, count)

    def note_damage(self, count: int) -> None:
        """Note that some rows are damaged."""
        self.notes.append(f"the calibration cache '{self.path}' has {count} damaged entries: they are measured again")

    def discard(self) -> None:
        """Remove a damaged database."""
        self.notes.append(f"the calibration cache '{self.path}' was damaged: its contents are measured again")
        self._stored.clear()
        remove_database(self.path)


def _unpacked(row: SketchRow | None) -> Sketch | None:
    """Return the sketch of a row; None if it is damaged."""
    try:
        return None if row is None else row.sketch()
    except ValueError:
        return None


def _describe(identity: Mapping[str, Any]) -> str:
    """Format an identity as "model 'a.onnx' (digest 1234...) and data 'b' (digest ...)"."""
    texts = []
    for part in ("model", "data"):
        name, digest = identity[part]["name"], identity[part]["digest"]
        quoted = name if "'" in name else f"'{name}'"  # names of data include their kind: folder 'calib'
        texts.append(f"{part} {quoted} (digest {digest[:12]})")
    return " and ".join(texts)


class CalibrationCache:
    """Calibration cache by the tensors of one graph; see `SketchCache`.

    Args:
        folder: of the cache.
        graph: simplified and fused.
        data: calibration data; read once for its digest.
        settings: other settings that the results depend on.

    Attributes:
        store: the database.

    Raises: see `SketchCache`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], graph: Graph, data: Dataset, settings: Mapping[str, str]
    ) -> None:
        self._digests = tensor_digests(graph)
        self.store = SketchCache(
            Path(folder),
            model=str(graph.info.path or "a model in memory"),
            model_digest=outputs_digest(graph, self._digests),
            data=data.name,
            data_digest=data_digest(data),
            settings=settings,
        )
        self._run = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Problems found in the cache."""
        return tuple(self.store.notes)

    def load(self, wishes: Iterable[Key]) -> dict[Key, Sketch]:
        """Return the cached sketches of the requested tensors. Tensors of equal digests share a sketch."""
        keys = {key: self._key(key) for key in wishes}
        found = self.store.load(dict.fromkeys(keys.values()))
        return {key: found[stored] for key, stored in keys.items() if stored in found}

    def save(self, sketches: Mapping[Key, Sketch]) -> None:
        """Store complete sketches."""
        self.store.save({self._key(key): sketch for key, sketch in sketches.items()})

    def resume(self, wishes: Iterable[Key]) -> tuple[int, dict[Key, Sketch]]:
        """Return (samples done, their sketches) of an interrupted run for exactly these tensors."""
        keys = {key: self._key(key) for key in wishes}
        self._run = run_key(keys.values())
        checkpoint = self.store.load_checkpoint(self._run)
        if checkpoint is None:
            return 0, {}
        samples, sketches = checkpoint
        return samples, {key: sketches[stored] for key, stored in keys.items()}

    def save_checkpoint(self, done: int, sketches: Mapping[Key, Sketch]) -> None:
        """Store a checkpoint of the run that `resume` began."""
        self.store.save_checkpoint(done, {self._key(key): sketch for key, sketch in sketches.items()}, self._run)

    def finish(self) -> None:
        """Remove the checkpoint of the run that `resume` began, if any."""
        if self._run:
            self.store.clear_checkpoint(self._run)

    def _key(self, key: Key) -> SketchKey:
        tensor, axis = key
        return SketchKey(self._digests[tensor], axis)
