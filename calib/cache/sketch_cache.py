"""`SketchCache`: calibration cache, a folder with the statistics of one model on one data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from sbonnx.calib.cache.sketch_files import Packed, load_packed, read_whole, save_packed, sweep, write_whole
from sbonnx.calib.sketches import Detail, Sketch
from sbonnx.calib.sketches.sketch import FORMAT as SKETCH_FORMAT
from sbonnx.errors import DataError, OutputError
from sbonnx.graph.digests import combined, text

FORMAT: Final = 1
"""Version of the folder's layout."""

HEADER: Final = "cache.json"
MAX_HEADER: Final = 1 << 20
KIND: Final = "sbonnx calibration cache"
NOTE: Final = "statistics of activations, to be measured once only; this folder can be deleted at any time"
DONE: Final = "sketches"
PARTIAL: Final = "partial"

MERGE_AT: Final = 8
"""Number of files of complete sketches at which they are merged into one."""

ATTEMPTS: Final = 20
"""Attempts to list the folder, because a file may be merged into another between listing and reading."""


class SketchKey(NamedTuple):
    """Key of statistics: the tensor's digest (see `tensor_digests`), the channel axis and the level of detail."""

    tensor: str
    axis: int | None = None
    detail: Detail = "histogram"
    track: bool = False


def plan_key(keys: Iterable[SketchKey], *more: str) -> str:
    """Compute the name of a run from the sketches that it makes.

    `more`: further values that must match, for example a shard of the data.
    """
    rows = sorted(repr(tuple(key)) for key in keys)
    return text(combined("plan", *(row.encode() for row in rows), b"", *(one.encode() for one in more)))


