"""`FeedBuffer`: buffer of feeds that arrive one by one and are read again later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sbonnx.calib.data import Feed, Source
from sbonnx.calib.data.dataset import Dataset, read
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.graph import Graph

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
        """Yield (where, feed) in order."""
        for number, names in enumerate(self._names):
            yield f"feed {number + 1}", {name: self._store.get((number, name)) for name in names}
