"""Random feeds for runs whose values do not matter: latency, and whether a model runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from sbonnx.calib.data.validate import Feed, InputSpec
from sbonnx.errors import DataError
from sbonnx.spec import Array

Shapes = Mapping[str, tuple[int, ...]]

INDEX_END: Final = 2
"""Integers are 0 or 1: valid indices of most tables, and valid masks."""

MAX_VALUES: Final = 1 << 30


def random_feed(inputs: Sequence[InputSpec], *, batch: int = 1, shapes: Shapes | None = None, seed: int = 0) -> Feed:
    """Draw one feed: floats from a normal distribution, integers 0 or 1, booleans; optional inputs are left out.

    Args:
        inputs: names, types and shapes that the model expects.
        batch: size of leading axes that are dynamic.
        shapes: shapes of inputs by name; required for inputs with other dynamic axes.
        seed: seed of the values.

    Raises:
        DataError: an unknown name, a shape that does not fit, or an input that cannot be drawn.
    """
    shapes = shapes or {}
    names = [spec.name for spec in inputs]
    for name in shapes:
        if name not in names:
            raise DataError(f"a shape is given for '{name}', which is no input of the model: {', '.join(names)}")
    rng = np.random.default_rng(seed)
    return {
        spec.name: _values(rng, spec, _shape(spec, batch, shapes.get(spec.name)))
        for spec in inputs
        if not spec.optional
    }


def _shape(spec: InputSpec, batch: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    if given is not None:
        fits = spec.shape is None or (
            len(given) == len(spec.shape)
            and all(wanted == size for wanted, size in zip(spec.shape, given, strict=True) if isinstance(wanted, int))
        )
        if not fits:
            raise DataError(f"the shape {given} does not fit the input '{spec.name}': {spec}")
        found = given
    else:
        shape = spec.shape
        if shape is not None and shape and not isinstance(shape[0], int):
            shape = (batch, *shape[1:])
        if shape is None or not all(isinstance(size, int) for size in shape):
            raise DataError(
                f"the input '{spec.name}' has dynamic axes, {spec}: give --data, or --shape {spec.name}=1x3x224x224"
            )
        found = tuple(size for size in shape if isinstance(size, int))
    if int(np.prod([float(size) for size in found])) > MAX_VALUES:
        raise DataError(
            f"random values of shape {found} for the input '{spec.name}' are too many: at most {MAX_VALUES}"
        )
    return found


def _values(rng: np.random.Generator, spec: InputSpec, shape: tuple[int, ...]) -> Array:
    kind = spec.dtype
    if kind is None or kind.kind == "O":
        raise DataError(f"the input '{spec.name}' ({spec}) cannot be drawn: give --data")
    if kind.kind in "iub":
        return rng.integers(0, INDEX_END, shape).astype(kind)
    return rng.standard_normal(shape, np.float32).astype(kind)


__all__ = ["Shapes", "random_feed"]
