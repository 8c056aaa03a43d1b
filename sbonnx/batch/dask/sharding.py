"""Sharded calibrate steps: the work of one part on a worker, and the merge of all parts.

A part runs the whole step in its own folder on its share of the samples: plans are merged, graphs compared and caches
filled as in an unsharded step. Merging then only reads files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sbonnx.batch.dask.shards import Shard, merge, observe
from sbonnx.batch.digests import Digests
from sbonnx.batch.jobs.job import FINE, Outcome, Places, Step, Tell
from sbonnx.batch.jobs.steps import look_at, sketches_digest
from sbonnx.batch.outcomes import FILE, read_made, to_json
from sbonnx.batch.process.step_main import Work, own_work
from sbonnx.batch.storage.remote import FOLDER
from sbonnx.calib.cache.resume import EVERYTHING
from sbonnx.calib.cache.sketch_cache import DONE, HEADER
from sbonnx.calib.cache.sketch_files import Packed, load_packed, save_packed, write_whole
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.sample_runner import Key
from sbonnx.calib.shared_calibration import Course, walked_by
from sbonnx.calib.sketches import Sketch
from sbonnx.options import RunOptions
from sbonnx.plan.types import Site

SKETCHES: Final = "sketches"
"""Subfolder with the calibration caches, in the output of a part and in the state folder."""

Head = Mapping[str, Any]
Entries = dict[tuple[Any, ...], Packed]


def part_keys(key: str, count: int) -> tuple[str, ...]:
    """Return the keys of the parts of a step."""
    return tuple(f"{key}-{number}of{count}" for number in range(count))


def run_part(step: Step, places: Places, tell: Tell, threads: int, *, shard: Shard) -> Outcome:
    """Measure one part of a calibrate step, like `run_step`, for a step whose key is one of `part_keys`."""
    whole = replace(step, key=step.key.rpartition("-")[0])
    made = places.made(step.key)
    folder = made.with_name(f".{step.key}.{os.getpid()}")
    own = Places(folder / "own")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        own.state.mkdir(parents=True)
        _share(places, own, whole)
        with walked_by(_Walk(shard)):
            outcome = own_work()(whole, own, tell, threads)
        outcome = replace(outcome, key=step.key)
        if outcome.status not in FINE:
            return outcome
        keep = folder / "kept"
        keep.mkdir()
        if (own.state / SKETCHES).is_dir():
            os.rename(own.state / SKETCHES, keep / SKETCHES)
        (keep / FILE).write_text(to_json(outcome))
        os.rename(keep, made)
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_merged(
    step: Step, places: Places, tell: Tell, threads: int, *, parts: tuple[str, ...], work: Work | None = None
) -> Outcome:
    """Run a calibrate step after its parts, like `run_step`; their statistics are merged into the caches first.

    Args:
        parts: keys of the parts.
        work: runs the step after the merge; None: sbonnx's own.
    """
    tell("merge", 0, len(parts))
    merge_caches([places.made(part) / SKETCHES for part in parts], places.state / SKETCHES)
    runs = sum(found.counters.get("runs", 0) for part in parts if (found := read_made(places, part)) is not None)
    outcome = (work or own_work())(step, places, tell, threads)
    counters = {**outcome.counters, "runs": outcome.counters.get("runs", 0) + runs}
    return replace(outcome, counters=counters)


def merge_caches(parts: list[Path], root: Path) -> None:
    """Merge the caches below several folders, at the same relative paths, into those below `root`.

    Existing entries are kept. An entry that some part lacks is omitted, for example a tensor that was deduplicated on
    one machine only; it is measured when it is needed.

    Raises:
        OutputError: a cache cannot be written.
    """
    first, *_ = parts
    for header in sorted(first.rglob(HEADER)):
        place = header.parent.relative_to(first)
        found = [_entries(part / place) for part in parts]
        known = _entries(root / place) if (root / place).is_dir() else {}
        for stem, (head, entries) in found[0].items():
            others = [one[stem][1] for one in found[1:] if stem in one]
            if len(others) + 1 < len(parts):
                continue
            there = known[stem][1] if stem in known else {}
            keys = [key for key in entries if key not in there and all(key in other for other in others)]
            if not keys:
                continue
            merged = {key: _merged([entries[key], *(other[key] for other in others)]) for key in keys}
            (root / place).mkdir(parents=True, exist_ok=True)
            if not (root / place / HEADER).exists():
                write_whole(root / place / HEADER, [header.read_bytes()])
            save_packed(root / place, stem, head, merged)


class _Walk:
    """Data traversal for one shard; see `sbonnx.calib.shared_calibration.walked_by`."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def __call__(
        self, course: Course, sites: Mapping[Key, Site], data: Dataset, options: RunOptions
    ) -> dict[Key, Sketch]:
        options.progress.start("calibrate", data.count)
        wishes = dict.fromkeys(sites, EVERYTHING)
        seen = observe(course.graph, sites.values(), data, self._shard, wishes=wishes, options=options)
        return merge([seen])[0]


def _share(places: Places, own: Places, step: Step) -> None:
    """Share the batch's downloads and existing statistics with the folder of a part."""
    downloads = places.state / FOLDER
    downloads.mkdir(parents=True, exist_ok=True)
    os.symlink(downloads, own.state / FOLDER)
    job = step.jobs[0]
    shared = sketches_digest(job, look_at(job, Digests(places.state), places.state))
    if shared is not None and places.sketches(shared).is_dir():
        shutil.copytree(places.sketches(shared), own.sketches(shared), ignore=shutil.ignore_patterns(".*", "partial-*"))


def _entries(folder: Path) -> dict[str, tuple[Head, Entries]]:
    """Read the finished sketches of a cache, by file name prefix, which identifies what they belong to."""
    found: dict[str, tuple[Head, Entries]] = {}
    for path in sorted(folder.glob(f"{DONE}-*.bin")):
        content = load_packed(path)
        if content is None:  # damaged: treat as missing
            continue
        head, rows = content
        _, entries = found.setdefault(path.stem.rpartition("-")[0], (head, {}))
        for key, packed in rows:
            entries.setdefault(tuple(key), packed)
    return found


def _merged(rows: list[Packed]) -> Packed:
    """Merge several sketches into one."""
    whole, *others = (Sketch.from_arrays(row.arrays()) for row in rows)
    for other in others:
        whole.merge(other)
    return Packed.of(whole.to_arrays())


__all__ = ["merge_caches", "part_keys", "run_merged", "run_part"]
