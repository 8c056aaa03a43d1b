"""Splits batches into samples, because the results must not depend on how the user batched the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from sbonnx.calib.data import Feed
from sbonnx.calib.data.sample import Unit
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.graph.query import shape
from sbonnx.spec import Array

SAME: Final = 1e-3
"""Tolerance, relative to the largest output, for rounding differences between rows run separately and together."""


class Rows:
    """Splits a data set into samples if the model treats the rows of a batch independently, else into feeds.

    onnxruntime's sums over a batch may differ in the last bits from those of its single rows, so a batch of eight is
    run as eight batches of one: the same results for any batch size. Whether rows are independent is decided by the
    inputs (all need a dynamic leading axis) and by a test on two rows of the first batch.

    Args:
        graph: the model.
        device: where to try.
    """

    def __init__(self, graph: Graph, *, device: str = "cpu") -> None:
        self._graph = graph
        self._device = device
        shapes = [shape(tensor) for tensor in graph.inputs]
        self._apart: bool | None = None  # None: not tried yet
        if not shapes or any(not dims or isinstance(dims[0], int) for dims in shapes):
            self._apart = False

    def units(self, items: Iterable[tuple[str, Feed]], first: int = 0) -> Iterator[Unit]:
        """Yield the units of (where, feed) pairs, in order; `first` is the index of the first unit."""
        index = first
        for where, feed in items:
            rows = self._rows(feed)
            if rows < 2:
                yield Unit(index, where, feed, samples=_leading(feed))
                index += 1
                continue
            for row in range(rows):
                piece = {name: x[row : row + 1] for name, x in feed.items()}
                yield Unit(index, f"sample {row} of {where}", piece, closes=row == rows - 1)
                index += 1

    def _rows(self, feed: Feed) -> int:
        """Return the number of rows to run separately; 1 if the feed is run unchanged."""
        lengths = {x.shape[0] for x in feed.values()} if self._apart is not False else set()
        if len(lengths) != 1 or (rows := lengths.pop()) < 2:
            return 1
        if self._apart is None:
            self._apart = self._try(feed)
        return rows if self._apart else 1

    def _try(self, feed: Feed) -> bool:
        """Return whether two rows give the same outputs together and separately."""
        with LayerRunner(self._graph, device=self._device, threads=1) as run:
            return treats_apart(run, [{name: x[row : row + 1] for name, x in feed.items()} for row in (0, 1)])


def treats_apart(run: LayerRunner, feeds: Sequence[Feed], names: Sequence[str] | None = None) -> bool:
    """Return whether single samples give the same outputs in one batch, along the leading axis, as separately.

    Args:
        feeds: of samples of one size.
        names: outputs to compare; None: all.
    """
    together = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
    try:
        both = run.run(together, names)
        each = [run.run(feed, names) for feed in feeds]
    except DataError:  # one of the runs fails: the axis is not a batch axis
        return False
    return all(_same(both[name], [part[name] for part in each]) for name in both)


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


def _leading(feed: Feed) -> int:
    """Return the length of the leading axis of the first input that has one."""
    return next((int(x.shape[0]) for x in feed.values() if x.ndim), 1)


__all__ = ["SAME", "Rows", "Unit", "treats_apart"]
