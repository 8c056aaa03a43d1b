"""Cached statistics of the tensors of a plan, and the progress of an interrupted run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sbonnx.calib.cache.data_digest import data_digest
from sbonnx.calib.cache.sketch_cache import SketchCache, SketchKey, plan_key
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.sample_runner import Key, StatsRequest
from sbonnx.calib.sketches import Sketch
from sbonnx.graph import Graph
from sbonnx.graph.digests import outputs_digest, tensor_digests

CHECKPOINT_EVERY: Final = 30.0
"""Seconds between checkpoints: the most work that a killed run loses."""

EVERYTHING: Final = StatsRequest("histogram", track=True)
"""Statistics that are measured for the cache: sufficient for any observer."""


class Recall:
    """Calibration cache by the tensors of one graph; see `SketchCache`.

    Args:
        folder: of the cache.
        graph: simplified and fused.
        data: calibration data; read once for its digest.
        settings: other settings that the results depend on.

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
        """Problems found in the cache."""
        return tuple(self._cache.notes)

    def known(self, wishes: Mapping[Key, StatsRequest]) -> dict[Key, Sketch]:
        """Return the cached sketches of the requested tensors."""
        found = {key: self._cache.get(self._key(key)) for key in wishes}
        return {key: sketch for key, sketch in found.items() if sketch is not None}

    def resume(self, wishes: Mapping[Key, StatsRequest]) -> tuple[int, dict[Key, Sketch]]:
        """Return (samples done, their sketches) of an interrupted run for exactly these tensors."""
        keys = {self._key(key): key for key in wishes}
        self._run = plan_key(keys)
        done, sketches = self._cache.load_partial(self._run) or (0, {})
        return done, {keys[key]: sketch for key, sketch in sketches.items()}

    def checkpoint(self, done: int, sketches: Mapping[Key, Sketch]) -> None:
        """Write a checkpoint of the run that `resume` began."""
        self._cache.save_partial(done, {self._key(key): sketch for key, sketch in sketches.items()}, self._run)

    def keep(self, sketches: Mapping[Key, Sketch]) -> None:
        """Write complete sketches to the cache."""
        for key, sketch in sketches.items():
            self._cache.put(self._key(key), sketch)
        self._cache.flush()

    def done(self) -> None:
        """Remove the checkpoint of the run that `resume` began."""
        self._cache.clear_partial(self._run)

    def _key(self, key: Key) -> SketchKey:
        """Return the cache key of a tensor. Tensors of equal digests share one."""
        tensor, axis = key
        return SketchKey(self._digests[tensor], axis, EVERYTHING.detail, EVERYTHING.track)
