"""What a cache already knows of a plan's tensors, and how far an interrupted run came."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sbonnx.calib.cache.data_digest import data_digest
from sbonnx.calib.cache.sketch_cache import SketchCache, SketchKey, plan_key
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.observation import Key, Wish
from sbonnx.calib.sketches import Sketch
from sbonnx.graph import Graph
from sbonnx.graph.digests import outputs_digest, tensor_digests

CHECKPOINT_EVERY: Final = 30.0
"""Seconds of work that a killed run may lose."""

EVERYTHING: Final = Wish("histogram", track=True)
"""What is measured when it is kept: enough for any observer."""


class Recall:
    """A `SketchCache` in terms of the tensors of one graph.

    Args:
        folder: of the cache.
        graph: simplified and fused.
        data: what it is calibrated on; walked once for its digest.
        settings: what else the numbers depend on.

    Raises: see `SketchCache`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], graph: Graph, data: Dataset, settings: Mapping[str, str]
    ) -> None:
        self._digests = tensor_digests(graph)
        self._cache = SketchCache(
            Path(folder),
            model=str(graph.info.path or "a model in memory"),
            model_digest=outputs_digest(graph, self._digests),
            data=data.name,
            data_digest=data_digest(data),
            settings=settings,
        )
        self._run = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found amiss."""
        return tuple(self._cache.notes)

    def known(self, wishes: Mapping[Key, Wish]) -> dict[Key, Sketch]:
        """Finished sketches of the tensors wished for."""
        found = {key: self._cache.get(self._key(key)) for key in wishes}
        return {key: sketch for key, sketch in found.items() if sketch is not None}

    def resume(self, wishes: Mapping[Key, Wish]) -> tuple[int, dict[Key, Sketch]]:
        """(samples done, their sketches) of an interrupted run for exactly these tensors."""
        keys = {self._key(key): key for key in wishes}
        self._run = plan_key(keys)
        done, sketches = self._cache.load_partial(self._run) or (0, {})
        return done, {keys[key]: sketch for key, sketch in sketches.items()}

    def checkpoint(self, done: int, sketches: Mapping[Key, Sketch]) -> None:
        """Remember the run that `resume` began."""
        self._cache.save_partial(done, {self._key(key): sketch for key, sketch in sketches.items()}, self._run)

    def keep(self, sketches: Mapping[Key, Sketch]) -> None:
        """Remember finished sketches."""
        for key, sketch in sketches.items():
            self._cache.put(self._key(key), sketch)
        self._cache.flush()

    def done(self) -> None:
        """Forget the run that `resume` began."""
        self._cache.clear_partial(self._run)

    def _key(self, key: Key) -> SketchKey:
        """A tensor's key in the cache. Two tensors that are computed alike share one."""
        tensor, axis = key
        return SketchKey(self._digests[tensor], axis, EVERYTHING.detail, EVERYTHING.track)
