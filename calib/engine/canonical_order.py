"""Canonical order: samples sorted by content, so that sums, picks and splits do not depend on the order of the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from sbonnx.calib.data import Feed
from sbonnx.calib.data.sample import Unit
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.graph.digests import array_digests, combined

SHARE: Final = 8
"""Divisor of the memory for cached activations that gives the part for the inputs of the model."""

Key: TypeAlias = tuple[tuple[tuple[str, tuple[int, ...]], ...], bytes]
"""Sort key: sizes, then a digest of the values.

Sizes come first, so that samples of one size are adjacent and can run as one batch.
"""


class CanonicalUnits:
    """Units of a data set, sorted by content and numbered in that order (`Unit.rank`); can be iterated repeatedly.

    Floating-point sums depend on the order of their terms. Every choice by sample number, such as every fifth sample or
    the rows picked for sample 7, depends on the numbering. With sorted units, all of these depend only on the set of
    samples. Samples with the same content are interchangeable.

    The units are read once; their feeds are held in `store`, on disk beyond its budget.
    """

    def __init__(self, units: Iterable[Unit], store: TensorStore) -> None:
        self._store = store
        found: list[tuple[Key, Unit, tuple[str, ...]]] = []
        for unit in units:
            found.append((content_key(unit.feed), unit.bare, tuple(unit.feed)))
            for name, values in unit.feed.items():
                store.put((unit.index, name), np.asarray(values), copy=True)
        found.sort(key=lambda each: each[0])
        self._units = [(replace(unit, rank=rank), names) for rank, (_, unit, names) in enumerate(found)]

    def __iter__(self) -> Iterator[Unit]:
        """Yield units by rank, with their feeds."""
        for unit, names in self._units:
            yield replace(unit, feed={name: self._store.get((unit.index, name)) for name in names})

    @property
    def feeds(self) -> int:
        """Number of feeds that the units come from."""
        return sum(unit.closes for unit, _ in self._units)

    @property
    def samples(self) -> int:
        """Number of samples in all units."""
        return sum(unit.samples for unit, _ in self._units)


@contextmanager
def canonical_units(units: Iterable[Unit], memory: int) -> Iterator[CanonicalUnits]:
    """Yield the units sorted by content; their feeds are freed when the context ends.

    Args:
        memory: bytes for cached activations, of which the feeds take `memory_of_inputs`.

    Raises:
        OutputError: the disk is full.
    """
    with TensorStore(memory_of_inputs(memory)) as store:
        yield CanonicalUnits(units, store)


def memory_of_inputs(memory: int) -> int:
    """Return the bytes for the feeds, out of those for cached activations."""
    return memory // SHARE


def content_key(feed: Feed) -> Key:
    """Compute the sort key of a feed: names and shapes, then a digest of types and values."""
    names = sorted(feed)
    arrays = [np.asarray(feed[name]) for name in names]
    sizes = tuple((name, array.shape) for name, array in zip(names, arrays, strict=True))
    return sizes, combined("sample", *array_digests(arrays))


__all__ = ["CanonicalUnits", "canonical_units", "content_key", "memory_of_inputs"]
