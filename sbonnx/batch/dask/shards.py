"""Calibration sharded over many workers: each observes some of the samples, and the sketches are merged.

The state of a sketch does not depend on the order or partition of the samples, so the merged state is bit-identical to
that of one process. Every shard iterates over all of the data, which is fast, and runs only its own samples, which is
slow. Its samples are known without counting first, and a sample has the same position in the data everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sbonnx.calib.cache.forward_count import count
from sbonnx.calib.cache.resume import EVERYTHING
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.observation import Observation, wishes_of
from sbonnx.calib.engine.runner import samples_at_once
from sbonnx.calib.engine.sample_runner import Key, StatsRequest
from sbonnx.calib.engine.samples import SampleSplitter
from sbonnx.calib.engine.schedule import schedule_of
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.options import RunOptions
from sbonnx.plan.types import Plan, Site
from sbonnx.progress import Progress
from sbonnx.recipe import Recipe
from sbonnx.stages.state import equalization_of

Arrays = dict[str, Any]
"""Output of `Sketch.to_arrays`."""


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

    def mine(self, units: Iterable[Sample]) -> Iterator[Sample]:
        """Return the units of this shard."""
        return (unit for unit in units if unit.index % self.of == self.number)


@dataclass(frozen=True)
class Seen:
    """Observations of one shard, as plain values and arrays that can be pickled.

    Attributes:
        sketches: `Sketch.to_arrays` by tensor and channel axis.
        samples: number of samples that it ran.
    """

    sketches: dict[Key, Arrays]
    samples: int


def shardable(recipe: Recipe) -> str | None:
    """Return the reason why a calibration cannot or should not be sharded; None if it can."""
    if recipe.auto.enable or recipe.mixed.wanted:
        return "a search tries recipes on parts of the data that it holds out itself"
    if recipe.calibration.feedback:
        return "a state that a sample hands on makes each wait for the one before"
    if recipe.calibration.granularity == "layer":
        return "layer by layer, one process works on one store of activations"
    settings = equalization_of(recipe)
    if settings.needs_ranges or recipe.equalize.awq:
        return "equalization measures first, and changes the graph by it"
    return None


def sites_of(plan: Plan) -> tuple[Site, ...]:
    """Return the sites of a plan whose ranges are measured."""
    return tuple(site for site in plan.of_role("activation") if site.fixed is None)


def observe(
    graph: Graph,
    sites: Iterable[Site],
    data: Dataset,
    shard: Shard,
    *,
    wishes: Mapping[Key, StatsRequest] | None = None,
    options: RunOptions | None = None,
) -> Seen:
    """Observe the tensors of `sites` on one shard of the data.

    The partition of the graph, and whether a batch can be split into samples, are determined on the very first sample,
    on every shard. So every shard runs exactly what a single process would run.

    Args:
        graph: simplified and fused; the same for all shards.
        sites: see `sites_of`.
        data: the whole data set.
        wishes: statistics to collect by tensor; None: enough for any observer, as in a calibration cache.
        options: see `RunOptions`; `progress` counts all feeds passed, also those of other shards.

    Raises:
        DataError, NumericError, ModelError, DeviceError: see `sbonnx.calib.calibrator.calibrate`.
    """
    sites = tuple(sites)
    asked = dict(dict.fromkeys(wishes_of(sites), EVERYTHING) if wishes is None else wishes)
    options = options or RunOptions()
    units = SampleSplitter(graph, device=options.device).units(data.items())
    first = next(units, None)
    if first is None:
        raise DataError("the data holds no feeds: calibration needs at least one")
    limit = options.memory_bytes
    course = schedule_of(
        graph,
        _observed(sites, asked),
        asked,
        first,
        kept=(),
        options=options,
        count=data.count,
    )
    observation = Observation(
        graph,
        course.segments,
        asked,
        device=options.device,
        threads=max(1, min(samples_at_once(options), limit // max(course.peak, 1))),
        any_layout=course.any_layout,
    )
    try:
        for unit, _ in observation.stream(shard.mine(_told(chain([first], units), options.progress))):
            count(unit.samples)
        found = observation.found()
        return Seen({key: sketch.to_arrays() for key, sketch in found.items()}, observation.samples)
    finally:
        observation.close()


def merge(parts: Iterable[Seen]) -> tuple[dict[Key, Sketch], int]:
    """Merge the observations of all shards; return the sketches, and the number of samples.

    Raises:
        ValueError: the shards observed different tensors, or there are no shards.
    """
    merged: dict[Key, Sketch] | None = None
    samples = 0
    for part in parts:
        samples += part.samples
        found = {key: Sketch.from_arrays(arrays) for key, arrays in part.sketches.items()}
        if merged is None:
            merged = found
            continue
        if merged.keys() != found.keys():
            raise ValueError("shards of one calibration looked at different tensors")
        for key, sketch in found.items():
            merged[key].merge(sketch)
    if merged is None:
        raise ValueError("there are no shards to merge")
    return merged, samples


def _observed(sites: Iterable[Site], wishes: Mapping[Key, StatsRequest]) -> dict[str, list[str]]:
    """Return the tensors to observe, by scope."""
    observed: dict[str, dict[str, None]] = {}
    for site in sites:
        if (site.tensor, site.spec.axis) in wishes:
            observed.setdefault(site.scope, {})[site.tensor] = None
    return {scope: list(names) for scope, names in observed.items()}


def _told(units: Iterable[Sample], progress: Progress) -> Iterator[Sample]:
    """Pass units through, and report progress."""
    for unit in units:
        yield unit
        progress.advance(int(unit.closes))


__all__ = ["Seen", "Shard", "merge", "observe", "shardable", "sites_of"]
