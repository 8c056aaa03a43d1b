"""Runs all samples through one segment of a graph, then through the next: the only loop of this kind.

`run_layerwise` fetches the inputs of a segment, runs it in each stream (float, quantized), keeps what later segments
read, and hands the tensors to a `LayerVisitor`. `run_float` is the pass through the whole float network.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.runner import LayerRunner, samples_at_once
from sbonnx.calib.engine.samples import CanonicalSamples, micro_batches
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.engine.threads import chunks, in_order
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.graph import Graph
from sbonnx.graph.query import tensors_by_name
from sbonnx.progress import Progress
from sbonnx.spec import Array

R = TypeVar("R")

Step = Callable[[LayerRunner | None, dict[str, Any], Sample], None]
"""Runs one sample through a segment in one stream: session, known tensors, sample. Outputs are added to the tensors."""


class LayerVisitor(ABC, Generic[R]):
    """The part of a layer-wise run that depends on its purpose.

    Attributes:
        chunk: samples that a thread takes at a time.
        least: seconds that a sample must take for threads to be used; see `in_order`.
        recompute: cached activations may be recomputed by the sessions instead of being kept.
        overwrites: outputs are in buffers that the next run overwrites, so that the cache must copy them.
    """

    chunk: ClassVar[int] = 1
    least: ClassVar[float] = 0.0
    recompute: ClassVar[bool] = True
    overwrites: ClassVar[bool] = False

    @abstractmethod
    def open(self, stack: ExitStack, number: int, segment: Segment) -> Sequence[LayerRunner | None]:
        """Open the session of each stream for a segment, closed by `stack`; None: there is nothing to run."""

    def reserve(self, number: int, segment: Segment) -> AbstractContextManager[Step]:
        """Reserve what one thread needs to run the samples of a chunk, and return the function that runs one.

        The function runs a sample through the segment in one stream and adds the outputs to its known tensors. They
        may be in buffers that its next call overwrites: no other thread may get those before the context ends.
        """

        def step(run: LayerRunner | None, known: dict[str, Any], unit: Sample) -> None:
            if run is not None:
                known.update(run.run(known, segment.outputs, where=unit.where))

        return nullcontext(step)

    @abstractmethod
    def visit(self, number: int, unit: Sample, streams: Sequence[dict[str, Any]]) -> R:
        """Compute the result of a sample from the known tensors of each stream. Thread-safe."""

    def take(self, number: int, unit: Sample, result: R) -> None:
        """Take the result of a sample, in the order of the samples."""

    def close(self, segment: Segment) -> None:
        """End a segment, before its sessions are closed."""


def run_layerwise(
    segments: Sequence[Segment],
    units: Iterable[Sample],
    stores: Sequence[TensorStore],
    visitor: LayerVisitor[R],
    threads: int,
    progress: Progress,
) -> Iterator[Segment]:
    """Run all samples through each segment in turn.

    Args:
        segments: in the order to run them.
        units: the samples; iterated once.
        stores: one for each stream: activations between segments.
        visitor: opens sessions, runs them and takes the results.
        threads: samples that run at a time.
        progress: set to the segment, and advanced by feeds.

    Yields:
        each segment when all samples passed it and its sessions are closed, before the next one begins.
    """
    caches = [ActivationCache(segments, store) for store in stores]
    places: list[Sample] = []
    with ExitStack() as lasting:
        for number, segment in enumerate(segments):
            spilled = sum(store.counters.spilled for store in stores)
            progress.state(segment=(number + 1, len(segments)), spilled=spilled)
            with ExitStack() as stack:
                runs = visitor.open(stack, number, segment)

                def work(
                    some: list[Sample],
                    number: int = number,
                    segment: Segment = segment,
                    runs: Sequence[LayerRunner | None] = runs,
                ) -> list[R]:
                    with visitor.reserve(number, segment) as step:
                        return [_one_sample(step, number, unit, caches, runs, visitor) for unit in some]

                source = chunks(iter(units if number == 0 else places), visitor.chunk)
                for some, results in in_order(work, source, threads, least=visitor.least * visitor.chunk):
                    for unit, result in zip(some, results, strict=True):
                        visitor.take(number, unit, result)
                    if number == 0:
                        places.extend(unit.bare for unit in some)
                    progress.advance(sum(part.closes for unit in some for part in unit.members))
                visitor.close(segment)
                if any(number in cache.lasting for cache in caches):
                    lasting.push(stack.pop_all())
            yield segment


def run_two_streams(
    graph: Graph,
    segments: Sequence[Segment],
    names: Sequence[str],
    samples: CanonicalSamples,
    visitor: LayerVisitor[R],
) -> Iterator[Segment]:
    """Run micro-batches of all samples through each segment in turn, in two streams; see `run_layerwise`.

    Args:
        graph: that the segments are pieces of.
        names: tensors that are read sample by sample, see `width_for`.
    """
    options = samples.options
    with TensorStore(samples.memory // 2) as first, TensorStore(samples.memory // 2) as second:
        batches = micro_batches(graph, names, samples, options)
        stores, threads = [first, second], samples_at_once(options)
        yield from run_layerwise(segments, batches, stores, visitor, threads, options.progress)


def _one_sample(
    step: Step,
    number: int,
    unit: Sample,
    caches: Sequence[ActivationCache],
    runs: Sequence[LayerRunner | None],
    visitor: LayerVisitor[R],
) -> R:
    """Run one sample through a segment in every stream."""
    streams = []
    for cache, run in zip(caches, runs, strict=True):
        tensors = cache.fetch(number, unit)
        began = time.perf_counter()
        step(run, tensors, unit)
        seconds = time.perf_counter() - began
        recomputed_by = run if visitor.recompute else None
        # the arrays of the first segment may be those of a reader, which may overwrite them too
        cache.keep(number, unit, recomputed_by, tensors, seconds, copy=visitor.overwrites or number == 0)
        streams.append(tensors)
    return visitor.visit(number, unit, streams)


def run_float(
    graph: Graph,
    names: Iterable[str],
    samples: CanonicalSamples,
    visit: Callable[[Sample, Mapping[str, Any]], R],
    most: int | None = None,
) -> Iterator[tuple[Sample, R]]:
    """Run all samples through the float network once; yield the results of `visit` in the order of the samples.

    Args:
        names: tensors to compute; those that no node computes are skipped.
        visit: called with a sample and its known tensors, inputs included, in any thread.
        most: run the first samples only; None: all.
    """
    outputs = {tensor.name for node in graph.nodes for tensor in node.outputs}
    wanted = tuple(name for name in dict.fromkeys(names) if name in outputs)
    with ExitStack() as stack:
        run: LayerRunner | None = None
        if wanted:
            inputs = tuple(tensor.name for tensor in graph.inputs)
            piece = Segment(inputs, wanted, wanted).model(graph, tensors_by_name(graph))
            run = stack.enter_context(LayerRunner(piece, device=samples.options.device, threads=1))

        def work(unit: Sample) -> R:
            computed = {} if run is None else run.run(unit.feed, wanted, where=unit.where)
            return visit(unit, {**unit.feed, **computed})

        for unit, result in in_order(work, islice(samples, most), samples_at_once(samples.options)):
            yield unit, result
            samples.options.progress.advance(int(unit.closes))


class TensorSums(Protocol):
    """Sums over the values of tensors, such as second moments of the inputs of layers."""

    @property
    def tensors(self) -> Sequence[str]:
        """Tensors whose values are summed."""

    @property
    def gates(self) -> Sequence[str | None]:
        """Tensors of the factors of their rows; None: all rows count alike."""

    def add(self, value: Array, other: None, samples: Sequence[int], place: int, gates: Array | None = None, /) -> None:
        """Add the value of a tensor of samples, and the factors of its rows; `place` is its place among `tensors`."""


S = TypeVar("S", bound=TensorSums)


def sum_inputs(
    graph: Graph,
    sums: Sequence[S],
    samples: CanonicalSamples,
    read: Callable[[S, int, Array], Array] = lambda _, __, value: value,
) -> None:
    """Run all samples through the float network once, and add the values of tensors in the order of the samples.

    Args:
        read: converts the value of a tensor, given by its place, before it is added.
    """
    tensors = [name for part in sums for name in (*part.tensors, *part.gates) if name is not None]
    for unit, values in run_float(graph, tensors, samples, lambda _, values: values):
        for part in sums:
            for place, (name, gate) in enumerate(zip(part.tensors, part.gates, strict=True)):
                if name in values:
                    factors = None if gate is None else np.asarray(values[gate])
                    part.add(read(part, place, np.asarray(values[name])), None, [unit.rank], place, factors)


Place = tuple[int, str]
"""Key of an array in the store: (sample index, tensor name)."""

AGAIN: Final = 2.0
"""Estimated cost of recomputing an array, alone and into fresh memory, relative to its first computation."""


class ActivationCache:
    """Activation cache of layer-wise runs: returns the inputs of segments, and keeps activations that later ones read.

    An array is recomputed from the inputs of its segment if that is faster than keeping it: than a copy or, beyond the
    budget of the store, than the disk. A segment may then run twice on a sample, with the same results.

    Args:
        segments: in the order in which all samples are run through them.
        store: holds the arrays.
    """

    def __init__(self, segments: Sequence[Segment], store: TensorStore) -> None:
        self._store = store
        self._segments = tuple(segments)
        self._readers: dict[str, int] = {}
        for segment in self._segments[1:]:
            for name in segment.reads:
                self._readers[name] = self._readers.get(name, 0) + 1
        self._seconds: dict[Place, float] = {}  # estimated time to recompute an array
        self.lasting: set[int] = set()  # segments whose sessions are needed until the end

    def fetch(self, number: int, unit: Sample) -> dict[str, Any]:
        """Return the tensors that segment `number` reads of a sample, without those of branches that did not run."""
        if number == 0:
            return dict(unit.feed)
        places = [(unit.index, name) for name in self._segments[number].reads]
        return {name: self._store.get((index, name)) for index, name in places if (index, name) in self._store}

    def keep(
        self,
        number: int,
        unit: Sample,
        run: LayerRunner | None,
        known: Mapping[str, Any],
        seconds: float,
        *,
        copy: bool = True,
    ) -> None:
        """Keep the tensors that segment `number` computed for a sample in `seconds`, and release its inputs.

        Args:
            run: recomputes tensors, if that is faster; None: they are kept.
            copy: the memory of the tensors will be overwritten.
        """
        segment = self._segments[number]
        read = [] if number == 0 else [name for name in segment.reads if (unit.index, name) in self._store]
        for name, value in known.items():
            readers = self._readers.get(name, 0)
            if not readers or name in read:
                continue
            again = AGAIN * seconds + sum(self._seconds.get((unit.index, tensor), 0.0) for tensor in read)
            array = np.asarray(value)
            computed = number > 0 and name in segment.outputs and not segment.conditions
            # strings are always kept, because their size is unknown
            if (
                run is not None
                and computed
                and array.dtype.kind not in "OU"
                and self._store.cheaper_to_recompute(again, array.nbytes, readers)
            ):
                self._seconds[unit.index, name] = again
                self._make_later(number, (unit.index, name), read, run, array.nbytes, readers)
            else:
                self._store.put((unit.index, name), array, readers=readers, copy=copy)
        for name in read:
            self._store.release((unit.index, name))

    def _make_later(
        self, number: int, place: Place, read: Sequence[str], run: LayerRunner, nbytes: int, readers: int
    ) -> None:
        """Store a function that recomputes an array, and keep the inputs that it needs."""
        index, name = place

        def make() -> Array:
            feeds = {tensor: self._store.get((index, tensor)) for tensor in read}
            array: Array = run.run(feeds, [name], where=f"sample {index}")[name]
            return array

        self.lasting.add(number)
        self._store.put_lazy(place, make, nbytes, readers, reads=[(index, tensor) for tensor in read])
