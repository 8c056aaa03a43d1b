"""What waits between two layers: each sample's activations, in memory, on disk, or as the way to make them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.sample_splitter import Unit
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.spec import Array

Place = tuple[int, str]
"""A sample and a tensor: what arrays are called in the store."""

AGAIN: Final = 2.0
"""Making an array a second time, for itself and into fresh memory, takes so many times what the first run took."""


class Keeper:
    """Hands segments what they read of a sample, and keeps what later ones read of it.

    An array is made again from what its segment read where that takes less time than keeping it: than the copy, or,
    past the budget of the store, than the disk. A segment may run twice on a sample then; its numbers are the same.

    Args:
        segments: in the order in which all samples go through them.
        store: where the arrays wait.
    """

    def __init__(self, segments: Sequence[Segment], store: TensorStore) -> None:
        self._store = store
        self._segments = tuple(segments)
        self._readers: dict[str, int] = {}
        for segment in self._segments[1:]:
            for name in segment.reads:
                self._readers[name] = self._readers.get(name, 0) + 1
        self._seconds: dict[Place, float] = {}  # what making an array again takes
        self.lasting: set[int] = set()  # segments whose sessions are needed to the end

    def fetch(self, number: int, unit: Unit) -> dict[str, Any]:
        """What segment `number` reads of a sample; what a branch that did not run would have given is missing."""
        if number == 0:
            return dict(unit.feed)
        places = [(unit.index, name) for name in self._segments[number].reads]
        return {name: self._store.get((index, name)) for index, name in places if (index, name) in self._store}

    def keep(self, number: int, unit: Unit, run: LayerRunner | None, known: Mapping[str, Any], seconds: float) -> None:
        """Keep what segment `number` made of a sample in `seconds`, and let go of what only it read."""
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
        """Whether to make an array again; text has no size to compare."""
        return array.dtype.kind not in "OU" and self._store.cheaper_to_recompute(seconds, array.nbytes, readers)

    def _make_later(
        self, number: int, place: Place, read: Sequence[str], run: LayerRunner | None, nbytes: int, readers: int
    ) -> None:
        """Keep the way to make an array, and what that needs."""
        index, name = place

        def make() -> Array:
            if run is None:
                raise ValueError(f"nothing makes '{name}'")
            feeds = {one: self._store.get((index, one)) for one in read}
            made: Array = run.run(feeds, [name], where=f"sample {index}")[name]
            return made

        self.lasting.add(number)
        self._store.put_lazy(place, make, nbytes, readers, reads=[(index, one) for one in read])
