"""`Calibrator`: observes feeds and derives the range of every activation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Any

import numpy as np

from sbonnx.calib.cache.forward_count import count as counted
from sbonnx.calib.cache.resume import CHECKPOINT_EVERY, EVERYTHING, Recall
from sbonnx.calib.data import Feed
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.canonical_order import canonical_units
from sbonnx.calib.engine.observation import Key, Observation, Wish, wishes_of
from sbonnx.calib.engine.runner import CPU, providers, settings
from sbonnx.calib.engine.sample_splitter import Rows, Unit
from sbonnx.calib.engine.schedule import branches_of, course_of
from sbonnx.calib.engine.segments import Granularity
from sbonnx.calib.observers import make_observer
from sbonnx.calib.qparams.solve import Solve, solution_of
from sbonnx.calib.quantized.state import Walked
from sbonnx.calib.quantized.stream import Asym, walk_quantized
from sbonnx.calib.sketches import Sketch
from sbonnx.calib.storage.tensor_store import TensorStore, parse_size
from sbonnx.calib.workers.shards import Shards, one_process
from sbonnx.cpu import cores
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.graph.query import tensors_by_name
from sbonnx.plan.types import Plan, Solution
from sbonnx.progress import Progress
from sbonnx.reconstruct.blockwise import walk_blocks, wants_blocks
from sbonnx.reconstruct.layer_fit import said
from sbonnx.reconstruct.layerwise import Reconstruction, walk_rounding
from sbonnx.report import Refusal
from sbonnx.spec import Bounds

Stream = Callable[[Iterator[Unit]], Iterator[tuple[Unit, dict[str, Any]]]]
"""Runs samples through the segments and yields them in order, each with its outputs."""


class Calibrator:
    """Observes feeds, then solves for scales and zero points. Holds sessions from the first feed until `close`.

        with Calibrator(graph, plan) as calibrator:
            for feeds in batches:
                outputs = calibrator.observe(feeds)
            solution = calibrator.finish()

    Args: see `calibrate`. With `tolerant`, non-finite values are counted instead of raising an error.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        *,
        device: str = "cpu",
        granularity: Granularity = "auto",
        memory: str | int = "2 GiB",
        threads: int | None = None,
        workers: int = 1,
        cache: str | os.PathLike[str] | None = None,
        tolerant: bool = False,
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.notes: tuple[str, ...] = ()
        self._device = device
        self._tolerant = tolerant
        self._granularity: Granularity = granularity
        self._memory = parse_size(memory)
        self._threads = threads or (cores() if providers(device)[0] == CPU else 1)
        self._workers = workers
        alone = one_process(workers, granularity, settings(device)["provider"])
        if alone is not None:
            self._workers, self.notes = 1, (alone,)
        self._cache = cache
        self._rows = Rows(graph, device=device)
        self._sites = {site.key: site for site in plan.of_role("activation") if site.fixed is None}
        self._wishes = wishes_of(self._sites.values())
        if cache is not None:
            self._wishes = dict.fromkeys(self._wishes, EVERYTHING)
        self._known: dict[Key, Sketch] = {}  # statistics read from the cache
        self._observation: Observation | None = None
        self._units = 0

    def observe(self, feeds: Feed) -> Feed:
        """Observe one feed, in the model's types, and return the outputs of the float model by name.

        Raises: see `calibrate`.
        """
        names = [tensor.name for tensor in self.graph.outputs]
        observation, units = self._begin([("this feed", feeds)], 1, self._wishes, kept=names)
        parts = [known for _, known in observation.stream(units, keep=names)]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def observe_all(self, data: Dataset, progress: Progress) -> None:
        """Observe a whole data set, several samples at a time. With a cache, only tensors that are not in it.

        Raises: see `calibrate`.
        """
        progress.start("calibrate", data.count)
        if self._cache is None:
            observation, units = self._begin(data.items(), data.count, self._wishes)
            self._run(observation, units, data.count, progress)
            return
        recall = Recall(self._cache, self.graph, data, settings(self._device))
        self._known = recall.known(self._wishes)
        missing = {key: wish for key, wish in self._wishes.items() if key not in self._known}
        if missing:
            observation, units = self._begin(data.items(), data.count, missing)
            self._run_remembered(observation, units, data.count, missing, recall, progress)
        self.notes += recall.notes

    def _run(self, observation: Observation, units: Iterator[Unit], count: int | None, progress: Progress) -> None:
        """Run all samples through all segments."""
        if self._granularity == "layer":
            with TensorStore(self._memory) as store:
                for _ in observation.layerwise(units, store, progress):
                    pass
            counted(observation.samples)
            return
        with self._streaming(observation, count) as stream:
            for unit, _ in stream(units):
                counted(unit.samples)
                progress.advance(int(unit.closes))

    @contextmanager
    def _streaming(self, observation: Observation, count: int | None) -> Iterator[Stream]:
        """Yield the function that runs samples through the observation, in this process or in several."""
        if self._workers == 1:
            yield observation.stream
            return
        with Shards(observation, self._workers, count=count) as shards:
            yield shards.stream

    def _run_remembered(
        self,
        observation: Observation,
        units: Iterator[Unit],
        count: int | None,
        wishes: Mapping[Key, Wish],
        recall: Recall,
        progress: Progress,
    ) -> None:
        """Run all samples as `_run` does; cache each sketch when it is complete, and the progress in between."""
        if self._granularity == "layer":
            with TensorStore(self._memory) as store:
                for done in observation.layerwise(units, store, progress):
                    recall.keep({key: sketch for key, sketch in observation.found().items() if key[0] in done})
            counted(observation.samples)
        else:
            first, sketches = recall.resume(wishes)
            observation.add(sketches)
            for unit in units:
                if unit.index >= first:
                    units = chain([unit], units)
                    break
                progress.advance(int(unit.closes))
            with self._streaming(observation, count) as stream:
                self._in_rounds(observation, stream, units, recall, progress)
        recall.keep(observation.found())
        recall.done()

    def _in_rounds(
        self, observation: Observation, stream: Stream, units: Iterator[Unit], recall: Recall, progress: Progress
    ) -> None:
        """Run samples for `CHECKPOINT_EVERY` seconds, write a checkpoint, and repeat."""
        while True:
            last = None
            for last, _ in stream(_until(units, time.monotonic() + CHECKPOINT_EVERY)):
                counted(last.samples)
                progress.advance(int(last.closes))
            following = None if last is None else next(units, None)
            if last is None or following is None:
                return
            recall.checkpoint(last.index + 1, observation.found())
            units = chain([following], units)

    def sketches(self) -> dict[Key, Sketch]:
        """Return the statistics of each tensor so far.

        Raises:
            DataError: nothing was observed.
        """
        found = {**self._known, **({} if self._observation is None else self._observation.found())}
        if self.samples == 0:
            raise DataError("nothing was observed: calibration needs at least one feed")
        return found

    @property
    def samples(self) -> int:
        """Number of samples observed, in this run or in the earlier runs that wrote the cached statistics."""
        seen = 0 if self._observation is None else self._observation.samples
        return max([seen, *(sketch.samples for sketch in self._known.values())])

    def ranges(self) -> tuple[dict[str, Bounds], list[Refusal]]:
        """Return measured ranges by site key, and refusals of sites whose group has no measured or fixed range.

        Raises:
            DataError: nothing was observed.
        """
        found = self.sketches()
        bounds = {
            key: make_observer(site.observer.name, site.observer.arguments).bounds(
                sketch, site.spec, self.plan.scale_rule
            )
            for key, site in self._sites.items()
            if (sketch := found[site.tensor, site.spec.axis]).finite
        }
        reached = {site.group for site in self.plan.sites if site.key in bounds or site.fixed is not None}
        lost = [site for site in self.plan.of_role("activation") if site.group not in reached]
        unreachable = branches_of(self.graph, self._observed(self._wishes))[1] if lost else {}
        refusals = []
        for site in lost:
            where = "its branch never ran" if site.scope else "it held no values"
            why = unreachable.get(site.scope, f"{where} on the calibration data")
            refusals.append(Refusal("quantize", site.tensor, why))
        return bounds, refusals

    def finish(self, solve: Solve | None = None) -> Solution:
        """Compute the solution from everything observed so far.

        Raises:
            DataError: nothing was observed.
        """
        bounds, refusals = self.ranges()
        return self._solution(Walked(bounds, {}, {}), refusals, solve)

    def finish_asym(self, asym: Asym, data: Dataset, solve: Solve | None, progress: Progress) -> Solution:
        """Compute the solution with ranges measured a second time, on inputs from quantized layers.

        Args:
            asym: what to quantize, and what is measured on quantized inputs. If no range can change, the data are not
                run again.
            data: the observed data set.
            solve, progress: see `calibrate`.

        Raises:
            DataError: nothing was observed.
            NumericError, ModelError, DeviceError: see `walk_quantized`.
        """
        bounds, refusals = self.ranges()
        if not asym.moves_ranges:
            return self._solution(Walked(bounds, {}, {}), refusals, solve)
        self.close()
        walked = walk_quantized(
            self.graph,
            self.plan,
            self._rows.units(data.items()),
            bounds,
            asym=asym,
            solve=solve,
            device=self._device,
            threads=self._threads,
            memory=self._memory,
            progress=progress,
            count=data.count,
        )
        return self._solution(walked, refusals, solve)

    def finish_rounding(
        self, options: Reconstruction, asym: Asym | None, data: Dataset, solve: Solve | None, progress: Progress
    ) -> Solution:
        """Compute the solution with weights rounded using the input activations of their layers; see `walk_rounding`.

        Args:
            options: settings of the rounding methods.
            asym: measure activation ranges on quantized inputs during the walk. None: use the ranges of the float
                model.
            data: the observed data set.
            solve, progress: see `calibrate`; `solve` rounds the weights that need no input activations.

        Raises:
            DataError: nothing was observed.
            NumericError, ModelError, DeviceError: see `walk_rounding`.
        """
        bounds, refusals = self.ranges() if self._sites else ({}, [])
        self.close()
        with canonical_units(self._rows.units(data.items()), self._memory) as units:
            walked = walk_rounding(
                self.graph,
                self.plan,
                units,
                bounds,
                options=options,
                asym=asym,
                samples=self.samples or units.samples,
                device=self._device,
                threads=self._threads,
                memory=self._memory,
                progress=progress,
                count=data.count,
            )
            if wants_blocks(self.plan):
                walked = walk_blocks(
                    self.graph,
                    self.plan,
                    units,
                    walked,
                    seed=options.seed,
                    device=self._device,
                    threads=self._threads,
                    memory=self._memory,
                    progress=progress,
                )
        return self._solution(walked, [*refusals, *walked.refusals], solve)

    def _solution(self, walked: Walked, refusals: Sequence[Refusal], solve: Solve | None) -> Solution:
        """Compute the solution for these ranges and quantized values."""
        solution = solution_of(
            self.plan,
            tensors_by_name(self.graph),
            walked.bounds,
            refusals,
            walked.solve(solve),
            self.samples,
            chosen=walked.qparams,
            constants=walked.constants,
        )
        gains = {key: gain for key, gain in walked.gains.items() if key in solution.codes}
        return replace(solution, notes=(*self.notes, *solution.notes, *said(gains)), gains=gains)

    def close(self) -> None:
        """Free the sessions. Idempotent."""
        if self._observation is not None:
            self._observation.close()

    def __enter__(self) -> Calibrator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _observed(self, wishes: Mapping[Key, Wish]) -> dict[str, list[str]]:
        """Return the tensors to observe by scope."""
        observed: dict[str, dict[str, None]] = {}
        for site in self._sites.values():
            if (site.tensor, site.spec.axis) in wishes:
                observed.setdefault(site.scope, {})[site.tensor] = None
        return {scope: list(names) for scope, names in observed.items()}

    def _begin(
        self,
        items: Iterable[tuple[str, Feed]],
        count: int | None,
        wishes: Mapping[Key, Wish],
        kept: Sequence[str] = (),
    ) -> tuple[Observation, Iterator[Unit]]:
        """Return the observation and the samples to run.

        The observation is created at the first feed, because the sizes of that feed decide how the graph is split.
        """
        units = self._counted(self._rows.units(items, self._units))
        if self._observation is not None:
            return self._observation, units
        first = next(units, None)
        if first is None:
            raise DataError("the data holds no feeds: calibration needs at least one")
        course = course_of(
            self.graph,
            self._observed(wishes),
            wishes,
            first,
            kept=kept,
            granularity=self._granularity,
            memory=self._memory,
            count=count,
        )
        self._observation = Observation(
            self.graph,
            course.segments,
            wishes,
            device=self._device,
            threads=max(1, min(self._threads, self._memory // max(course.peak, 1))),
            any_layout=course.any_layout,
            tolerant=self._tolerant,
        )
        return self._observation, chain([first], units)

    def _counted(self, units: Iterator[Unit]) -> Iterator[Unit]:
        """Yield the samples unchanged and track the index at which the next feed continues."""
        for unit in units:
            self._units = unit.index + 1
            yield unit


def _until(units: Iterator[Unit], deadline: float) -> Iterator[Unit]:
    """Yield samples until the deadline, at least one; the rest stay in `units`."""
    for unit in units:
        yield unit
        if time.monotonic() >= deadline:
            return
