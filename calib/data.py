"""Calibration and evaluation data: any source, as checked feeds in the model's types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, final

from sbonnx.calib.readers import Feed, InputSpec, Source, cut, fitted, named, open_source
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.graph.query import dtype, shape


@final
class Dataset:
    """Feeds that can be walked again and again, each checked when it is reached.

    Attributes:
        name: where they come from, for messages.
        inputs: what the model wants.
        split: cut each raw feed into batches of this many samples along the leading axis; None: as they are.
        limit: at most this many feeds, counted after splitting; None: all.
    """

    def __init__(
        self, source: Source, inputs: Sequence[InputSpec], *, split: int | None = None, limit: int | None = None
    ) -> None:
        self.name = source.name
        self.inputs = tuple(inputs)
        self.split = split
        self.limit = limit
        self._source = source
        self._count = None if split is not None else source.count

    def __iter__(self) -> Iterator[Feed]:
        """Feeds by input name, in the session's types."""
        for _, feed in self.items():
            yield feed

    def items(self) -> Iterator[tuple[str, Feed]]:
        """(where, feed): `where` names the file or the position, for messages."""
        return islice(self._walk(), self.limit)

    @property
    def count(self) -> int | None:
        """Number of feeds where it is known without a walk."""
        if self._count is None or self.limit is None:
            return self._count
        return min(self._count, self.limit)

    def __len__(self) -> int:
        """Number of feeds; walks the data once where the source cannot tell."""
        if self._count is None:
            self._count = sum(1 for _ in self.items())
        return self.count or 0

    def _walk(self) -> Iterator[tuple[str, Feed]]:
        """All feeds, before the limit."""
        for where, raw in self._source.feeds():
            feed = named(raw, self.inputs, where)
            pieces = [(where, feed)] if self.split is None else cut(feed, self.split, self.inputs, where)
            for place, piece in pieces:
                yield place, fitted(piece, self.inputs, place)


def read(
    source: Any, inputs: Sequence[InputSpec] | Graph, *, split: int | None = None, limit: int | None = None
) -> Dataset:
    """A data set from anything that holds feeds.

    Paths: a .npz file (arrays named as the inputs), a .npy file, Polygraphy's .json; a folder of .npz (one feed each),
    of .npy (single input), with a subfolder of .npy for each input, or with test_data_set_* folders. Objects: a dict
    (one feed), an array (single input), any iterable of dicts, tuples or arrays, a torch DataLoader, an onnxruntime
    CalibrationDataReader, a `Dataset`. The batch axis is included everywhere; sizes and shapes may differ from feed to
    feed. An iterator that cannot be walked twice is walked now and kept in memory (`limit` first, 4 GiB at most).

    Types: the model's own; a wider or narrower float (float64 to float32) and any integer whose values fit are
    converted. Integers are never taken for floats: an image in uint8 was not preprocessed.

    Args:
        source: see above.
        inputs: what the model wants: specs, or its graph.
        split: cut along the leading axis into batches of this many; the last may be smaller where the model's batch
            is not fixed.
        limit: at most this many feeds, counted after splitting.

    Raises:
        DataError: nothing there, or the first feed does not fit. Later feeds are checked when they are reached.
    """
    if isinstance(inputs, Graph):
        inputs = input_specs(inputs)
    if split is not None and split < 1:
        raise DataError(f"a split of {split} samples makes no batches: use 1 or more")
    if limit is not None and limit < 1:
        raise DataError(f"a limit of {limit} feeds leaves no data: use 1 or more")
    if isinstance(source, Dataset):
        source = source._source if not (source.split or source.limit) else _relay(source)
    data = Dataset(_open(source, inputs, limit), inputs, split=split, limit=limit)
    if next(data.items(), None) is None:
        raise DataError(f"{data.name} holds no feeds: calibration needs at least one")
    return data


def _open(source: Any, inputs: Sequence[InputSpec], limit: int | None) -> Source:
    """`source` itself where it is a `Source`, else its reader."""
    return source if isinstance(source, Source) else open_source(source, inputs, limit)


def _relay(data: Dataset) -> Source:
    """A data set as a source of raw feeds."""
    return Source(data.name, data.items, data.count)


def input_specs(graph: Graph) -> tuple[InputSpec, ...]:
    """What the inputs of `graph` want, in order."""
    return tuple(InputSpec(tensor.name, dtype(tensor), shape(tensor)) for tensor in graph.inputs)


__all__ = ["Dataset", "Feed", "InputSpec", "input_specs", "read"]
