"""The contract of observers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from sbonnx.calib.observers import Observer, make_observer
from sbonnx.calib.sketches import Sketch
from sbonnx.spec import Array, Bounds, QuantSpec, params_from_bounds

SAMPLES: Final = 12
EXACT_SIZE: Final = 15
BINNED_SIZE: Final = 2_000
"""Values per sample: with the first a sketch holds the values themselves, with the second a histogram."""

FAMILIES: Final[dict[str, Callable[[np.random.Generator, int], Array]]] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "after a rectifier": lambda rng, n: np.maximum(rng.standard_normal(n), 0),
    "heavy tails": lambda rng, n: rng.standard_t(2, n),
    "far from zero": lambda rng, n: 0.1 * rng.standard_normal(n) + 10,
    "negative": lambda rng, n: -rng.exponential(size=n),
    "all equal": lambda rng, n: np.full(n, 0.5),
    "all zero": lambda rng, n: np.zeros(n),
    "tiny": lambda rng, n: 1e-30 * rng.standard_normal(n),
    "huge": lambda rng, n: 1e30 * rng.standard_normal(n),
}
"""Distributions by name: generator and size to values."""

SPECS: Final = (QuantSpec(), QuantSpec(bits=4), QuantSpec(bits=4, signed=False, symmetric=False), QuantSpec(bits=16))


def check_observer(name: str) -> None:
    """Check the observer with this recipe name.

    The clauses: bounds are float32, finite, ordered and within the data, for every distribution and width; they do not
    depend on the order of the samples or on how they are split over workers; one channel has the bounds that it has
    alone, within 1 % of the range; the sketch stays unchanged; without finite values they are zero; the observer is a
    frozen value.

    Args:
        name: of an installed or built-in observer.

    Raises:
        AssertionError: a clause is broken.
        RecipeError: there is no such observer.
    """
    observer = make_observer(name)
    assert observer == make_observer(name), f"observer '{name}': two with equal arguments differ"
    rng = np.random.default_rng(0)
    for family, make in FAMILIES.items():
        for size in (EXACT_SIZE, BINNED_SIZE):
            values = make(rng, SAMPLES * size).astype(np.float32).reshape(SAMPLES, size)
            for spec in SPECS:
                _check_bounds(observer, f"observer '{name}' on {family} values, {spec.label()}", values, spec)
    _check_nothing(observer, name)
    _check_channels(observer, name, rng)


def _check_bounds(observer: Observer, where: str, values: Array, spec: QuantSpec) -> None:
    sketch = _sketch(observer, values, range(SAMPLES))
    before = sketch.to_arrays()
    bounds = observer.bounds(sketch, spec)
    assert bounds.lo.dtype == bounds.hi.dtype == np.float32, f"{where}: bounds are float32"
    assert bounds.lo.shape == bounds.hi.shape == (), f"{where}: bounds without an axis are scalars"
    assert values.min() <= bounds.lo <= bounds.hi <= values.max(), f"{where}: bounds are ordered and within the data"
    assert params_from_bounds(bounds, spec).scale > 0, f"{where}: bounds give a scale above 0"
    for key, value in sketch.to_arrays().items():
        assert np.array_equal(before[key], value), f"{where}: the sketch is not changed"
    reordered = _sketch(observer, values, reversed(range(SAMPLES)))
    assert _same(bounds, observer.bounds(reordered, spec)), f"{where}: the order of the samples does not count"
    halves = [_sketch(observer, values, range(start, SAMPLES, 2)) for start in (1, 0)]
    halves[0].merge(halves[1])
    assert _same(bounds, observer.bounds(halves[0], spec)), f"{where}: merged sketches give the same bounds"


def _check_nothing(observer: Observer, name: str) -> None:
    sketch = _sketch(observer, np.full((1, 3), np.nan, np.float32), range(1))
    bounds = observer.bounds(sketch, SPECS[0])
    assert not bounds.lo.any() and not bounds.hi.any(), f"observer '{name}': without finite values bounds are zero"


def _check_channels(observer: Observer, name: str, rng: np.random.Generator) -> None:
    channels = np.stack([rng.standard_normal((SAMPLES, 64)) * size for size in (1, 0.01, 100)], axis=1)
    sketch = _sketch(observer, channels.astype(np.float32), range(SAMPLES), axis=1)
    bounds = observer.bounds(sketch, SPECS[0])
    assert bounds.lo.shape == (3,), f"observer '{name}': one range for each channel"
    for index in range(3):
        single = _sketch(observer, channels[:, index].astype(np.float32), range(SAMPLES))
        alone = observer.bounds(single, SPECS[0])
        width = float(alone.hi - alone.lo)
        close = np.allclose([bounds.lo[index], bounds.hi[index]], [alone.lo, alone.hi], rtol=0, atol=0.01 * width)
        assert close, f"observer '{name}': a channel has the range that it has alone"


def _sketch(observer: Observer, values: Array, order: Iterable[int], axis: int | None = None) -> Sketch:
    """Return a sketch of what the observer needs; samples of (N, ...) `values` are observed in the given order."""
    histogram = observer.needs == "histogram"
    sketch = Sketch(axis=axis, detail="histogram" if histogram else "range", track=observer.needs == "track")
    for index in order:
        sketch.observe(values[index : index + 1], index)
    return sketch


def _same(one: Bounds, other: Bounds) -> bool:
    return bool(np.array_equal(one.lo, other.lo) and np.array_equal(one.hi, other.hi))
