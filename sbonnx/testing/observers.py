"""The contract of observers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from sbonnx.calib.observers import Observer, make_observer
from sbonnx.calib.sketches import Sketch
from sbonnx.recipe.sections.base import Section
from sbonnx.spec import Array, Bounds, QuantSpec, ScaleRule, params_from_bounds

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
    "one value below zeros": lambda rng, n: np.append(np.zeros(n - 1), -1.0),
    "one outlier": lambda rng, n: np.append(rng.standard_normal(n - 1), 100.0),
    "tiny": lambda rng, n: 1e-30 * rng.standard_normal(n),
    "huge": lambda rng, n: 1e30 * rng.standard_normal(n),
}
"""Distributions by name: generator and size to values."""

RULES: Final[tuple[ScaleRule, ...]] = ("exact", "sparsebit")

SPECS: Final = (QuantSpec(), QuantSpec(bits=4), QuantSpec(bits=4, signed=False, symmetric=False), QuantSpec(bits=16))


def check_observer(name: str) -> None:
    """Check the observer with this recipe name.

    The clauses: bounds are float32, finite, ordered, within the data and never -0.0, for every distribution and width;
    they do not depend on the order of the samples, on how they are split over batches and workers, or on a trip of
    the sketch through a cache; several tensors at once have the bounds of each alone; one channel has the bounds that
    it has alone, within 1 % of the range; values that are not finite are left out, and without others bounds are zero;
    the sketch stays unchanged; the rule of Sparsebit gives finite bounds too; a sketch of what the observer `needs` is
    enough, and one of less is a ValueError; the observer is a frozen dataclass without other state.

    Args:
        name: of an installed or built-in observer.

    Raises:
        AssertionError: a clause is broken.
        RecipeError: there is no such observer.
    """
    observer = make_observer(name)
    _check_value(observer, name)
    rng = np.random.default_rng(0)
    for family, make in FAMILIES.items():
        for size in (EXACT_SIZE, BINNED_SIZE):
            values = make(rng, SAMPLES * size).astype(np.float32).reshape(SAMPLES, size)
            for spec in SPECS:
                _check_bounds(observer, f"observer '{name}' on {family} values, {spec.label()}", values, spec)
    _check_nothing(observer, name)
    _check_not_finite(observer, name, rng)
    _check_channels(observer, name, rng)
    _check_together(observer, name, rng)
    _check_needs(observer, name, rng)


def _check_value(observer: Observer, name: str) -> None:
    assert observer == make_observer(name), f"observer '{name}': two with equal arguments differ"
    kind = type(observer)
    if isinstance(observer, Section):
        return
    assert dataclasses.is_dataclass(observer), f"observer '{name}': it is a dataclass"
    assert kind.__dataclass_params__.frozen, f"observer '{name}': it is frozen"  # type: ignore[attr-defined]
    fields = {field.name for field in dataclasses.fields(observer)}
    assert vars(observer).keys() == fields, f"observer '{name}': it has no state but its arguments"


def _check_bounds(observer: Observer, where: str, values: Array, spec: QuantSpec) -> None:
    sketch = _sketch(observer, values, range(SAMPLES))
    before = sketch.to_arrays()
    bounds = observer.bounds(sketch, spec)
    assert bounds.lo.dtype == bounds.hi.dtype == np.float32, f"{where}: bounds are float32"
    assert bounds.lo.shape == bounds.hi.shape == (), f"{where}: bounds without an axis are scalars"
    assert values.min() <= bounds.lo <= bounds.hi <= values.max(), f"{where}: bounds are ordered and within the data"
    assert not (np.signbit(bounds.lo) and bounds.lo == 0), f"{where}: the lower bound is not -0.0"
    assert params_from_bounds(bounds, spec).scale > 0, f"{where}: bounds give a scale above 0"
    for key, value in sketch.to_arrays().items():
        assert np.array_equal(before[key], value), f"{where}: the sketch is not changed"
    reordered = _sketch(observer, values, reversed(range(SAMPLES)))
    assert _same(bounds, observer.bounds(reordered, spec)), f"{where}: the order of the samples does not count"
    halves = [_sketch(observer, values, range(start, SAMPLES, 2)) for start in (1, 0)]
    stored = Sketch.from_arrays(halves[0].to_arrays())
    stored.merge(halves[1])
    assert _same(bounds, observer.bounds(stored, spec)), f"{where}: stored and merged sketches give the same bounds"
    batches = _sketch(observer, values.reshape(SAMPLES // 3, 3, -1), range(SAMPLES // 3))
    assert observer.needs == "track" or _same(bounds, observer.bounds(batches, spec)), f"{where}: batches do not count"
    other = observer.bounds(sketch, spec, "sparsebit")
    assert np.isfinite([other.lo, other.hi]).all() and other.lo <= other.hi, f"{where}: Sparsebit's rule gives bounds"


def _check_nothing(observer: Observer, name: str) -> None:
    for axis, rule in itertools.product((None, 1), RULES):
        for values in (np.zeros((0, 3)), np.zeros((2, 3, 0)), np.full((2, 3), np.nan)):
            sketch = _sketch(observer, values.astype(np.float32), range(len(values)), axis)
            bounds = observer.bounds(sketch, SPECS[0], rule)
            assert bounds.lo.dtype == bounds.hi.dtype == np.float32, f"observer '{name}': bounds are float32"
            empty = not bounds.lo.any() and not bounds.hi.any()
            assert empty, f"observer '{name}': without finite values bounds are zero"


def _check_not_finite(observer: Observer, name: str, rng: np.random.Generator) -> None:
    for size, rule in itertools.product((EXACT_SIZE, BINNED_SIZE), RULES):
        values = rng.standard_normal((SAMPLES, size)).astype(np.float32)
        values[2, 1], values[5, 2:4], values[7, 4] = np.nan, np.inf, -np.inf
        bounds = observer.bounds(_sketch(observer, values, range(SAMPLES)), SPECS[0], rule)
        assert np.isfinite([bounds.lo, bounds.hi]).all(), f"observer '{name}': bounds are finite"
        assert bounds.hi > 0 > bounds.lo, f"observer '{name}': values that are not finite are left out, others are not"


def _check_together(observer: Observer, name: str, rng: np.random.Generator) -> None:
    values = [make(rng, SAMPLES * size).reshape(SAMPLES, size) for make in FAMILIES.values() for size in (30, 2000)]
    sketches = [_sketch(observer, value.astype(np.float32), range(SAMPLES)) for value in values]
    sketches.append(_sketch(observer, rng.standard_normal((SAMPLES, 3, 5)).astype(np.float32), range(SAMPLES), 1))
    for spec, rule in itertools.product(SPECS, RULES):
        for bounds, sketch in zip(observer.bounds_of(sketches, spec, rule), sketches, strict=True):
            assert _same(bounds, observer.bounds(sketch, spec, rule)), f"observer '{name}': each tensor as if alone"


def _check_needs(observer: Observer, name: str, rng: np.random.Generator) -> None:
    values = rng.standard_normal((SAMPLES, EXACT_SIZE))
    half = values.astype(np.float16)
    bounds = [
        observer.bounds(_sketch(observer, half.astype(kind), range(SAMPLES)), SPECS[0])
        for kind in (np.float16, np.float32, np.float64)
    ]
    assert _same(bounds[0], bounds[1]) and _same(bounds[1], bounds[2]), f"observer '{name}': float types do not count"
    if observer.needs == "range":
        return
    try:
        observer.bounds(Sketch(detail="range"), SPECS[0])
    except ValueError:
        return
    raise AssertionError(f"observer '{name}': a sketch without what it needs is a ValueError")


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
