"""Calibration cache: statistics of one model on one data set, and the progress of an interrupted run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from sbonnx.calib.cache.data_digest import data_digest
from sbonnx.calib.cache.entries import (
    CHECKPOINT,
    FORMAT,
    HEADER,
    ROUNDED,
    SKETCH,
    file_name,
    read_entry,
    remove_abandoned,
    remove_files,
    sketch_of,
    write_entry,
    write_file,
)
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.sample_runner import Key, StatsRequest
from sbonnx.calib.sketches import Sketch
from sbonnx.calib.sketches.sketch import FORMAT as SKETCH_FORMAT
from sbonnx.errors import DataError, OutputError
from sbonnx.graph import Graph
from sbonnx.graph.digests import combined, outputs_digest, tensor_digests, text
from sbonnx.report.codes import Note
from sbonnx.spec import Array
from sbonnx.system.input_files import LARGEST_JSON, read_regular

CHECKPOINT_EVERY: Final = 30.0
"""Seconds between checkpoints: the most work that a killed run loses."""

EVERYTHING: Final = StatsRequest("histogram", track=True)
"""Statistics that are measured for the cache: sufficient for any observer."""

PRUNING: Final = "pruning"
"""Folder in a cache with the measurements of pruning, and the caches of pruned models."""

KIND: Final = "sbonnx calibration cache"

OLD_DATABASE: Final = "sketches.sqlite"
"""The cache of version 0.2."""


class SketchKey(NamedTuple):
    """Key of a sketch: the tensor's digest (see `tensor_digests`), and the channel axis."""

    tensor: str
    axis: int | None = None


def run_key(keys: Iterable[SketchKey]) -> str:
    """Compute the name of a run from the sketches that it makes."""
    return text(combined("plan", *(row.encode() for row in sorted({repr(tuple(key)) for key in keys}))))


