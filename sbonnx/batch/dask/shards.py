"""One calibration on many workers: each sees some of the samples, and what they saw is merged.

The state of a sketch is what was seen, in no order and cut in no way, so that merged it is bit for bit that of one
process. Every shard walks over all of the data, which is quick, and runs its samples, which is not: which samples they
are is known without counting them first, and a sample has the same place in the data everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sbonnx.calib.cache.forward_count import count
from sbonnx.calib.cache.resume import EVERYTHING
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.observation import Key, Observation, Wish, wishes_of
from sbonnx.calib.engine.runner import CPU, providers
from sbonnx.calib.engine.sample_splitter import Rows, Unit
from sbonnx.calib.engine.schedule import course_of
from sbonnx.calib.engine.segments import Granularity
from sbonnx.calib.sketches import Sketch
from sbonnx.calib.storage.tensor_store import parse_size
from sbonnx.cpu import cores
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.plan.types import Plan, Site
from sbonnx.prepare import equalization_of
from sbonnx.recipe import Recipe

Arrays = dict[str, Any]
"""What `Sketch.to_arrays` gives."""


@dataclass(frozen=True)
class Shard:
    """The samples whose position leaves `number` when divided by `of`.

    Attributes:
        number: from 0.
        of: how many there are.
    """

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise ValueError(f"there is no shard {self.number} of {self.of}")

    def mine(self, units: Iterable[Unit]) -> Iterator[Unit]:
        """Those of the units that are this shard's."""
        return (unit for unit in units if unit.index % self.of == self.number)


@dataclass(frozen=True)
class Seen:
    """What a shard saw. Plain values and arrays: it travels.

    Attributes:
        sketches: `Sketch.to_arrays` by tensor and channel axis.
        samples: how many samples it ran.
    """

    sketches: dict[Key, Arrays]
    samples: int


def shardable(recipe: Recipe) -> str | None:
    """Why a calibration cannot be cut into shards, or is not worth it; None where it can."""
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
    """What is measured for a plan."""
    return tuple(site for site in plan.of_role("activation") if site.fixed is None)


def observe(
    graph: Graph,
    sites: Iterable[Site],
    data: Dataset,
    shard: Shard,
    *,
    wishes: Mapping[Key, Wish] | None = None,
    device: str = "cpu",
    granularity: Granularity = "auto",
    memory: str | int = "2 GiB",
    threads: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> Seen:
    """What one shard sees of the tensors of `sites`.

    How the graph is cut is found on the first sample of all, whoever runs it, and so is whether rows of a batch can be
    run apart: every shard runs what one process would run.

    Args:
        graph: simplified and fused; the same for all shards.
        sites: see `sites_of`.
        data: all of it.
        wishes: what to remember of the tensors; None: enough for any observer, as a calibration cache keeps it.
        device, granularity, memory, threads: see `sbonnx.calib.calibrate.calibrate`.
        advance: told of so many more feeds that were passed.

    Raises:
        DataError, NumericError, ModelError, DeviceError: see `sbonnx.calib.calibrate.calibrate`.
    """
    sites = tuple(sites)
    asked = dict(dict.fromkeys(wishes_of(sites), EVERYTHING) if wishes is None else wishes)
    units = Rows(graph, device=device).units(data.items())
    first = next(units, None)
    if first is None:
        raise DataError("the data holds no feeds: calibration needs at least one")
    limit = parse_size(memory)
    course = course_of(
        graph, _observed(sites, asked), asked, first, kept=(), granularity=granularity, memory=limit, count=data.count
    )
    at_once = threads or (cores() if providers(device)[0] == CPU else 1)
    observation = Observation(
        graph,
        course.segments,
        asked,
        device=device,
        threads=max(1, min(at_once, limit // max(course.peak, 1))),
        any_layout=course.any_layout,
    )
    try:
        for unit, _ in observation.stream(shard.mine(_told(chain([first], units), advance))):
            count(unit.samples)
        found = observation.found()
        return Seen({key: sketch.to_arrays() for key, sketch in found.items()}, observation.samples)
    finally:
        observation.close()


def merge(parts: Iterable[Seen]) -> tuple[dict[Key, Sketch], int]:
    """What all shards saw together: sketches, and the number of samples.

    Raises:
        ValueError: they did not look at the same tensors, or there are none.
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


def _observed(sites: Iterable[Site], wishes: Mapping[Key, Wish]) -> dict[str, list[str]]:
    """Tensors to observe by scope."""
    observed: dict[str, dict[str, None]] = {}
    for site in sites:
        if (site.tensor, site.spec.axis) in wishes:
            observed.setdefault(site.scope, {})[site.tensor] = None
    return {scope: list(names) for scope, names in observed.items()}


def _told(units: Iterable[Unit], advance: Callable[[int], None] | None) -> Iterator[Unit]:
    """The same units; who asked hears how far the walk is."""
    for unit in units:
        yield unit
        if advance is not None:
            advance(int(unit.closes))


__all__ = ["Seen", "Shard", "merge", "observe", "shardable", "sites_of"]
