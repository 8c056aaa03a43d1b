"""Sketches, keys and caches for the tests of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sbonnx.calib.cache.sketch_cache import SketchCache, SketchKey
from sbonnx.calib.sketches import Sketch

IDENTITY = {"model": "m.onnx", "model_digest": "aa" * 16, "data": "folder 'calib'", "data_digest": "bb" * 16}
SETTINGS = {"onnxruntime": "1.31.1", "device": "cpu"}


def opened(folder: Path, made_by: Mapping[str, str] = SETTINGS, **other: str) -> SketchCache:
    said = {**IDENTITY, **other}
    names = {"model": said["model"], "data": said["data"]}
    return SketchCache(
        folder, **names, model_digest=said["model_digest"], data_digest=said["data_digest"], settings=made_by
    )


def seen(key: SketchKey, *, samples: int = 4, values: int = 6000, seed: int = 0) -> Sketch:
    """A sketch of the kind that a key names, past what is kept raw (24,000 values)."""
    sketch = Sketch(axis=key.axis, detail=key.detail, track=key.track)
    rng = np.random.default_rng([seed, *key.tensor.encode()])
    for index in range(samples):
        sketch.observe(rng.standard_normal((1, 4, values // 4)).astype(np.float32), index)
    return sketch


KEYS = (
    SketchKey("00", None, "histogram", False),
    SketchKey("11", 1, "histogram", False),
    SketchKey("22", None, "range", False),
    SketchKey("33", 1, "range", True),
    SketchKey("44", None, "histogram", True),
)


def small() -> dict[SketchKey, Sketch]:
    """Sketches that are kept raw, never saw anything, or met NaN."""
    raw, empty, bad = Sketch(), Sketch(axis=1), Sketch()
    raw.observe(np.array([[1, -2, 0.5]], np.float32))
    bad.observe(np.array([np.nan, np.inf, 1, -0.0], np.float32))
    return {SketchKey("raw"): raw, SketchKey("empty", 1): empty, SketchKey("bad"): bad}


def everything() -> dict[SketchKey, Sketch]:
    return {**{key: seen(key) for key in KEYS}, **small()}


def assert_same(one: Sketch | None, other: Sketch) -> None:
    """Equal states, bit for bit."""
    assert one is not None
    mine, theirs = one.to_arrays(), other.to_arrays()
    assert mine.keys() == theirs.keys()
    for name, values in mine.items():
        assert values.dtype == theirs[name].dtype and values.shape == theirs[name].shape
        assert values.tobytes() == theirs[name].tobytes()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "cache.json")
