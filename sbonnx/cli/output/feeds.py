"""Synthetic feeds, for models without data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

from sbonnx.errors import DataError

if TYPE_CHECKING:
    from sbonnx.calib.data import InputSpec
    from sbonnx.graph import Graph
    from sbonnx.spec import Array

BATCH: Final = 2
"""Size of a dynamic first axis."""

LENGTHS: Final = (8, 32, 64, 224, 1)
"""Sizes to try for the other dynamic axes: short texts and small images first."""

LARGEST: Final = 1 << 26
"""Maximum number of elements of one synthetic input."""

SEEDS: Final = (0, 1)
"""Seeds, one feed each: feeds may take different branches of the model."""

Feed = dict[str, "Array"]


def guesses(specs: Sequence[InputSpec]) -> Iterator[list[Feed]]:
    """Yield feeds for each guess of the dynamic axes: normal floats, integers 0 or 1, deterministic.

    Raises:
        DataError: an input is too large.
    """
    batches = (BATCH, 1) if any(spec.shape and not isinstance(spec.shape[0], int) for spec in specs) else (BATCH,)
    fixed = all(isinstance(dim, int) for spec in specs for dim in (spec.shape or ())[1:])
    for length in LENGTHS[:1] if fixed else LENGTHS:
        for batch in batches:
            yield [_feed(specs, batch, length, seed) for seed in SEEDS]


def _feed(specs: Sequence[InputSpec], batch: int, length: int, seed: int) -> Feed:
    import numpy as np

    rng = np.random.default_rng(seed)
    named: dict[str, int] = {}
    feed: Feed = {}
    for spec in specs:
        shape = []
        for axis, dim in enumerate(spec.shape or ()):
            guess = batch if axis == 0 else length
            shape.append(named.setdefault(dim, guess) if isinstance(dim, str) else guess if dim is None else dim)
        if prod(shape) > LARGEST:
            raise DataError(f"input '{spec.name}' of shape {shape} is too large to be made up: give --data")
        feed[spec.name] = _values(rng, spec.dtype, shape)
    return feed


def _values(rng: Any, dtype: Any, shape: Sequence[int]) -> Array:
    import numpy as np

    if dtype is None or dtype.kind == "O":
        return np.full(shape, "a", dtype=object)
    if dtype.kind in "iub":
        return np.asarray(rng.integers(0, 2, shape)).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def workable(graph: Graph, guessed: Iterable[list[Feed]]) -> tuple[list[Feed], str]:
    """Return the first guess that the model runs on; else an empty list and the reason of the last failure."""
    from sbonnx.calib.engine.runner import LayerRunner

    why = "it has no inputs to guess"
    with LayerRunner(graph) as run:
        try:
            for feeds in guessed:
                try:
                    for feed in feeds:
                        run(feed)
                except DataError as error:
                    why = str(error)
                    continue
                return feeds, ""
        except DataError as error:  # raised by `guesses`
            why = str(error)
    return [], why
