"""Sharded calibration: each part observes some of the samples on a worker, and the sketches of all parts are merged.

The state of a sketch does not depend on the order or partition of the samples, so the merged state is bit-identical to
that of one process. Every part reads all of the data, which is fast, and runs only its own samples, which is slow. Its
samples are known without counting first, and a sample has the same position in the data everywhere.

A part runs the whole step in its own folder: plans are merged, graphs compared and caches filled as in a step without
shards. Merging then only reads files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final

from sbonnx.batch.file_digests import Digests
from sbonnx.batch.jobs.job import FINE, Outcome, Places, Step, Tell
from sbonnx.batch.jobs.steps import job_inputs, sketches_digest
from sbonnx.batch.outcomes import FILE, read_made, to_json
from sbonnx.batch.process.step_main import Work, own_work
from sbonnx.batch.remote import FOLDER
from sbonnx.calib.cache.entries import HEADER, merge_folders
from sbonnx.calib.cache.sketch_cache import EVERYTHING
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.observation import Observation
from sbonnx.calib.engine.runner import samples_at_once
from sbonnx.calib.engine.sample_runner import Key
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.engine.schedule import schedule_of
from sbonnx.calib.shared_calibration import CalibrationTask
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import DataError
from sbonnx.planning.types import Site
from sbonnx.progress import Progress, count_samples
from sbonnx.recipe import Recipe
from sbonnx.stages.state import equalization_of

SKETCHES: Final = "sketches"
"""Subfolder with the calibration caches, in the output of a part and in the state folder."""


@dataclass(frozen=True)
class Shard:
    """The samples with ``position % of == number``.

    Attributes:
        number: index of the shard, from 0.
        of: number of shards.
    """

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise ValueError(f"there is no shard {self.number} of {self.of}")

    def __call__(self, task: CalibrationTask, sites: Mapping[Key, Site], samples: Samples) -> dict[Key, Sketch]:
        """Observe `sites` on this shard of the data; a `Walk` of a shared calibration.

        The partition of the graph, and whether a batch can be split into samples, are determined on the very first
        sample, in every shard. So every shard runs exactly what a single process would run.

        Args:
            task: its graph is the same for all shards.
            samples: all of them; their progress counts all feeds, also those of other shards.

        Raises:
            DataError, NumericError, ModelError, DeviceError: see `sbonnx.calib.calibrator.calibrate`.
        """
        options, count = samples.options, samples.data.count
        progress = options.progress
        progress.start("calibrate", count)
        units = samples.units()
        first = next(units, None)
        if first is None:
            raise DataError("the data has no feeds: calibration needs at least one")
        requests = dict.fromkeys(sites, EVERYTHING)
        observed: dict[str, dict[str, None]] = {}
        for site in sites.values():
            observed.setdefault(site.scope, {})[site.tensor] = None
        scopes = {scope: list(names) for scope, names in observed.items()}
        schedule = schedule_of(task.graph, scopes, requests, first, kept=(), options=options, count=count)
        observation = Observation(
            task.graph,
            schedule.segments,
            requests,
            device=options.device,
            threads=max(1, min(samples_at_once(options), options.memory_bytes // max(schedule.peak, 1))),
            any_layout=schedule.any_layout,
        )
        try:
            for unit, _ in observation.stream(self._select(chain([first], units), progress)):
                count_samples(progress, unit.samples)
            return observation.found()
        finally:
            observation.close()

    def _select(self, units: Iterable[Sample], progress: Progress) -> Iterator[Sample]:
        """Yield the units of this shard, and advance the progress after every unit."""
        for unit in units:
            if unit.index % self.of == self.number:
                yield unit
            progress.advance(int(unit.closes))


def shardable(recipe: Recipe) -> str | None:
    """Return the reason why a calibration cannot or should not be sharded; None if it can."""
    if recipe.auto.enable or recipe.mixed.wanted:
        return "a search evaluates recipes on parts of the data that it holds out itself"
    if recipe.calibration.feedback:
        return "state feedback makes each sample depend on the one before"
    if recipe.calibration.granularity == "layer":
        return "layer by layer, one process uses one store of activations"
    settings = equalization_of(recipe)
    if (settings.needs_ranges and not settings.only_after_norms) or recipe.equalize.awq:
        return "equalization measures first, and changes the graph"
    return None


def part_keys(key: str, count: int) -> tuple[str, ...]:
    """Return the keys of the parts of a step."""
    return tuple(f"{key}-{number}of{count}" for number in range(count))


def run_part(step: Step, places: Places, tell: Tell, threads: int, *, shard: Shard) -> Outcome:
    """Measure one part of a calibrate step, like `run_step`, for a step whose key is one of `part_keys`."""
    from sbonnx.batch.work import run_step  # on demand: custom steps do not need it

    whole = replace(step, key=step.key.rpartition("-")[0])
    output = places.made(step.key)
    folder = output.with_name(f".{step.key}.{os.getpid()}")
    own = Places(folder / "own")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        own.state.mkdir(parents=True)
        _share(places, own, whole)
        outcome = run_step(whole, own, tell, threads, walk=shard)
        outcome = replace(outcome, key=step.key)
        if outcome.status not in FINE:
            return outcome
        keep = folder / "kept"
        keep.mkdir()
        if (own.state / SKETCHES).is_dir():
            os.rename(own.state / SKETCHES, keep / SKETCHES)
        (keep / FILE).write_text(to_json(outcome))
        os.rename(keep, output)
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
    runs = sum(
        part_outcome.counters.get("runs", 0) for part in parts if (part_outcome := read_made(places, part)) is not None
    )
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
    for path in sorted(parts[0].rglob(HEADER)):
        place = path.parent.relative_to(parts[0])
        merge_folders([part / place for part in parts], root / place)


def _share(places: Places, own: Places, step: Step) -> None:
    """Share the batch's downloads and existing statistics with the folder of a part."""
    downloads = places.state / FOLDER
    downloads.mkdir(parents=True, exist_ok=True)
    os.symlink(downloads, own.state / FOLDER)
    job = step.jobs[0]
    shared = sketches_digest(job, job_inputs(job, Digests(places.state), places.state))
    if shared is not None and places.sketches(shared).is_dir():
        shutil.copytree(
            places.sketches(shared),
            own.sketches(shared),
            ignore=shutil.ignore_patterns(".*"),
            copy_function=_copy,
        )


def _copy(source: str, target: str) -> None:
    """Copy a file of statistics, unless another process has removed it: a checkpoint of a run that is done."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)