class SketchCache:
    """Sketches of one model's tensors on one data set, in files of a folder (see `entries`).

        cache = SketchCache(folder, model="m.onnx", model_digest=..., data="folder 'calib'", data_digest=...,
                            settings={"onnxruntime": "1.31.1", "device": "cpu", "optimisation": "all"})
        sketches = cache.load(keys)     # those that are not in it have to be measured
        cache.save({SketchKey(digests["conv1"]): sketch})

    The cache of another model or of other data is an error. Other settings (a newer onnxruntime, another device) change
    the last bits: their sketches are in the same folder, and each run reads only those of its own settings; `notes`
    says so if there are none yet. Sketches that no run needs any more are not removed until the folder is deleted.

    A process may be killed at any moment, and several processes may use the folder at once. Each file has a checksum
    and says which model, data and settings it belongs to: damaged ones are removed, noted, and measured again. Not
    thread-safe.

    Args:
        folder: created if missing (its parent is not).
        model, data: names for messages.
        model_digest, data_digest: see `outputs_digest` and `data_digest`.
        settings: other settings that the results depend on.

    Attributes:
        folder: of the cache.
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
        self.notes: list[Note] = []
        self._identity: dict[str, Any] = {
            "kind": KIND,
            "format": FORMAT,
            "model": {"name": model, "digest": model_digest},
            "data": {"name": data, "digest": data_digest},
            "settings": {**dict(sorted(settings.items())), "sketches": str(SKETCH_FORMAT)},
        }
        bound = [str(FORMAT), model_digest, data_digest, json.dumps(self._identity["settings"], sort_keys=True)]
        self.binding = text(combined("binding", *(part.encode() for part in bound)))
        self._stored: set[SketchKey] = set()  # complete sketches that are known to be in the folder
        self._begin()

    def load(self, keys: Iterable[SketchKey]) -> dict[SketchKey, Sketch]:
        """Return new copies of those sketches that are in the cache; none if one of them is damaged.

        A run that observes fewer tensors may compute them with other last bits, so all of them are measured again.
        """
        sketches: dict[SketchKey, Sketch] = {}
        damaged = []
        for key in keys:
            path = self._path(key)
            sketch = sketch_of(read_entry(path, self._entry(key)))
            if sketch is not None:
                sketches[key] = sketch
            elif path.exists():
                damaged.append(path)
        if damaged:
            self.discard(damaged)
            return {}
        self._stored.update(sketches)
        return sketches

    def save(self, sketches: Mapping[SketchKey, Sketch]) -> None:
        """Store complete sketches.

        Raises:
            ValueError: a sketch does not match its key, or is not of `EVERYTHING`.
            OutputError: the folder cannot be written to.
        """
        _check(sketches)
        for key, sketch in sketches.items():
            if key not in self._stored:
                write_entry(self._path(key), self._entry(key), sketch.to_arrays())
        self._stored.update(sketches)

    def load_checkpoint(self, run: str) -> tuple[int, dict[SketchKey, Sketch]] | None:
        """Return (samples done, sketches to continue with) of the checkpoint with the most samples, or None.

        Args:
            run: see `run_key`.
        """
        for path in sorted(self._checkpoints(run), reverse=True):
            keys, arrays = self._checkpoint(path, run)
            sketches = [sketch_of(arrays_of_sketch) for arrays_of_sketch in arrays]
            if keys and None not in sketches:
                return _samples_of(path), {
                    key: sketch for key, sketch in zip(keys, sketches, strict=True) if sketch is not None
                }
            self.discard([path])
        return None

    def _checkpoint(self, path: Path, run: str) -> tuple[list[SketchKey], list[dict[str, Array]]]:
        """Return the keys and the arrays of the sketches of a checkpoint; empty if it is damaged."""
        entry = read_entry(path, {"binding": self.binding, "run": run, "samples": _samples_of(path)})
        if entry is None:
            return [], []
        keys = [SketchKey(*key) for key in json.loads(entry.pop("keys").tobytes())]
        arrays: list[dict[str, Array]] = [{} for _ in keys]
        for name, values in entry.items():
            number, _, part = name.partition(".")
            arrays[int(number)][part] = values
        return keys, arrays

    def save_checkpoint(self, samples: int, sketches: Mapping[SketchKey, Sketch], run: str) -> None:
        """Store the sketches after the first `samples` samples. Replaces the previous checkpoint.

        Args:
            sketches: all sketches of the run.
            run: see `run_key`; only the same run reads it.

        Raises:
            ValueError: as in `save`.
            OutputError: the folder cannot be written to.
        """
        _check(sketches)
        arrays = {"keys": np.frombuffer(json.dumps(list(sketches)).encode(), np.uint8)}
        for number, sketch in enumerate(sketches.values()):
            arrays.update((f"{number}.{name}", values) for name, values in sketch.to_arrays().items())
        path = self.folder / file_name(self.binding, CHECKPOINT, _digest(run), f"{samples:012d}")
        write_entry(path, {"binding": self.binding, "run": run, "samples": samples}, arrays)
        remove_files(other for other in self._checkpoints(run) if _samples_of(other) < samples)

    def clear_checkpoint(self, run: str) -> None:
        """Remove the checkpoints of a run."""
        remove_files(self._checkpoints(run))

    # --- the folder -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Check that the folder belongs to this model and data, or create it."""
        new = not self.folder.exists()
        try:
            self.folder.mkdir(exist_ok=True)
            names = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        except OSError as error:
            raise OutputError(
                f"'{self.folder}' cannot be the folder of the calibration cache ({error.strerror or error}): "
                "name one that can be written to, in a folder that exists"
            ) from error
        remove_abandoned(self.folder)
        header = self.folder / HEADER
        try:
            content = read_regular(header, LARGEST_JSON)
        except FileNotFoundError:
            self._create(names, new=new)
            return
        except OSError as error:
            raise DataError(f"'{header}' of the calibration cache cannot be read: {error.strerror or error}") from error
        try:
            self._check_identity(json.loads(content))
        except DataError:  # also a ValueError
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            self.notes.append(
                Note(
                    "cache-damaged",
                    f"the header of the calibration cache '{self.folder}' was damaged and is written again",
                )
            )
            self._write_header()

    def _create(self, names: list[str], *, new: bool) -> None:
        """Write the header of a folder without one.

        Args:
            names: files in the folder.
            new: whether to remove the folder if that fails.
        """
        own = (HEADER, OLD_DATABASE, PRUNING)
        foreign = [name for name in names if name not in own and not name.endswith((SKETCH, CHECKPOINT, ROUNDED))]
        if foreign:
            raise DataError(
                f"folder '{self.folder}' contains '{foreign[0]}' and is not a calibration cache: "
                "name an empty or a new folder"
            )
        if OLD_DATABASE in names:
            self.notes.append(
                Note(
                    "cache-old",
                    f"the calibration cache '{self.folder}' was written by an earlier version of sbonnx: it is "
                    f"measured again, and its file {OLD_DATABASE} can be deleted",
                )
            )
        try:
            self._write_header()
        except BaseException:
            if new:
                with suppress(OSError):
                    self.folder.rmdir()
            raise

    def _write_header(self) -> None:
        write_file(self.folder / HEADER, json.dumps(self._identity, indent=1).encode())

    def _check_identity(self, found: dict[str, Any]) -> None:
        """Raise DataError if the folder belongs to another model or other data."""
        if found.get("kind") != KIND:
            raise DataError(f"'{self.folder / HEADER}' is not of a calibration cache: name an empty or a new folder")
        if found["format"] > FORMAT:
            raise DataError(
                f"the calibration cache '{self.folder}' is of another version of sbonnx (format {found['format']}, "
                f"this one has {FORMAT}): name another folder, or delete it"
            )
        other = [part for part in ("model", "data") if found[part]["digest"] != self._identity[part]["digest"]]
        if other:
            raise DataError(
                f"the calibration cache '{self.folder}' was made from {_describe(found)}, not from "
                f"{_describe(self._identity)}, which differs in {' and '.join(other)}: "
                "name another folder, or delete it"
            )
        theirs, ours = found["settings"], self._identity["settings"]
        if theirs != ours and not any(self.folder.glob(file_name(self.binding, SKETCH, "*"))):
            changes = [
                f"{name} {ours.get(name, 'none')} (there: {theirs.get(name, 'none')})"
                for name in sorted({*theirs, *ours})
                if theirs.get(name) != ours.get(name)
            ]
            self.notes.append(
                Note(
                    "cache-other-settings",
                    f"the calibration cache '{self.folder}' has no sketches yet of {', '.join(changes)}",
                )
            )

    def _path(self, key: SketchKey) -> Path:
        return self.folder / file_name(self.binding, SKETCH, _digest(json.dumps(key)))

    def _entry(self, key: SketchKey) -> dict[str, Any]:
        return {"binding": self.binding, "key": list(key)}

    def _checkpoints(self, run: str) -> list[Path]:
        return list(self.folder.glob(file_name(self.binding, CHECKPOINT, _digest(run), "*")))

    def discard(self, damaged: list[Path]) -> None:
        """Remove damaged files, and note it."""
        remove_files(damaged)
        self.notes.append(
            Note(
                "cache-damaged",
                f"the calibration cache '{self.folder}' has {len(damaged)} damaged entries: they are measured again",
            )
        )


