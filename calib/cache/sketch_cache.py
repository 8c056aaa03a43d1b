"""`SketchCache`: what was measured of one model on one data set, in a folder, for the next run."""

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
"""Files of finished sketches that are merged into one."""

ATTEMPTS: Final = 20
"""Times that the folder is listed anew because a file was merged into another between listing and reading."""


class SketchKey(NamedTuple):
    """Which statistics: of a tensor (its digest, see `tensor_digests`), per channel of an axis, in which detail."""

    tensor: str
    axis: int | None = None
    detail: Detail = "histogram"
    track: bool = False


def plan_key(keys: Iterable[SketchKey], *more: str) -> str:
    """A name for a run that makes just these sketches; `more`: what else must agree (a shard of the data, say)."""
    rows = sorted(repr(tuple(key)) for key in keys)
    return text(combined("plan", *(row.encode() for row in rows), b"", *(one.encode() for one in more)))


class SketchCache:
    """Sketches of one model's tensors on one data set, kept in a folder.

        cache = SketchCache(folder, model="m.onnx", model_digest=..., data="folder 'calib'", data_digest=...,
                            settings={"onnxruntime": "1.31.1", "device": "cpu", "optimisation": "all"})
        sketch = cache.get(SketchKey(digests["conv1"]))     # None: to be measured
        cache.put(SketchKey(digests["conv1"]), sketch)
        cache.flush()

    `cache.json` says for which model and data the folder is, and another model's or data's cache is refused by name.
    Other settings (a newer onnxruntime, another device) give other last bits: their sketches stand beside one
    another, and each run sees only those of its own settings; `notes` says so when none are there yet. What no run
    asks for any more goes when the folder is deleted.

    Every file appears whole under a name that carries its sha256, is never changed, and is bound to model, data and
    settings. So a process may be killed at any moment, several may use the folder at once, and a file that is damaged
    or cut short is left out, noted, and measured anew. Not for several threads of one process at once.

    Args:
        folder: made where it is missing (its parent is not).
        model, data: names for messages.
        model_digest, data_digest: see `outputs_digest` and `data_digest`.
        settings: whatever else the numbers depend on.

    Attributes:
        notes: what was found amiss or not used, one sentence each.

    Raises:
        DataError: the folder is the cache of another model or other data, of another version of sbonnx, or no cache.
        OutputError: it cannot be made or written to.
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
        """A fresh sketch that answers all that `key` asks, or None. One of more detail serves a wish for less."""
        details: tuple[Detail, ...] = ("range", "histogram") if key.detail == "range" else ("histogram",)
        for track in (True,) if key.track else (False, True):
            for detail in details:
                packed = self._entries.get(key._replace(detail=detail, track=track))
                if packed is not None:
                    return Sketch.from_arrays(packed.arrays())
        return None

    def put(self, key: SketchKey, sketch: Sketch) -> None:
        """Take in a finished sketch as it is now; `flush` writes it.

        Raises:
            ValueError: the sketch is not what the key says.
        """
        _check(key, sketch)
        self._entries[key] = Packed.of(sketch.to_arrays())
        self._fresh.add(key)

    def flush(self) -> None:
        """Write what was put since the last time.

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
        """Remember a run under way: its sketches after the first `units_done` samples. Replaces what was remembered.

        Args:
            sketches: not to be changed meanwhile; all that the run makes.
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
        """(samples done, sketches to go on with) of the run that came farthest, or None."""
        for path in sorted(self._partials(self._stem(PARTIAL, plan_key)), key=_units, reverse=True):
            try:
                found = load_packed(path)
            except FileNotFoundError:  # another process has come farther since, or is done
                continue
            if found is None:
                self._note_damage(path)
                continue
            head, entries = found
            if head == self._head(plan=plan_key, units=_units(path)):
                return _units(path), {_key(key): Sketch.from_arrays(packed.arrays()) for key, packed in entries}
        return None

    def clear_partial(self, plan_key: str | None = None) -> None:
        """Forget runs under way: the one of that key, or all with these settings.

        Raises:
            OutputError: a file cannot be removed.
        """
        self._remove({path.name for path in self._partials(self._stem(PARTIAL, plan_key))})

    # --- the folder -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Check whose folder it is, or make it ours."""
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
                    with suppress(OSError):  # another process has come here meanwhile
                        self.folder.rmdir()
                raise
        self._check_header(header)

    def _header(self) -> dict[str, Any] | None:
        """What cache.json says; None where it is damaged.

        Raises:
            DataError: it is not of a cache, or of another version.
        """
        path = self.folder / HEADER
        try:
            header = json.loads(read_whole(path, MAX_HEADER))
        except (ValueError, RecursionError):  # cut short: sketches say themselves what they are of
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
        """The folder is of this model and this data."""
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
        """Read the finished sketches that were not read yet."""
        for _ in range(ATTEMPTS):
            try:
                for path in self._files(DONE):
                    if path.name not in self._read:
                        self._absorb_file(path)
                return
            except FileNotFoundError:  # merged into another by a process beside us
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
        """How names of files of this model, data and settings begin."""
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
        """Remove files that others made unnecessary."""
        for name in names:
            if name != kept:
                try:
                    (self.folder / name).unlink(missing_ok=True)
                except OSError as error:
                    raise OutputError(f"'{self.folder / name}' cannot be removed: {error.strerror or error}") from error


def _check(key: SketchKey, sketch: Sketch) -> None:
    """A sketch is what its key says."""
    found = (sketch.axis, sketch.detail, sketch.tracks)
    if found != key[1:]:
        raise ValueError(f"a sketch of (axis, detail, track) {found} under the key {tuple(key)}")


def _key(row: Any) -> SketchKey:
    """A key as JSON gives it back."""
    return SketchKey(*row)


def _units(path: Path) -> int:
    """Samples done, from the name of a partial file; -1 where it is none."""
    number = path.stem.split("-")[-2]
    return int(number) if number.isdecimal() else -1


def _digest(part: Any) -> Any:
    return part.get("digest") if isinstance(part, dict) else None


def _describe(identity: Mapping[str, Any]) -> str:
    """ "model 'a.onnx' (digest 1234...) and data 'b' (digest ...)"."""
    texts = []
    for part, said in identity.items():
        name, digest = (said.get("name"), said.get("digest")) if isinstance(said, dict) else (None, None)
        quoted = name if "'" in str(name) else f"'{name}'"  # names of data say what they are: folder 'calib'
        texts.append(f"{part} {quoted} (digest {str(digest)[:12]})")
    return " and ".join(texts)


__all__ = ["SketchCache", "SketchKey", "plan_key"]
