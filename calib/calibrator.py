"""`calibrate` and `Calibrator`: observe feeds and derive the range of every activation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from sbonnx.calib.cache.sketch_cache import CHECKPOINT_EVERY, EVERYTHING, CalibrationCache
from sbonnx.calib.data import Feed
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.observation import Observation, requests_of
from sbonnx.calib.engine.runner import samples_at_once, settings
from sbonnx.calib.engine.sample_runner import Key, StatsRequest
from sbonnx.calib.engine.samples import Samples, SampleSplitter
from sbonnx.calib.engine.schedule import branches_of, schedule_of
from sbonnx.calib.observers import make_observer
from sbonnx.calib.qparams.mask_ranges import without_masks
from sbonnx.calib.sketches import Sketch
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.options import RunOptions
from sbonnx.patterns.blocks.masks import mask_ways
from sbonnx.planning.types import Plan, Site
from sbonnx.progress import count_samples
from sbonnx.report import Note, Reason, Refusal
from sbonnx.spec import Bounds


@dataclass(frozen=True)
class MeasuredRanges:
    """Ranges of the activations of a plan in the float network.

    Attributes:
        bounds: by site key.
        refusals: sites whose group has neither a measured nor a fixed range.
        samples: number of samples observed.
        notes: about the measurement.
        groups: group of each site by its key: sites of one group share a scale.
    """

    bounds: Mapping[str, Bounds]
    refusals: tuple[Refusal, ...] = ()
    samples: int = 0
    notes: tuple[Note, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)


class Calibrator:
    """Observes feeds, then gives the ranges. Holds sessions from the first feed until `close`.

        with Calibrator(graph, plan) as calibrator:
            for feeds in batches:
                outputs = calibrator.observe(feeds)
            ranges = calibrator.ranges()

    Args:
        graph: simplified and fused; not changed.
        plan: the sites to measure.
        options: see `RunOptions`.
        tolerant: count non-finite values instead of raising an error.
    """

    def __init__(self, graph: Graph, plan: Plan, options: RunOptions | None = None, *, tolerant: bool = False) -> None:
        self.graph = graph
        self.plan = plan
        self.options = options or RunOptions()
        self._notes: tuple[Note, ...] = ()
        self._tolerant = tolerant
        self._memory = self.options.memory_bytes
        self._threads = samples_at_once(self.options)
        self._rows = SampleSplitter(graph, device=self.options.device)
        self._sites = {site.key: site for site in plan.of_role("activation") if site.fixed is None}
        self._ways = mask_ways(graph)
        self._requests = requests_of(self._sites.values(), self._ways)
        if self.options.cache is not None:
            self._requests = dict.fromkeys(self._requests, EVERYTHING)
        self._known: dict[Key, Sketch] = {}  # statistics read from the cache
        self._observation: Observation | None = None
        self._units = 0
        self._in_memory = 1  # calibrators that hold activations at the same time

    def observe(self, feeds: Feed) -> Feed:
        """Observe one feed, in the model's types, and return the outputs of the float model by name.

        Raises: see `calibrate`.
        """
        names = [tensor.name for tensor in self.graph.outputs]
        units = self._rows.units([("this feed", feeds)], self._units)
        observation, units = self._begin(units, 1, self._requests, kept=names)
        parts = [tensors for _, tensors in observation.stream(units, keep=names)]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def observe_all(self, samples: Samples, beside: Calibrator | None = None) -> None:
        """Observe all samples, several at a time. With a cache, only tensors that are not in it; without any, no cache.

        Args:
            beside: another calibrator, which observes the samples in the same pass, with its own sessions and without a
                cache.

        Raises: see `calibrate`.
        """
        data = samples.data
        self.options.progress.start("calibrate", data.count)
        if beside is None:
            units = samples.units(self._units)
        else:
            self._in_memory = beside._in_memory = 2
            units = beside._passing(samples)
        if self.options.cache is None or not self._requests:
            observation, units = self._begin(units, data.count, self._requests)
            self._run(observation, units)
            return
        cache = CalibrationCache(self.options.cache, self.graph, data, settings(self.options.device))
        self._known = cache.load(self._requests)
        missing = {key: request for key, request in self._requests.items() if key not in self._known}
        if missing:
            observation, units = self._begin(units, data.count, missing)
            self._run_remembered(observation, units, missing, cache)
        elif beside is not None:
            for unit in units:
                self._count(unit)
        self._notes += cache.notes

    def _passing(self, samples: Samples) -> Iterator[Sample]:
        """Yield all samples, each after it was observed."""
        observation, units = self._begin(samples.units(), samples.data.count, self._requests)
        for unit, _ in observation.stream(units):
            yield unit

    def _run(self, observation: Observation, units: Iterator[Sample]) -> None:
        """Run all samples through all segments."""
        if self.options.granularity == "layer":
            with TensorStore(self._memory) as store:
                for _ in observation.layerwise(units, store, self.options.progress):
                    pass
            count_samples(self.options.progress, observation.samples)
            return
        for unit, _ in observation.stream(units):
            self._count(unit)

    def _count(self, unit: Sample) -> None:
        count_samples(self.options.progress, unit.samples)
        self.options.progress.advance(int(unit.closes))

    def _run_remembered(
        self,
        observation: Observation,
        units: Iterator[Sample],
        requests: Mapping[Key, StatsRequest],
        cache: CalibrationCache,
    ) -> None:
        """Run all samples as `_run` does; cache each sketch when it is complete, and the progress in between."""
        if self.options.granularity == "layer":
            with TensorStore(self._memory) as store:
                for done in observation.layerwise(units, store, self.options.progress):
                    cache.save({key: sketch for key, sketch in observation.found().items() if key[0] in done})
            count_samples(self.options.progress, observation.samples)
        else:
            first, sketches = cache.resume(requests)
            observation.add(sketches)
            for unit in units:
                if unit.index >= first:
                    self._run_with_checkpoints(observation, chain([unit], units), cache)
                    break
                self.options.progress.advance(int(unit.closes))
        cache.save(observation.found())
        cache.finish()

    def _run_with_checkpoints(self, observation: Observation, units: Iterator[Sample], cache: CalibrationCache) -> None:
        """Run samples for `CHECKPOINT_EVERY` seconds, write a checkpoint, and repeat."""
        while True:
            last = None
            for last, _ in observation.stream(_until(units, time.monotonic() + CHECKPOINT_EVERY)):
                self._count(last)
            following = None if last is None else next(units, None)
            if last is None or following is None:
                return
            cache.save_checkpoint(last.index + 1, observation.found())
            units = chain([following], units)

    def sketches(self) -> dict[Key, Sketch]:
        """Return the statistics of each tensor so far.

        Raises:
            DataError: nothing was observed.
        """
        sketches = {**self._known, **({} if self._observation is None else self._observation.found())}
        if self.samples == 0:
            raise DataError("nothing was observed: calibration needs at least one feed")
        return sketches

    @property
    def samples(self) -> int:
        """Number of samples observed, in this run or in the earlier runs that wrote the cached statistics."""
        seen = 0 if self._observation is None else self._observation.samples
        return max([seen, *(sketch.samples for sketch in self._known.values())])

    def ranges(self) -> MeasuredRanges:
        """Return the ranges of everything observed so far.

        Raises:
            DataError: nothing was observed.
        """
        sketches = self.sketches()
        bounds = self._solved(sketches)
        reached = {site.group for site in self.plan.sites if site.key in bounds or site.fixed is not None}
        lost = [site for site in self.plan.of_role("activation") if site.group not in reached]
        unreachable = branches_of(self.graph, self._observed(self._requests))[1] if lost else {}
        refusals = []
        for site in lost:
            where = "its branch never ran" if site.scope else "it held no values"
            why = unreachable.get(site.scope, Reason("no-values", f"{where} on the calibration data"))
            refusals.append(Refusal("quantize", site.tensor, why))
        groups = {site.key: site.group for site in self.plan.of_role("activation")}
        return MeasuredRanges(bounds, tuple(refusals), self.samples, self._notes, groups)

    def _solved(self, found: Mapping[Key, Sketch]) -> dict[str, Bounds]:
        """Compute the ranges of the sites that have values, by site key; sites with equal settings together."""
        alike: dict[str, list[Site]] = {}
        for site in self._sites.values():
            if found[site.tensor, site.spec.axis].finite:
                alike.setdefault(repr((site.observer, site.spec)), []).append(site)
        solved: dict[str, Bounds] = {}
        for sites in alike.values():
            first = sites[0]
            observer = make_observer(first.observer.name, first.observer.arguments)
            sketches = []
            for site in sites:
                sketch, note = without_masks(site, found[site.tensor, site.spec.axis], self._ways)
                sketches.append(sketch)
                if note is not None and note not in self._notes:
                    self._notes += (note,)
            ranges = observer.bounds_of(sketches, first.spec, self.plan.scale_rule)
            solved.update((site.key, bounds) for site, bounds in zip(sites, ranges, strict=True))
        return {key: solved[key] for key in self._sites if key in solved}

    def close(self) -> None:
        """Free the sessions. Idempotent."""
        if self._observation is not None:
            self._observation.close()

    def __enter__(self) -> Calibrator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _observed(self, requests: Mapping[Key, StatsRequest]) -> dict[str, list[str]]:
        observed: dict[str, dict[str, None]] = {}
        for site in self._sites.values():
            if (site.tensor, site.spec.axis) in requests:
                observed.setdefault(site.scope, {})[site.tensor] = None
        return {scope: list(names) for scope, names in observed.items()}

    def _begin(
        self,
        units: Iterator[Sample],
        count: int | None,
        requests: Mapping[Key, StatsRequest],
        kept: Sequence[str] = (),
    ) -> tuple[Observation, Iterator[Sample]]:
        """Return the observation and the samples to run.

        The observation is created at the first feed, because the sizes of that feed decide how the graph is split.
        """
        units = self._counted(units)
        if self._observation is not None:
            return self._observation, units
        first = next(units, None)
        if first is None:
            raise DataError("the data holds no feeds: calibration needs at least one")
        schedule = schedule_of(
            self.graph,
            self._observed(requests),
            requests,
            first,
            kept=kept,
            options=self.options,
            count=count,
        )
        self._observation = Observation(
            self.graph,
            schedule.segments,
            requests,
            device=self.options.device,
            threads=max(1, min(self._threads, self._memory // (self._in_memory * max(schedule.peak, 1)))),
            any_layout=schedule.any_layout,
            tolerant=self._tolerant,
        )
        return self._observation, chain([first], units)

    def _counted(self, units: Iterator[Sample]) -> Iterator[Sample]:
        """Yield the samples unchanged and track the index at which the next feed continues."""
        for unit in units:
            self._units = unit.index + 1
            yield unit


def calibrate(graph: Graph, plan: Plan, samples: Samples, beside: Calibrator | None = None) -> MeasuredRanges:
    """Measure the activations of `plan` in the float network.

    Samples are streamed through onnxruntime sessions over `graph`. The result is bit-identical for any batch size (see
    `SampleSplitter`) and number of threads, and, except for the moving average, any order of the data. At another
    granularity, ranges may differ in their last bits: where a segment ends, onnxruntime may sum in another layout.

    Args:
        graph: simplified and fused; not changed.
        plan: the sites to measure.
        samples: of the graph.
        beside: see `Calibrator.observe_all`.

    Raises:
        DataError: no data, or data that does not fit the model.
        NumericError: NaN or Inf in an activation; the message names the sample and the first layer.
        ModelError, DeviceError: see `LayerRunner`.
    """
    with Calibrator(graph, plan, samples.options) as calibrator:
        calibrator.observe_all(samples, beside)
        return calibrator.ranges()


def _until(units: Iterator[Sample], deadline: float) -> Iterator[Sample]:
    """Yield samples until the deadline, at least one; the rest stay in `units`."""
    for unit in units:
        yield unit
        if time.monotonic() >= deadline:
            return
