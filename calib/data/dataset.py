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
    LabelledFeed,
    Naming,
    Pick,
    Sampling,
    Source,
    cut,
    cut_labels,
    fitted,
    loaded_labels,
    named,
    naming_of,
    open_source,
    without_defaults,
)
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.graph.query import dtype, shape
from sbonnx.graph.storage.weights import MappedWeights
from sbonnx.patterns.blocks.masks import mask_ways
from sbonnx.report.codes import Note
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
        self._naming: Naming | None = None

    def __iter__(self) -> Iterator[Feed]:
        """Yield feeds by input name, in the session's types."""
        for _, feed in self.items():
            yield feed

    def items(self) -> Iterator[tuple[str, Feed]]:
        """Yield (where, feed): `where` names the file or the position, for messages."""
        for where, piece in self._picked():
            yield where, fitted(piece.feed, self.inputs, where)

    def labelled(self) -> Iterator[tuple[str, LabelledFeed]]:
        """Yield (where, feed with its labels).

        Labels by name are the arrays that are no inputs of the model, class folders, rows of labels.csv: see
        `LabelledFeed`. A split cuts arrays and lists that are as long as the feed; other labels go to every batch.

        Raises:
            DataError: a label that is stored in a file cannot be read.
        """
        for where, piece in self._picked(labels=True):
            yield where, replace(piece, feed=fitted(piece.feed, self.inputs, where))

    def at(self, places: Sequence[int]) -> Iterator[tuple[str, Feed]]:
        """Yield (where, feed) at some positions among the feeds that are used, ascending."""
        chosen = [self._chosen[place] for place in places] if self.sampling.by_chance else places
        for where, piece in self._at(chosen, labels=False):
            yield where, fitted(piece.feed, self.inputs, where)

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes: what was renamed or is not used, one sentence each; complete once the first feed was read."""
        naming = None if self._naming is None else self._naming.note
        return self._source.notes if naming is None else (*self._source.notes, naming)

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

    def _picked(self, *, labels: bool = False) -> Iterator[tuple[str, LabelledFeed]]:
        """Yield the feeds that are used by name, not yet checked."""
        if self.sampling.by_chance:
            return self._at(self._chosen, labels=labels)
        return islice(self._pieces(labels=labels), self.sampling.limit)

    def _pieces(self, *, labels: bool = False) -> Iterator[tuple[str, LabelledFeed]]:
        """Yield all feeds by name, split, not yet checked."""
        for where, raw in self._source.feeds():
            yield from self._cut(where, raw, labels=labels)

    def _cut(self, where: str, raw: Any, *, labels: bool) -> Iterator[tuple[str, LabelledFeed]]:
        """Yield the batches of a raw feed; their labels are read only if they are wanted."""
        if self._naming is None:
            self._naming = naming_of(raw, self.inputs, self._defaults)
        labelled = self._naming.separate(raw)
        feed = without_defaults(labelled.feed, self._defaults, where)
        feed = named(feed, self.inputs, where, whole=self.split is None)
        own_labels = loaded_labels(labelled.labels, where) if labels else {}
        if self.split is None:
            yield where, LabelledFeed(feed, own_labels)
            return
        start, total = 0, max((x.shape[0] for x in feed.values() if x.ndim), default=0)
        for part, piece in cut(feed, self.split, self.inputs, where):
            stop = min(start + self.split, total)
            yield part, LabelledFeed(piece, cut_labels(own_labels, total, start, stop))
            start = stop

    def _at(self, places: Sequence[int], *, labels: bool) -> Iterator[tuple[str, LabelledFeed]]:
        """Yield the feeds at some positions, ascending. Other files are not read if each file has one feed."""
        if self.split is None and self._source.at is not None:
            for place in places:
                yield from self._cut(*self._source.at(place), labels=labels)
            return
        pieces = self._pieces(labels=labels)
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
    of .npy (single input), with a subfolder of .npy for each input, or with test_data_set_* folders; images, audio and
    texts, alone or in folders, with their preprocessing as `DataPath`; "FILE.py:FUNCTION". Objects: a dict
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
        source = source._source if whole else Source(source.name, source.labelled, source.count, notes=source.notes)
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
    ways = mask_ways(graph)
    return tuple(
        InputSpec(tensor.name, dtype(tensor), shape(tensor), masks=tensor.name in ways) for tensor in graph.inputs
    )


def input_defaults(graph: Graph) -> dict[str, Callable[[], Array]]:
    """Return functions that load the initializers that the file listed among its inputs, by name."""
    return {name: lambda held=held: _loaded(held) for name, held in graph.info.defaults.items()}  # type: ignore[misc]


def _loaded(held: Any) -> Array:
    values: Array = held.load() if isinstance(held, MappedWeights) else held
    return values
