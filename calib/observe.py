"""Runs the segments over the data and lets observers see what comes out."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from sbonnx.calib.nonfinite import blame
from sbonnx.calib.observers import Observer, make_observer
from sbonnx.calib.progress import Progress
from sbonnx.calib.rows import Unit
from sbonnx.calib.runner import LayerRunner
from sbonnx.calib.segments import Segment
from sbonnx.calib.store import TensorStore
from sbonnx.graph import Graph
from sbonnx.graph.query import tensors_by_name
from sbonnx.plan.types import ObserverChoice

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Watch:
    """One observer on one tensor: sites that want the same share it."""

    tensor: str
    observer: str
    axis: int | None
    arguments: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, tensor: str, choice: ObserverChoice, axis: int | None) -> Watch:
        """The watch for a site's tensor, observer and channel axis."""
        return cls(tensor, choice.name, axis, tuple(sorted(choice.arguments.items())))

    def make(self) -> Observer:
        """A fresh observer."""
        return make_observer(self.observer, self.axis, dict(self.arguments))


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_order(work: Callable[[T], R], items: Iterator[T], workers: int) -> Iterator[tuple[T, R]]:
    """`work` on every item by several threads, results in the order of the items, few items under way at once."""
    if workers == 1:
        yield from ((item, work(item)) for item in items)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="sbonnx-calib") as pool:
        under_way: deque[tuple[T, Future[R]]] = deque()
        try:
            for item in items:
                under_way.append((item, pool.submit(work, item)))
                if len(under_way) > 2 * workers:
                    first, result = under_way.popleft()
                    yield first, result.result()
            while under_way:
                first, result = under_way.popleft()
                yield first, result.result()
        finally:
            for _, result in under_way:
                result.cancel()