def _check(sketches: Mapping[SketchKey, Sketch]) -> None:
    """Check that sketches match their keys."""
    for key, sketch in sketches.items():
        actual, wanted = (sketch.axis, sketch.detail, sketch.tracks), (key.axis, EVERYTHING.detail, EVERYTHING.track)
        if actual != wanted:
            raise ValueError(f"a sketch of (axis, detail, track) {actual} under the key {tuple(key)}, not {wanted}")


def _digest(name: str) -> str:
    return text(combined("name", name.encode()))


def _samples_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.rpartition("-")[2])


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
        store: its files.

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
    def notes(self) -> tuple[Note, ...]:
        """Problems found in the cache."""
        return tuple(self.store.notes)

    def load(self, requests: Iterable[Key]) -> dict[Key, Sketch]:
        """Return the cached sketches of the requested tensors. Tensors of equal digests share a sketch."""
        keys = {key: self._key(key) for key in requests}
        sketches = self.store.load(dict.fromkeys(keys.values()))
        return {key: sketches[stored] for key, stored in keys.items() if stored in sketches}

    def save(self, sketches: Mapping[Key, Sketch]) -> None:
        """Store complete sketches."""
        self.store.save({self._key(key): sketch for key, sketch in sketches.items()})

    def resume(self, requests: Iterable[Key]) -> tuple[int, dict[Key, Sketch]]:
        """Return (samples done, their sketches) of an interrupted run for exactly these tensors."""
        keys = {key: self._key(key) for key in requests}
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
