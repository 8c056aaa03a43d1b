"""Activation cache of layer-wise runs: keeps activations in memory, spills them to disk, or recomputes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.sample import Unit
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.spec import Array

Place = tuple[int, str]
"""Key of an array in the store: (sample index, tensor name)."""

AGAIN: Final = 2.0
"""Estimated cost of recomputing an array, alone and into fresh memory, relative to its first computation."""


class Keeper:
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

    def fetch(self, number: int, unit: Unit) -> dict[str, Any]:
        """Return the tensors that segment `number` reads of a sample, without those of branches that did not run."""
        if number == 0:
            return dict(unit.feed)
        places = [(unit.index, name) for name in self._segments[number].reads]
        return {name: self._store.get((index, name)) for index, name in places if (index, name) in self._store}

    def keep(self, number: int, unit: Unit, run: LayerRunner | None, known: Mapping[str, Any], seconds: float) -> None:
        """Keep the tensors that segment `number` computed for a sample in `seconds`, and release its inputs."""
        segment = self._segments[number]
        read = [] if number == 0 else [name for name in segment.reads if (unit.index, name) in self._store]
        for name, value in known.items():
            readers = self._readers.get(name, 0)
            if not readers or name in read:
                continue
            again = AGAIN * seconds + sum(self._seconds.get((unit.index, one), 0.0) for one in read)
            made = run is not None and number > 0 and name in segment.outputs and not segment.conditions
            array = np.asarray(value)
            if made and self._cheaper(again, array, readers):
                self._seconds[unit.index, name] = again
                self._make_later(number, (unit.index, name), read, run, array.nbytes, readers)
            else:
                self._store.put((unit.index, name), array, readers=readers, copy=True)
        for name in read:
            self._store.release((unit.index, name))

    def _cheaper(self, seconds: float, array: Array, readers: int) -> bool:
        """Return whether to recompute an array; strings are always kept, because their size is unknown."""
        return array.dtype.kind not in "OU" and self._store.cheaper_to_recompute(seconds, array.nbytes, readers)

    def _make_later(
        self, number: int, place: Place, read: Sequence[str], run: LayerRunner | None, nbytes: int, readers: int
    ) -> None:
        """Store a function that recomputes an array, and keep the inputs that it needs."""
        index, name = place

        def make() -> Array:
            if run is None:
                raise ValueError(f"nothing makes '{name}'")
            feeds = {one: self._store.get((index, one)) for one in read}
            made: Array = run.run(feeds, [name], where=f"sample {index}")[name]
            return made

        self.lasting.add(number)
        self._store.put_lazy(place, make, nbytes, readers, reads=[(index, one) for one in read])
