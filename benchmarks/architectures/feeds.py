"""Feeds of random values for a model of which only the graph is known: lengths by the name of the axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper

TOKENS: Final = 8
PIXELS: Final = 32
FRAMES: Final = 200
"""Lengths of text, images and audio."""

IDS: Final = 64
"""Token ids are below: every table has at least as many rows."""


def length_of(axis: str, lengths: Mapping[str, int]) -> int:
    """Return the length of a symbolic axis by the words of its name."""
    if axis in lengths:
        return lengths[axis]
    words = axis.lower()
    if " + " in axis:
        return sum(length_of(term, lengths) for term in axis.split(" + "))
    if "past" in words:
        return 0
    for word, length in (
        ("batch", 1),
        ("num_images", 1),
        ("patches", 16),
        ("height", PIXELS),
        ("width", PIXELS),
        ("image", PIXELS),
        ("mel", FRAMES),
        ("audio", FRAMES),
        ("frame", FRAMES),
        ("time", FRAMES),
        ("sample", 16 * FRAMES),
    ):
        if word in words:
            return length
    return TOKENS


def values_of(name: str, dtype: Any, shape: list[int], random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return values of an input: ones for masks, ranges for positions, ids, noise for floats."""
    words = name.lower()
    if dtype == np.bool_:
        return np.ones(shape, np.bool_)
    if np.dtype(dtype).kind in "iu":
        if "mask" in words:
            return np.ones(shape, dtype)
        if "position" in words or "cu_seqlens" in words:
            return np.broadcast_to(np.arange(shape[-1] if shape else 1), shape).astype(dtype)
        if "grid" in words:
            return np.broadcast_to(np.array([1, 4, 4]), shape).astype(dtype)
        if "size" in words:
            return np.full(shape, PIXELS, dtype)
        if "len" in words:
            return np.full(shape, TOKENS, dtype)
        if any(part in words for part in ("type", "index", "language")):
            return np.zeros(shape, dtype)
        return random.integers(6, IDS, shape).astype(dtype)
    return random.standard_normal(shape, np.float32).astype(dtype)


def feed_of(model: onnx.ModelProto, seed: int, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Return a feed; `lengths` are those of symbolic axes that are known."""
    random = np.random.default_rng(seed)
    held = {tensor.name for tensor in model.graph.initializer}
    feed = {}
    for value in model.graph.input:
        if value.name in held:
            continue
        kind = value.type.tensor_type
        shape = [dim.dim_value or length_of(dim.dim_param, lengths) for dim in kind.shape.dim]
        feed[value.name] = values_of(value.name, helper.tensor_dtype_to_np_dtype(kind.elem_type), shape, random)
    return feed
