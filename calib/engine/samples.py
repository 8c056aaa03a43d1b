"""`Samples`: a data set for a model, split into samples, sorted by content, and joined into micro-batches."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np

from sbonnx.calib.data import Feed
from sbonnx.calib.data.dataset import Dataset, read
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.graph.digests import array_digests, combined
from sbonnx.graph.query import branches_on_values, shape
from sbonnx.options import RunOptions, without_cache
from sbonnx.spec import Array

MOST: Final = 16
"""Maximum samples of a micro-batch: beyond it the overhead of Python is small."""

CACHE: Final = 1 << 20
"""Maximum bytes of the largest tensor of a micro-batch. Measured: four times as many gained nothing (MobileNetV2)."""


PART: Final = 1 / 64
"""Share of the memory for cached activations; several tensors of a micro-batch exist at a time."""


def micro_batches(graph: Graph, names: Sequence[str], units: Iterable[Sample], options: RunOptions) -> Iterator[Sample]:
    """Join consecutive samples into micro-batches; see `width_for`."""
    return grouped(iter(units), width_for(graph, names, units, options))


def width_for(graph: Graph, names: Sequence[str], units: Iterable[Sample], options: RunOptions) -> int:
    """Choose the micro-batch size; 1 if the model does not treat samples independently, or they are large.

    Args:
        graph: the model.
        names: tensors that are read sample by sample.
        units: the samples, which can be iterated repeatedly.
        options: device to try on, and memory for cached activations: a little of it makes small micro-batches.
    """
    room = min(CACHE, int(options.memory_bytes * PART))
    some = list(islice(units, 2))
    if len(some) < 2 or not names or not _alike(*some) or not _may_run_apart(graph):
        return 1
    inputs = tuple(tensor.name for tensor in graph.inputs)
    width = 1
    for looked_at in (names[:1], names):  # if the first tensor is too large already, the others are not computed
        piece = Segment(inputs, tuple(looked_at), tuple(looked_at)).model(graph)
        with LayerRunner(piece, device=options.device, threads=1) as run:
            alone = run.run(some[0].feed, looked_at, where=some[0].where)
            largest = max(np.asarray(alone[name]).nbytes for name in looked_at)
            width = min(MOST, room // max(largest, 1))
            if width < 2 or not treats_apart(run, [unit.feed for unit in some], looked_at):
                return 1
    return width


def grouped(units: Iterator[Sample], width: int) -> Iterator[Sample]:
    """Join up to `width` consecutive samples of equal shape into micro-batches."""
    waiting: list[Sample] = []
    for unit in units:
        if waiting and (len(waiting) == width or not _alike(waiting[0], unit)):
            yield _together(waiting)
            waiting = []
        waiting.append(unit)
    if waiting:
        yield _together(waiting)


def _together(units: Sequence[Sample]) -> Sample:
    if len(units) == 1:
        return units[0]
    first = units[0]
    feed = {name: np.concatenate([unit.feed[name] for unit in units]) for name in first.feed}
    where = f"one of {first.where} to {units[-1].where}"
    return Sample(first.index, where, feed, len(units), parts=tuple(unit.bare for unit in units), rank=first.rank)


def _alike(one: Sample, other: Sample) -> bool:
    """Return whether both are single samples of the same shape."""
    return bool(one.feed) and all(
        value.ndim and value.shape[0] == 1 and value.shape == other.feed[name].shape and value.dtype.kind in "fiub"
        for name, value in one.feed.items()
    )


def _may_run_apart(graph: Graph) -> bool:
    """Return whether every input has a dynamic leading axis, and no control flow depends on the values of a batch.

    The condition of such an If is a scalar of the whole batch. A trial says only whether the rows that are tried take
    the same branch.
    """
    shapes = [shape(tensor) for tensor in graph.inputs]
    dynamic = bool(shapes) and all(dims and not isinstance(dims[0], int) for dims in shapes)
    return dynamic and not branches_on_values(graph)


SHARE: Final = 8
"""Divisor of the memory for cached activations that gives the part for the inputs of the model."""

Key: TypeAlias = tuple[tuple[tuple[str, tuple[int, ...]], ...], bytes]
"""Sort key: sizes, then a digest of the values.