class Observation:
    """Observers over segments: what each saw, merged over threads in an order that does not matter or is kept.

    Order-free observers have one instance a thread, merged at the end; for the others every sample has a fresh
    instance, merged in the order of the data.

    Args:
        graph: the model.
        segments: in the order to run them.
        watches: what to observe; each tensor is in `observed` of one segment.
        device, workers: where the sessions run, and how many samples at a time.
    """

    def __init__(
        self, graph: Graph, segments: Sequence[Segment], watches: Sequence[Watch], *, device: str, workers: int
    ) -> None:
        self.graph = graph
        self.segments = tuple(segments)
        self.workers = workers
        self.samples = 0
        self._device = device
        self._index = tensors_by_name(graph)
        self._by_tensor: dict[str, list[Watch]] = {}
        for watch in dict.fromkeys(watches):
            self._by_tensor.setdefault(watch.tensor, []).append(watch)
        self.found = {watch: watch.make() for watch in watches}
        self._apart: list[dict[Watch, Observer]] = []
        self._local = threading.local()
        self._stack = ExitStack()
        self._runs: list[LayerRunner | None] = []

    def stream(self, units: Iterator[Unit], keep: Sequence[str] = ()) -> Iterator[tuple[Unit, dict[str, Any]]]:
        """Each sample through all segments: (unit, values of `keep`), in the order of the data.

        Nothing else is kept: data of any length runs in flat memory. The sessions stay open until `close`.
        """
        last = {name: number for number, segment in enumerate(self.segments) for name in segment.reads}
        last.update(dict.fromkeys(keep, len(self.segments)))
        if not self._runs:
            self._runs = [self._open(self._stack, segment) for segment in self.segments]

        def work(unit: Unit) -> tuple[dict[str, Any], dict[Watch, Observer]]:
            known: dict[str, Any] = dict(unit.feed)
            ordered: dict[Watch, Observer] = {}
            for number, (segment, run) in enumerate(zip(self.segments, self._runs, strict=True)):
                self._step(segment, run, known, unit, ordered)
                for name in [name for name in known if last.get(name, -1) <= number]:
                    del known[name]
            return {name: known[name] for name in keep}, ordered

        for unit, (kept, ordered) in in_order(work, units, self.workers):
            self._collect(unit, ordered)
            yield unit, kept
        self._merge()

    def close(self) -> None:
        """Free the sessions. Twice is once."""
        self._stack.close()
        self._runs = []

    def layerwise(self, units: Iterator[Unit], store: TensorStore, progress: Progress) -> None:
        """All samples through a segment, then through the next; activations between wait in the store."""
        readers: dict[str, int] = {}
        for segment in self.segments[1:]:
            for name in segment.reads:
                readers[name] = readers.get(name, 0) + 1
        places: list[Unit] = []
        for number, segment in enumerate(self.segments):
            with ExitStack() as stack:
                run = self._open(stack, segment)

                def work(unit: Unit, number: int = number, segment: Segment = segment, run: Any = run) -> Any:
                    known = dict(unit.feed) if number == 0 else _fetch(store, unit.index, segment.reads)
                    before = set() if number == 0 else set(known)
                    ordered: dict[Watch, Observer] = {}
                    self._step(segment, run, known, unit, ordered)
                    for name in known.keys() - before:
                        store.put((unit.index, name), known[name], readers=readers.get(name, 0))
                    return ordered

                for unit, ordered in in_order(work, units if number == 0 else iter(places), self.workers):
                    if number == 0:
                        places.append(Unit(unit.index, unit.where, {}, unit.samples, unit.closes))
                    self._collect(unit, ordered, counts=number == 0)
                    progress.advance(int(unit.closes))
        self._merge()

    def _open(self, stack: ExitStack, segment: Segment) -> LayerRunner | None:
        """A session for a segment, or None where there is nothing to run. One thread: the same sums on any machine."""
        if not segment.outputs:
            return None
        model = segment.model(self.graph, self._index)
        name = f"the branch '{segment.scope}'" if segment.scope else "the model"
        return stack.enter_context(LayerRunner(model, device=self._device, threads=1, name=name))

    def _step(
        self,
        segment: Segment,
        run: LayerRunner | None,
        known: dict[str, Any],
        unit: Unit,
        ordered: dict[Watch, Observer],
    ) -> None:
        """One sample through one segment: its outputs into `known`, its observed tensors to the observers."""
        for name, value in segment.conditions:
            if name not in known or bool(np.asarray(known[name]).item()) != value:
                return
        if run is not None:
            known.update(run.run(known, segment.outputs, where=unit.where))
        mine = self._mine()
        for tensor in segment.observed:
            for watch in self._by_tensor.get(tensor, ()):
                observer = mine.get(watch)
                if observer is None:
                    observer = ordered[watch] = watch.make()
                before = observer.nan + observer.inf
                observer.observe(known[tensor])
                if observer.nan + observer.inf > before:
                    raise blame(self.graph, segment, tensor, known, unit)

    def _mine(self) -> dict[Watch, Observer]:
        """This thread's order-free observers."""
        mine: dict[Watch, Observer] | None = getattr(self._local, "mine", None)
        if mine is None:
            mine = {watch: watch.make() for watch, observer in self.found.items() if observer.order_free}
            self._local.mine = mine
            self._apart.append(mine)
        return mine

    def _collect(self, unit: Unit, ordered: Mapping[Watch, Observer], *, counts: bool = True) -> None:
        """Take in what one sample gave the observers that depend on the order."""
        if counts:
            self.samples += unit.samples
        for watch, observer in ordered.items():
            self.found[watch].merge(observer)

    def _merge(self) -> None:
        """Take in what the threads saw."""
        for mine in self._apart:
            for watch, observer in mine.items():
                self.found[watch].merge(observer)
        self._apart.clear()
        self._local = threading.local()  # what the threads hold is taken in: they must begin anew


def _fetch(store: TensorStore, index: int, names: Sequence[str]) -> dict[str, Any]:
    """What a segment reads of one sample; what a branch that did not run would have given is missing."""
    return {name: store.take((index, name)) for name in names if (index, name) in store}