class SketchCache:
    """Sketches of one model's tensors on one data set, stored in a folder.

        cache = SketchCache(folder, model="m.onnx", model_digest=..., data="folder 'calib'", data_digest=...,
                            settings={"onnxruntime": "1.31.1", "device": "cpu", "optimisation": "all"})
        sketch = cache.get(SketchKey(digests["conv1"]))     # None: to be measured
        cache.put(SketchKey(digests["conv1"]), sketch)
        cache.flush()

    `cache.json` names the model and the data of the folder; the cache of another model or of other data is an error.
    Other settings (a newer onnxruntime, another device) change the last bits: their sketches are stored in the same
    folder, and each run reads only those of its own settings; `notes` says so if there are none yet. Sketches that no
    run needs any more are not removed until the folder is deleted.

    Every file is written atomically under a name that contains its sha256, is never changed, and is bound to model,
    data and settings. So a process may be killed at any moment, several processes may use the folder at once, and a
    damaged or truncated file is skipped, noted, and measured again. Not thread-safe.

    Args:
        folder: created if missing (its parent is not).
        model, data: names for messages.
        model_digest, data_digest: see `outputs_digest` and `data_digest`.
        settings: other settings that the results depend on.

    Attributes:
        notes: problems and unused contents, one sentence each.

    Raises:
        DataError: the folder is the cache of another model or other data, of another version of sbonnx, or not a cache.
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
        self.notes: list[str] = []
        self._settings = {**dict(sorted(settings.items())), "sketches": str(SKETCH_FORMAT)}
        self._identity = {
            "model": {"name": model, "digest": model_digest},
            "data": {"name": data, "digest": data_digest},
        }
        bound = [str(FORMAT), model_digest, data_digest, json.dumps(self._settings, sort_keys=True)]
        self._binding = text(combined("binding", *(part.encode() for part in bound)))
        self._entries: dict[SketchKey, Packed] = {}
        self._fresh: set[SketchKey] = set()
        self._read: set[str] = set()  # names of files whose sketches are in `_entries`
        self._damaged: set[str] = set()
        self._begin()
        sweep(folder, (HEADER, f"{DONE}-", f"{PARTIAL}-"))
        self._absorb()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: SketchKey) -> Sketch | None:
        """Return a new sketch with at least the detail that `key` requests, or None."""
        details: tuple[Detail, ...] = ("range", "histogram") if key.detail == "range" else ("histogram",)
        for track in (True,) if key.track else (False, True):
            for detail in details:
                packed = self._entries.get(key._replace(detail=detail, track=track))
                if packed is not None:
                    return Sketch.from_arrays(packed.arrays())
        return None

    def put(self, key: SketchKey, sketch: Sketch) -> None:
        """Store a copy of a complete sketch; `flush` writes it.

        Raises:
            ValueError: the sketch does not match the key.
        """
        _check(key, sketch)
        self._entries[key] = Packed.of(sketch.to_arrays())
        self._fresh.add(key)

    def flush(self) -> None:
        """Write the sketches stored since the last call.

        Raises:
            OutputError: the folder cannot be written to (any more).
        """
        if not self._fresh:
            return
        keys = sorted(self._fresh, key=repr)
        old: set[str] = set()
        if len(self._files(DONE)) >= MERGE_AT:
            self._absorb()
            keys, old = sorted(self._entries, key=repr), set(self._read)
        made = save_packed(self.folder, self._stem(DONE), self._head(), {key: self._entries[key] for key in keys})
        self._fresh.clear()
        self._read = self._read - old | {made}
        self._remove(old | self._damaged, made)
        self._damaged.clear()

    def save_partial(self, units_done: int, sketches: Mapping[SketchKey, Sketch], plan_key: str) -> None:
        """Write a checkpoint: the sketches after the first `units_done` samples. Replaces the previous checkpoint.

        Args:
            sketches: all sketches of the run; must not change during the call.
            plan_key: see the function of that name; only a run of the same key reads it.

        Raises:
            OutputError: the folder cannot be written to.
        """
        for key, sketch in sketches.items():
            _check(key, sketch)
        stem = self._stem(PARTIAL, plan_key)
        packed = {key: Packed.of(sketch.to_arrays()) for key, sketch in sketches.items()}
        head = self._head(plan=plan_key, units=int(units_done))
        made = save_packed(self.folder, f"{stem}-{units_done:09d}", head, packed)
        older = {path.name for path in self._partials(stem) if _units(path) <= units_done}
        self._remove(older, made)

    def load_partial(self, plan_key: str) -> tuple[int, dict[SketchKey, Sketch]] | None:
        """Return (samples done, sketches to continue with) of the checkpoint with the most samples, or None."""
        for path in sorted(self._partials(self._stem(PARTIAL, plan_key)), key=_units, reverse=True):
            try:
                found = load_packed(path)
            except FileNotFoundError:  # another process has written a later checkpoint or has finished
                continue
            if found is None:
                self._note_damage(path)
                continue
            head, entries = found
            if head == self._head(plan=plan_key, units=_units(path)):
                return _units(path), {_key(key): Sketch.from_arrays(packed.arrays()) for key, packed in entries}
        return None

    def clear_partial(self, plan_key: str | None = None) -> None:
        """Remove checkpoints: those of that key, or all with these settings.

        Raises:
            OutputError: a file cannot be removed.
        """
        self._remove({path.name for path in self._partials(self._stem(PARTIAL, plan_key))})

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
                "name one that can be written to, in a folder that is there"
            ) from error
        header = self._header() if HEADER in names else None
        if header is None:
            foreign = [name for name in names if name != HEADER and not name.startswith((f"{DONE}-", f"{PARTIAL}-"))]
            if foreign:
                raise DataError(
                    f"folder '{self.folder}' holds '{foreign[0]}' and is no calibration cache: "
                    "name an empty or a new folder"
                )
            header = {"kind": KIND, "note": NOTE, "format": FORMAT, **self._identity, "settings": self._settings}
            try:
                write_whole(self.folder / HEADER, [json.dumps(header, indent=1).encode() + b"\n"])
            except BaseException:
                if new:
                    with suppress(OSError):  # another process has written into it meanwhile
                        self.folder.rmdir()
                raise
        self._check_header(header)

    def _header(self) -> dict[str, Any] | None:
        """Read cache.json; None if it is damaged.

        Raises:
            DataError: it is not of a cache, or of another version.
        """
        path = self.folder / HEADER
        try:
            header = json.loads(read_whole(path, MAX_HEADER))
        except (ValueError, RecursionError):  # truncated; the sketch files have their own checks
            self.notes.append(f"'{path}' was damaged and is made anew")
            return None
        if not isinstance(header, dict) or header.get("kind") != KIND:
            raise DataError(f"'{path}' is not of a calibration cache: name an empty or a new folder")
        version = header.get("format")
        if version != FORMAT:
            raise DataError(
                f"the calibration cache '{self.folder}' is of another version of sbonnx (format {version}, this one "
                f"has {FORMAT}): name another folder, or delete it"
            )
        return header

    def _check_header(self, header: Mapping[str, Any]) -> None:
        """Raise DataError if the folder belongs to another model or other data."""
        found = {part: header.get(part) for part in self._identity}
        other = [part for part, own in self._identity.items() if _digest(found[part]) != own["digest"]]
        if other:
            raise DataError(
                f"the calibration cache '{self.folder}' was made from {_describe(found)}, not from "
                f"{_describe(self._identity)}, which differs in {' and '.join(other)}: "
                "name another folder, or delete it"
            )
        theirs = header.get("settings")
        if theirs != self._settings and isinstance(theirs, dict) and not self._files(DONE):
            changes = [
                f"{name} {self._settings.get(name, 'none')} (there: {theirs.get(name, 'none')})"
                for name in sorted({*theirs, *self._settings})
                if theirs.get(name) != self._settings.get(name)
            ]
            self.notes.append(f"the calibration cache '{self.folder}' holds nothing yet of {', '.join(changes)}")

    def _absorb(self) -> None:
        """Read the complete sketches that were not read yet."""
        for _ in range(ATTEMPTS):
            try:
                for path in self._files(DONE):
                    if path.name not in self._read:
                        self._absorb_file(path)
                return
            except FileNotFoundError:  # merged into another file by a concurrent process
                continue

    def _absorb_file(self, path: Path) -> None:
        if path.name in self._damaged:
            return
        found = load_packed(path)
        if found is None:
            self._note_damage(path)
            return
        head, entries = found
        if head == self._head():
            for key, packed in entries:
                self._entries.setdefault(_key(key), packed)
            self._read.add(path.name)

    def _note_damage(self, path: Path) -> None:
        self._damaged.add(path.name)
        self.notes.append(f"'{path}' of the calibration cache was damaged: what it held is measured anew")

    def _stem(self, kind: str, plan: str | None = None) -> str:
        """Return the start of the names of files of this model, data and settings."""
        return f"{kind}-{self._binding[:12]}" + (
            "" if plan is None else f"-{text(combined('plan', plan.encode()))[:12]}"
        )

    def _head(self, **more: Any) -> dict[str, Any]:
        return {"binding": self._binding, "settings": self._settings, **more}

    def _files(self, kind: str) -> list[Path]:
        return sorted(self.folder.glob(f"{self._stem(kind)}-*.bin"))

    def _partials(self, stem: str) -> list[Path]:
        return [path for path in sorted(self.folder.glob(f"{stem}-*.bin")) if _units(path) >= 0]

    def _remove(self, names: Iterable[str], kept: str = "") -> None:
        """Remove superseded files."""
        for name in names:
            if name != kept:
                try:
                    (self.folder / name).unlink(missing_ok=True)
                except OSError as error:
                    raise OutputError(f"'{self.folder / name}' cannot be removed: {error.strerror or error}") from error


def _check(key: SketchKey, sketch: Sketch) -> None:
    """Raise ValueError if a sketch does not match its key."""
    found = (sketch.axis, sketch.detail, sketch.tracks)
    if found != key[1:]:
        raise ValueError(f"a sketch of (axis, detail, track) {found} under the key {tuple(key)}")


def _key(row: Any) -> SketchKey:
    """Convert a key read from JSON."""
    return SketchKey(*row)


def _units(path: Path) -> int:
    """Return the number of samples done, from the name of a partial file; -1 for other files."""
    number = path.stem.split("-")[-2]
    return int(number) if number.isdecimal() else -1


def _digest(part: Any) -> Any:
    return part.get("digest") if isinstance(part, dict) else None


def _describe(identity: Mapping[str, Any]) -> str:
    """Format an identity as "model 'a.onnx' (digest 1234...) and data 'b' (digest ...)"."""
    texts = []
    for part, said in identity.items():
        name, digest = (said.get("name"), said.get("digest")) if isinstance(said, dict) else (None, None)
        quoted = name if "'" in str(name) else f"'{name}'"  # names of data include their kind: folder 'calib'
        texts.append(f"{part} {quoted} (digest {str(digest)[:12]})")
    return " and ".join(texts)


__all__ = ["SketchCache", "SketchKey", "plan_key"]