Sizes come first, so that samples of one size are adjacent and can run as one batch.
"""


class CanonicalSamples:
    """Units of a data set, sorted by content and numbered in that order (`Sample.rank`); can be iterated repeatedly.

    Floating-point sums depend on the order of their terms. Every choice by sample number, such as every fifth sample or
    the rows picked for sample 7, depends on the numbering. With sorted units, all of these depend only on the set of
    samples. Samples with the same content are interchangeable.

    The units are read once; their feeds are held in `store`, on disk beyond its budget.

    Attributes:
        options: of runs of the samples.

    Args:
        units: in any order.
        store: of their feeds.
        options: of runs of the samples.
        most: number of samples to keep; None: all. Which are kept depends only on their contents, like a random choice:
            units in the order of their digests, until they have that many samples.
    """

    def __init__(
        self, units: Iterable[Sample], store: TensorStore, options: RunOptions, most: int | None = None
    ) -> None:
        self.options = options
        self._store = store
        chosen: list[tuple[Key, Sample, tuple[str, ...]]] = []
        kept = 0
        for unit in units:
            entry = (content_key(unit.feed), unit.bare, tuple(unit.feed))
            for name, values in unit.feed.items():
                store.put((unit.index, name), np.asarray(values), copy=True)
            insort(chosen, entry, key=lambda each: each[0][1])
            kept += unit.samples
            while most is not None and kept - chosen[-1][1].samples >= most:
                _, dropped, names = chosen.pop()
                kept -= dropped.samples
                for name in names:
                    store.release((dropped.index, name))
        chosen.sort(key=lambda each: each[0])
        self._units = [(replace(unit, rank=rank), names) for rank, (_, unit, names) in enumerate(chosen)]

    def __iter__(self) -> Iterator[Sample]:
        """Yield units by rank, with their feeds."""
        for unit, names in self._units:
            yield replace(unit, feed={name: self._store.get((unit.index, name)) for name in names})

    @property
    def memory(self) -> int:
        """Bytes for cached activations, without those for the feeds."""
        return self.options.memory_bytes - self.options.memory_bytes // SHARE

    @property
    def feeds(self) -> int:
        """Number of feeds that the units come from."""
        return sum(unit.closes for unit, _ in self._units)

    @property
    def samples(self) -> int:
        """Number of samples in all units."""
        return sum(unit.samples for unit, _ in self._units)


@contextmanager
def canonical_samples(
    units: Iterable[Sample], options: RunOptions, most: int | None = None
) -> Iterator[CanonicalSamples]:
    """Yield the units sorted by content; their feeds are freed when the context ends.

    Args:
        options: of runs of the samples. The feeds take a part of the memory for cached activations, see `SHARE`.
        most: number of samples to keep, see `CanonicalSamples`; None: all.

    Raises:
        OutputError: the disk is full.
    """
    with TensorStore(options.memory_bytes // SHARE) as store:
        yield CanonicalSamples(units, store, options, most)


def content_key(feed: Feed) -> Key:
    """Compute the sort key of a feed: names and shapes, then a digest of types and values."""
    names = sorted(feed)
    arrays = [np.asarray(feed[name]) for name in names]
    sizes = tuple((name, array.shape) for name, array in zip(names, arrays, strict=True))
    return sizes, combined("sample", *array_digests(arrays))


SAME: Final = 1e-3
"""Tolerance, relative to the largest output, for rounding differences between rows run separately and together."""


class SampleSplitter:
    """Splits a data set into samples if the model treats the rows of a batch independently, else into feeds.

    onnxruntime's sums over a batch may differ in the last bits from those of its single rows, so a batch of eight is
    run as eight batches of one: the same results for any batch size. Whether rows are independent is decided by the
    inputs (all need a dynamic leading axis), by control flow (none depends on values), and by a test on two rows of the
    first batch.

    Args:
        graph: the model.
        device: where to try.
    """

    def __init__(self, graph: Graph, *, device: str = "cpu") -> None:
        self._graph = graph
        self._device = device
        self._apart: bool | None = None if _may_run_apart(graph) else False  # None: not tested yet

    def units(self, items: Iterable[tuple[str, Feed]], first: int = 0) -> Iterator[Sample]:
        """Yield the units of (where, feed) pairs, in order; `first` is the index of the first unit."""
        index = first
        for where, feed in items:
            rows = self._rows(feed)
            if rows < 2:
                leading = next((int(x.shape[0]) for x in feed.values() if x.ndim), 1)
                yield Sample(index, where, feed, samples=leading)
                index += 1
                continue
            for row in range(rows):
                piece = {name: x[row : row + 1] for name, x in feed.items()}
                yield Sample(index, f"sample {row} of {where}", piece, closes=row == rows - 1)
                index += 1

    def _rows(self, feed: Feed) -> int:
        """Return the number of rows to run separately; 1 if the feed is run unchanged."""
        lengths = {x.shape[0] for x in feed.values()} if self._apart is not False else set()
        if len(lengths) != 1 or (rows := lengths.pop()) < 2:
            return 1
        if self._apart is None:
            with LayerRunner(self._graph, device=self._device, threads=1) as run:
                pair = [{name: x[row : row + 1] for name, x in feed.items()} for row in (0, 1)]
                self._apart = treats_apart(run, pair)
        return rows if self._apart else 1


@dataclass(frozen=True)
class Samples:
    """Samples of a data set for a model, and how to run them: what a technique that reads data takes.

    Attributes:
        data: the feeds.
        splitter: splits them into samples, as the model allows.
        options: device, threads, memory, cache and progress of the runs.
        kept: number of samples that `canonical` keeps for `first`.
    """

    data: Dataset
    splitter: SampleSplitter
    options: RunOptions
    kept: int = 0
    _first: list[Sample] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any, graph: Graph, options: RunOptions | None = None) -> Samples:
        """Return the samples of data for a model.

        Args:
            data: a `Dataset`, or anything that `read` accepts.

        Raises:
            DataError: see `read`.
        """
        options = options or RunOptions()
        dataset = data if isinstance(data, Dataset) else read(data, graph)
        return cls(dataset, SampleSplitter(graph, device=options.device), options)

    @property
    def uncached(self) -> Samples:
        """The samples for a separate pass, which is neither cached nor run layer by layer."""
        return replace(self, options=without_cache(self.options))

    def units(self, first: int = 0) -> Iterator[Sample]:
        """Yield the samples in the order of the data; `first` is the index of the first one."""
        return self.splitter.units(self.data.items(), first)

    @contextmanager
    def canonical(self, most: int | None = None) -> Iterator[CanonicalSamples]:
        """Yield the samples sorted by content, at most `most` of them; see `canonical_samples`."""
        with canonical_samples(self.units(), self.options, most) as units:
            self._first[:] = islice(units, self.kept)
            yield units

    def first(self, count: int) -> list[Sample]:
        """Return the first samples in canonical order, of those of the last `canonical`; without one, data are read."""
        if len(self._first) < count:
            with self.canonical() as units:
                return list(islice(units, count))
        return self._first[:count]


def treats_apart(run: LayerRunner, feeds: Sequence[Feed], names: Sequence[str] | None = None) -> bool:
    """Return whether single samples give the same outputs in one batch, along the leading axis, as separately.

    Args:
        feeds: of samples of one size.
        names: outputs to compare; None: all.
    """
    together = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
    try:
        both = run.run(together, names)
        parts = [run.run(feed, names) for feed in feeds]
    except DataError:  # one of the runs fails: the axis is not a batch axis
        return False
    return all(_same(both[name], [part[name] for part in parts]) for name in both)


def _same(both: object, parts: list[object]) -> bool:
    """Return whether an output of two rows is the concatenation of the outputs of each."""
    if not isinstance(both, np.ndarray) or both.dtype.kind not in "fiub":
        return False
    arrays: list[Array] = [part for part in parts if isinstance(part, np.ndarray) and part.ndim]
    if len(arrays) != 2 or any(part.shape[0] != 1 or part.shape[1:] != both.shape[1:] for part in arrays):
        return False
    together = np.concatenate(arrays)
    if both.dtype.kind != "f" or together.shape != both.shape:
        return bool(np.array_equal(both, together))
    room = SAME * max(float(np.max(np.abs(together), initial=0.0)), 1e-30)
    return bool(np.allclose(both, together, rtol=0, atol=room, equal_nan=True))
