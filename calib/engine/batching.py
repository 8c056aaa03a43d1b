"""Micro-batching: runs several samples as one batch if the model treats them independently.

A small network takes a fraction of a millisecond per layer, and Python takes as long again for every array that is
passed in or out. If the tensors of a stage fit the cache several times, that many samples are run as one batch.
Micro-batches are cut by the order of the samples alone, which is that of their contents
(`sbonnx.calib.engine.samples`): results depend neither on how the data were ordered or batched nor on threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.samples import treats_apart
from sbonnx.calib.engine.segments import Segment
from sbonnx.graph import Graph

MOST: Final = 16
"""Maximum samples of a micro-batch: beyond it the overhead of Python is small."""

CACHE: Final = 1 << 20
"""Maximum bytes of the largest tensor of a micro-batch. Measured: four times as many gained nothing (MobileNetV2)."""


PART: Final = 1 / 64
"""Share of the memory for cached activations; several tensors of a micro-batch exist at a time."""


def width_for(graph: Graph, names: Sequence[str], units: Iterator[Sample], device: str, memory: int) -> int:
    """Choose the micro-batch size; 1 if the model does not treat samples independently, or they are large.

    Args:
        graph: the model.
        names: tensors that are read sample by sample.
        units: the samples.
        device: where to try.
        memory: bytes for cached activations; little memory makes small micro-batches.
    """
    room = min(CACHE, int(memory * PART))
    some = list(islice(units, 2))
    if len(some) < 2 or not names or not _alike(*some) or not _open(graph):
        return 1
    inputs = tuple(tensor.name for tensor in graph.inputs)
    width = 1
    for looked_at in (names[:1], names):  # if the first tensor is too large already, the others are not computed
        piece = Segment(inputs, tuple(looked_at), tuple(looked_at)).model(graph)
        with LayerRunner(piece, device=device, threads=1, name="the model") as run:
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
    """Join several units into one."""
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


def _open(graph: Graph) -> bool:
    """Return whether every input has a dynamic leading axis."""
    shapes = [tensor.shape for tensor in graph.inputs]
    return bool(shapes) and all(shape and not isinstance(shape[0], int) for shape in shapes)
