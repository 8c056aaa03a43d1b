"""Calibration and evaluation data: any source, as checked feeds in the model's types."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, Final, final

from sbonnx.calib.data import (
    ALL,
    Feed,
    InputSpec,
    Pick,
    Sampling,
    Source,
    cut,
    fitted,
    named,
    open_source,
    without_defaults,
)
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.graph.query import dtype, shape
from sbonnx.graph.storage.weights import MappedWeights
from sbonnx.spec import Array

MEMORY: Final = 64 << 20
"""Bytes of feeds held in memory; the others are spilled to disk."""


class FeedBuffer:
    """Copies of feeds, in order, until `close`.

    Args:
        graph: the model that the feeds are for.
        memory: bytes to hold in memory.
    """

    def __init__(self, graph: Graph, memory: int = MEMORY) -> None:
        self.count = 0
        self._graph = graph
        self._names: list[tuple[str, ...]] = []
        self._store = TensorStore(memory)

    def add(self, feed: Feed) -> None:
        """Append a copy of a feed.

        Raises:
            OutputError: the disk is full.
        """
        for name, value in feed.items():
            self._store.put((self.count, name), value, copy=True)
        self._names.append(tuple(feed))
        self.count += 1

    def dataset(self) -> Dataset:
        """Return a data set of all feeds so far."""
        return read(Source("what was fed", self._walk, self.count), self._graph)

    def close(self) -> None:
        """Free all feeds. Idempotent."""
        self._store.close()

    def _walk(self) -> Iterator[tuple[str, Feed]]:
        for number, names in enumerate(self._names):
            yield f"feed {number + 1}", {name: self._store.get((number, name)) for name in names}


@final
class Dataset:
    """Feeds that can be iterated repeatedly, each checked when it is reached.

    Attributes:
        name: origin of the feeds, for messages.
        inputs: names, types and shapes that the model expects.
        split: cut each raw feed into batches of this many samples along the leading axis; None: no splitting.
        sampling: which feeds are used, counted after splitting.
    """

    def __init__(
        self,
        source: Source,
        inputs: Sequence[InputSpec],
        *,
        split: int | None = None,
        sampling: Sampling = ALL,
        defaults: Mapping[str, Callable[[], Array]] | None = None,
    ) -> None:
        self.name = source.name
        self.inputs = tuple(inputs)
        self.split = split
        self.sampling = sampling
        self._source = source
        self._defaults = defaults or {}

    def __iter__(self) -> Iterator[Feed]:
        """Yield feeds by input name, in the session's types."""
        for _, feed in self.items():
            yield feed

    def items(self) -> Iterator[tuple[str, Feed]]:
        """Yield (where, feed): `where` names the file or the position, for messages."""
        by_chance = self.sampling.by_chance
        for where, feed in self._picked(self._chosen) if by_chance else islice(self._pieces(), self.sampling.limit):
            yield where, fitted(feed, self.inputs, where)

    def at(self, places: Sequence[int]) -> Iterator[tuple[str, Feed]]:
        """Yield (where, feed) at some positions among the feeds that are used, ascending."""
        chosen = [self._chosen[place] for place in places] if self.sampling.by_chance else places
        for where, feed in self._picked(chosen):
            yield where, fitted(feed, self.inputs, where)

    @property
    def count(self) -> int | None:
        """Number of feeds; None if only an iteration can tell."""
        total = self._cheap_total
        return None if total is None else min(total, total if self.sampling.limit is None else self.sampling.limit)

    def __len__(self) -> int:
        """Return the number of feeds; iterates over the data once if the source does not know it."""
        limit = self.sampling.limit
        return self._total if limit is None else min(self._total, limit)

    @cached_property
    def _cheap_total(self) -> int | None:
        """Feeds before sampling; None if only an iteration can tell. Splits are counted from the shapes alone."""
        if self.split is None:
            return self._source.count
        lengths = self._source.lengths() if self._source.lengths is not None else None
        return None if lengths is None else sum(-(-length // self.split) for length in lengths)

    @cached_property
    def _total(self) -> int:
        """Feeds before sampling. An iteration holds one raw feed at a time."""
        return sum(1 for _ in self._pieces()) if self._cheap_total is None else self._cheap_total

    @cached_property
    def _chosen(self) -> tuple[int, ...]:
        return self.sampling.chosen(self._total)

    def _pieces(self) -> Iterator[tuple[str, Feed]]:
        """Yield all feeds by name, split, not yet checked."""
        for where, raw in self._source.feeds():
            yield from self._cut(where, raw)

    def _cut(self, where: str, raw: Any) -> Iterator[tuple[str, Feed]]:
        feed = named(without_defaults(raw, self._defaults, where), self.inputs, where, whole=self.split is None)
        return iter([(where, feed)]) if self.split is None else cut(feed, self.split, self.inputs, where)

    def _picked(self, places: Sequence[int]) -> Iterator[tuple[str, Feed]]:
        """Yield the feeds at some positions, ascending. Other files are not read if each file has one feed."""
        if self.split is None and self._source.at is not None:
            for place in places:
                yield from self._cut(*self._source.at(place))
            return
        pieces = self._pieces()
        before = -1
        for place in places:
            piece = next(islice(pieces, place - before - 1, None), None)
            if piece is None:
                counted = f"{self.name} held {self._total} feeds when they were counted"
                raise DataError(f"{counted}, and fewer now: leave the data as it is while it is used")
            yield piece
            before = place


def read(
    source: Any,
    inputs: Sequence[InputSpec] | Graph,
    *,
    split: int | None = None,
    limit: int | None = None,
    pick: Pick = "first",
    seed: int = 0,
    optional: Collection[str] = (),
) -> Dataset:
    """Open a data set from any object or path that holds feeds.

    Paths: a .npz file (arrays named as the inputs), a .npy file, Polygraphy's .json; a folder of .npz (one feed each),
    of .npy (single input), with a subfolder of .npy for each input, or with test_data_set_* folders. Objects: a dict
    (one feed), an array (single input), any iterable of dicts, tuples or arrays, a torch DataLoader, an onnxruntime
    CalibrationDataReader, a `Dataset`. Arrays always include the batch axis; sizes and shapes may differ from feed to
    feed. Data that can be iterated only once is read immediately, and the picked feeds are kept in memory (4 GiB at
    most).

    Types: those of the model; a wider or narrower float (float64 to float32) and any integer whose values fit are
    converted. Integers are never accepted for floats: an image in uint8 was not preprocessed.

    Inputs with a default (initializers that the file lists among its inputs) may be left out; if fed, they must hold
    the default, because the model is quantized with it.

    Args:
        source: see above.
        inputs: the graph of the model, or the specs of its inputs (then without defaults).
        split: cut along the leading axis into batches of this many; the last may be smaller if the model's batch size
            is not fixed.
        limit: at most this many feeds, counted after splitting.
        pick: the first feeds, or a random subset that is the same on every platform, in the order of the data.
        seed: seed of the random subset.
        optional: inputs that feeds may leave out, because something else provides them.

    Raises:
        DataError: no data, or the first feed does not fit. Later feeds are checked when they are reached.
    """
    defaults = None
    if isinstance(inputs, Graph):
        defaults = input_defaults(inputs)
        inputs = input_specs(inputs)
    inputs = [replace(spec, optional=spec.optional or spec.name in optional) for spec in inputs]
    if split is not None and split < 1:
        raise DataError(f"a split of {split} samples makes no batches: use 1 or more")
    if limit is not None and limit < 1:
        raise DataError(f"a limit of {limit} feeds leaves no data: use 1 or more")
    if isinstance(source, Dataset):
        whole = not (source.split or source.sampling.limit)
        source = source._source if whole else Source(source.name, source.items, source.count)
    sampling = Sampling(limit, pick, seed)
    if not isinstance(source, Source):
        # a random pick among batches needs all raw feeds; for the first batches, `limit` raw feeds suffice
        source = open_source(source, inputs, ALL if split is not None and sampling.by_chance else sampling)
    data = Dataset(source, inputs, split=split, sampling=sampling, defaults=defaults)
    if next(data.items(), None) is None:
        raise DataError(f"{data.name} holds no feeds: calibration needs at least one")
    return data


def input_specs(graph: Graph) -> tuple[InputSpec, ...]:
    """Return names, types and shapes of the inputs of `graph`, in order."""
    return tuple(InputSpec(tensor.name, dtype(tensor), shape(tensor)) for tensor in graph.inputs)


def input_defaults(graph: Graph) -> dict[str, Callable[[], Array]]:
    """Return functions that load the initializers that the file listed among its inputs, by name."""
    return {name: lambda held=held: _loaded(held) for name, held in graph.info.defaults.items()}  # type: ignore[misc]


def _loaded(held: Any) -> Array:
    values: Array = held.load() if isinstance(held, MappedWeights) else held
    return values
