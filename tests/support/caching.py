"""Sketches, keys and caches for the tests of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sbonnx.calib.cache.entries import CHECKPOINT, SKETCH
from sbonnx.calib.cache.sketch_cache import SketchCache, SketchKey
from sbonnx.calib.sketches import Sketch

IDENTITY = {"model": "m.onnx", "model_digest": "aa" * 16, "data": "folder 'calib'", "data_digest": "bb" * 16}
SETTINGS = {"onnxruntime": "1.31.1", "device": "cpu"}


def opened(folder: Path, made_by: Mapping[str, str] = SETTINGS, **other: str) -> SketchCache:
    identity = {**IDENTITY, **other}
    return SketchCache(
        folder,
        model=identity["model"],
        model_digest=identity["model_digest"],
        data=identity["data"],
        data_digest=identity["data_digest"],
        settings=made_by,
    )


def seen(key: SketchKey, *, samples: int = 4, values: int = 6000, seed: int = 0) -> Sketch:
    """The sketch of a key; with these defaults, more values than are kept raw (24,000)."""
    sketch = Sketch(axis=key.axis, track=True)
    rng = np.random.default_rng([seed, *key.tensor.encode()])
    for index in range(samples):
        sketch.observe(rng.standard_normal((1, 4, values // 4)).astype(np.float32), index)
    return sketch


KEYS = (SketchKey("00"), SketchKey("11", 1), SketchKey("22"))


def small() -> dict[SketchKey, Sketch]:
    """Sketches with raw values, without values, and with NaN."""
    raw, empty, bad = Sketch(track=True), Sketch(axis=1, track=True), Sketch(track=True)
    raw.observe(np.array([[1, -2, 0.5]], np.float32))
    bad.observe(np.array([np.nan, np.inf, 1, -0.0], np.float32))
    return {SketchKey("raw"): raw, SketchKey("empty", 1): empty, SketchKey("bad"): bad}


def everything() -> dict[SketchKey, Sketch]:
    return {**{key: seen(key) for key in KEYS}, **small()}


def one(cache: SketchCache, key: SketchKey) -> Sketch | None:
    """The sketch of a key; None if it is not in the cache."""
    return cache.load([key]).get(key)


def assert_same(one: Sketch | None, other: Sketch) -> None:
    """Equal states, bit for bit."""
    assert one is not None
    mine, theirs = one.to_arrays(), other.to_arrays()
    assert mine.keys() == theirs.keys()
    for name, values in mine.items():
        assert values.dtype == theirs[name].dtype and values.shape == theirs[name].shape
        assert values.tobytes() == theirs[name].tobytes()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def checkpoints(folder: Path) -> int:
    """Number of checkpoints below a folder."""
    return len(list(folder.rglob(f"*{CHECKPOINT}")))


def complete(folder: Path) -> dict[str, bytes]:
    """Content of the complete sketches below a folder, by path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob(f"*{SKETCH}")}


def entry_of(folder: Path, key: SketchKey) -> Path:
    """The file of a sketch."""
    return opened(folder)._path(key)
