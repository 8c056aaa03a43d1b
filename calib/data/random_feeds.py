"""Random feeds for runs whose values do not matter: latency, equality of two models, and whether a model runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Final

import numpy as np

from sbonnx.calib.data.validate import Feed, InputSpec
from sbonnx.errors import DataError
from sbonnx.spec import Array

Shapes = Mapping[str, tuple[int, ...]]

INDEX_END: Final = 2
"""Integers are 0 or 1: valid indices of most tables, and valid masks."""

MAX_VALUES: Final = 1 << 30

BATCH: Final = 2
"""Guess for a dynamic first axis; the other one is 1."""

LENGTHS: Final = (8, 32, 64, 224, 1)
"""Guesses for the other dynamic axes: short texts and small images first."""

LARGEST_GUESS: Final = 1 << 26
"""Maximum number of elements of an input with guessed axes."""

SEEDS: Final = (0, 1)
"""Seeds of a guess, one feed each: feeds may take different branches of the model."""


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


def guessed_feeds(specs: Sequence[InputSpec]) -> Iterator[list[Feed]]:
    """Yield feeds for each guess of the dynamic axes: normal floats, integers 0 or 1, the text "a"; deterministic.

    Raises:
        DataError: an input is too large.
    """
    batches = (BATCH, 1) if any(spec.shape and not isinstance(spec.shape[0], int) for spec in specs) else (BATCH,)
    fixed = all(isinstance(dim, int) for spec in specs for dim in (spec.shape or ())[1:])
    for length in LENGTHS[:1] if fixed else LENGTHS:
        for batch in batches:
            yield [_guessed(specs, batch, length, seed) for seed in SEEDS]


def _guessed(specs: Sequence[InputSpec], batch: int, length: int, seed: int) -> Feed:
    rng = np.random.default_rng(seed)
    named: dict[str, int] = {}
    feed: Feed = {}
    for spec in specs:
        shape = []
        for axis, dim in enumerate(spec.shape or ()):
            guess = batch if axis == 0 else length
            shape.append(named.setdefault(dim, guess) if isinstance(dim, str) else guess if dim is None else dim)
        if prod(shape) > LARGEST_GUESS:
            raise DataError(f"input '{spec.name}' of shape {shape} is too large for a synthetic feed: give --data")
        if spec.dtype is None or spec.dtype.kind == "O":
            feed[spec.name] = np.full(shape, "a", dtype=object)
        elif spec.dtype.kind in "iub":
            feed[spec.name] = np.asarray(rng.integers(0, INDEX_END, shape)).astype(spec.dtype)
        else:
            feed[spec.name] = np.asarray(rng.standard_normal(shape)).astype(spec.dtype)
    return feed


def _shape(spec: InputSpec, batch: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    if given is not None:
        fits = spec.shape is None or (
            len(given) == len(spec.shape)
            and all(wanted == size for wanted, size in zip(spec.shape, given, strict=True) if isinstance(wanted, int))
        )
        if not fits:
            raise DataError(f"the shape {given} does not fit the input '{spec.name}': {spec}")
        sizes = given
    else:
        shape = spec.shape
        if shape is not None and shape and not isinstance(shape[0], int):
            shape = (batch, *shape[1:])
        if shape is None or not all(isinstance(size, int) for size in shape):
            raise DataError(
                f"the input '{spec.name}' has dynamic axes, {spec}: give --data, or --shape {spec.name}=1x3x224x224"
            )
        sizes = tuple(size for size in shape if isinstance(size, int))
    if int(np.prod([float(size) for size in sizes])) > MAX_VALUES:
        raise DataError(
            f"random values of shape {sizes} for the input '{spec.name}' are too many: at most {MAX_VALUES}"
        )
    return sizes


def _values(rng: np.random.Generator, spec: InputSpec, shape: tuple[int, ...]) -> Array:
    kind = spec.dtype
    if kind is None or kind.kind == "O":
        raise DataError(f"the input '{spec.name}' ({spec}) cannot be drawn: give --data")
    if kind.kind in "iub":
        return rng.integers(0, INDEX_END, shape).astype(kind)
    return rng.standard_normal(shape, np.float32).astype(kind)


__all__ = ["Shapes", "guessed_feeds", "random_feed"]
