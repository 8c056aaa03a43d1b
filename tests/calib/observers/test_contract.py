"""What every observer keeps to. A row in `OBSERVERS` is tested here without another line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.observers import OBSERVERS, make_observer
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import RecipeError
from sbonnx.spec import Array, Bounds, QuantSpec, ScaleRule, params_from_bounds
from tests.calib.observers.reference import EXACT, FAMILIES, SPECS, error_of, large, sketch_of, small

X = np.random.default_rng(0).standard_normal((12, 3, 5)).astype(np.float32) * np.arange(1, 13)[:, None, None]
X = X.astype(np.float32)
LONG = np.random.default_rng(1).laplace(size=(12, 3, EXACT // 18)).astype(np.float32)
"""Twice of what stays exact."""

SEARCHES = {"mse", "auto"}
"""One range is searched by other arithmetic than many: not the same bits, as good a range."""

by_name = pytest.mark.parametrize("name", OBSERVERS)
by_data = pytest.mark.parametrize("data", [X, LONG], ids=["exact", "binned"])
by_rule = pytest.mark.parametrize("rule", ["exact", "sparsebit"])
SPEC = QuantSpec(bits=4, signed=False, symmetric=False)


def solved(
    name: str, *arrays: Array, axis: int | None = None, spec: QuantSpec = SPEC, rule: ScaleRule = "exact"
) -> Bounds:
    """The bounds of the observer called `name` after it saw `arrays`."""
    return make_observer(name).bounds(sketch_of(*arrays, axis=axis, name=name), spec, rule)


def assert_same(one: Bounds, other: Bounds) -> None:
    """Bit for bit."""
    for a, b in ((one.lo, other.lo), (one.hi, other.hi)):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@by_name
@by_data
@by_rule
@pytest.mark.parametrize("axis", [None, 1])
def test_one_stream_or_batches(name: str, data: Array, rule: ScaleRule, axis: int | None) -> None:
    """Where the data is cut into batches does not change the answer (the ancestor's aciq counts samples)."""
    whole = solved(name, *data[:, None], axis=axis, rule=rule)
    merged = Sketch.from_arrays(sketch_of(*data[:5, None], axis=axis, name=name).to_arrays())
    tail = Sketch(axis=axis, detail=merged.detail, track=merged.tracks)
    for index in range(len(data) - 1, 4, -1):
        tail.observe(data[index : index + 1], index)
    merged.merge(tail)
    assert_same(whole, make_observer(name).bounds(merged, SPEC, rule))
    if rule == "exact":
        assert_same(whole, solved(name, data, axis=axis))


@pytest.mark.sampled(9)
@by_name
@by_rule
@pytest.mark.parametrize("spec", [SPEC, QuantSpec(), QuantSpec(bits=16)], ids=["uint4", "int8", "int16"])
def test_several_tensors_at_once(name: str, rule: ScaleRule, spec: QuantSpec) -> None:
    """Tensors of every sign and size, exact and binned, per tensor and per channel: the bits of each alone."""
    rng = np.random.default_rng(2)
    many = [family(rng, 400).astype(np.float32) for family in FAMILIES.values()]
    sketches = [sketch_of(x[None], name=name) for x in (*many, X, LONG, LONG + 20, np.zeros((0,), np.float32))]
    sketches.insert(3, sketch_of(X, axis=1, name=name))
    observer = make_observer(name)
    for one, sketch in zip(observer.bounds_of(sketches, spec, rule), sketches, strict=True):
        assert_same(one, observer.bounds(sketch, spec, rule))


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, 11), max_size=5), shuffled=st.permutations(range(12)), x=st.sampled_from([X, LONG]))
@by_name
def test_shards_in_any_order(name: str, cuts: set[int], shuffled: list[int], x: Array) -> None:
    """Samples observed in any order, in any number of sketches, merged in any order: the same bits."""
    parts = []
    for places in np.split(np.array(shuffled), sorted(cuts)):
        part = sketch_of(name=name)
        for index in places:
            part.observe(x[index : index + 1], int(index))
        parts.append(part)
    for part in parts[1:]:
        parts[0].merge(part)
    assert_same(solved(name, *x[:, None]), make_observer(name).bounds(parts[0], SPEC))


@by_name
@by_data
def test_bounds_change_nothing(name: str, data: Array) -> None:
    """Asking twice gives the same, and leaves the sketch as it was."""
    sketch = sketch_of(data, name=name)
    before = sketch.to_arrays()
    assert_same(make_observer(name).bounds(sketch, SPEC), make_observer(name).bounds(sketch, SPEC))
    after = sketch.to_arrays()
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(value, after[key])


@by_name
@pytest.mark.parametrize("spec", SPECS, ids=QuantSpec.label)
def test_per_channel_is_each_channel_alone(name: str, spec: QuantSpec) -> None:
    data = np.stack([X, np.abs(X), np.zeros_like(X), X * 1e-3, -np.abs(X), X * 1e30], axis=2).astype(np.float32)
    bounds = solved(name, *data[:, None], axis=2, spec=spec)
    assert bounds.lo.shape == bounds.hi.shape == (6,)
    for channel in range(6):
        x = data[:, None, :, channel : channel + 1]
        alone, got = solved(name, *x, spec=spec), Bounds(bounds.lo[channel], bounds.hi[channel])
        if name in SEARCHES:
            one, other = (error_of(x.ravel(), found, spec) for found in (got, alone))
            assert one == pytest.approx(other, rel=0.01)
        else:
            assert_same(got, alone)


@settings(max_examples=40, deadline=None)
@given(x=st.one_of(small, large), spec=st.sampled_from(SPECS))
@by_name
def test_bounds_lie_within_the_data(name: str, x: Array, spec: QuantSpec) -> None:
    """And give parameters, whatever the data."""
    bounds = solved(name, x[None], spec=spec)
    assert bounds.lo.shape == ()
    assert x.min() <= bounds.lo <= bounds.hi <= x.max()
    assert not (np.signbit(bounds.lo) and bounds.lo == 0)
    assert params_from_bounds(bounds, spec).scale > 0


@settings(max_examples=10, deadline=None)
@given(x=st.one_of(small, large), spec=st.sampled_from(SPECS))
@by_name
def test_the_ancestors_rule_gives_parameters_too(name: str, x: Array, spec: QuantSpec) -> None:
    """aciq goes beyond the data there; never anywhere that is not finite."""
    bounds = solved(name, x[None], spec=spec, rule="sparsebit")
    assert bounds.lo <= bounds.hi
    assert np.isfinite([bounds.lo, bounds.hi]).all()


@by_name
@by_rule
@pytest.mark.parametrize("axis", [None, 1])
def test_nothing_seen_is_zero(name: str, rule: ScaleRule, axis: int | None) -> None:
    empty = np.zeros((2, 0, 3), np.float32)
    nothing = np.full((2, 3), np.nan, np.float32)
    for arrays in ((), (empty,), (nothing,)):
        bounds = solved(name, *arrays, axis=axis, rule=rule)
        assert not bounds.lo.any()
        assert not bounds.hi.any()
        assert bounds.lo.dtype == bounds.hi.dtype == np.float32


@by_name
@by_rule
@by_data
def test_nan_and_inf_are_left_out(name: str, rule: ScaleRule, data: Array) -> None:
    dirty = data.copy()
    dirty[2, 1, 0] = np.nan
    dirty[5, 0, 1:3] = np.inf
    dirty[7, 2, 4] = -np.inf
    bounds = solved(name, *dirty[:, None], rule=rule)
    assert np.isfinite([bounds.lo, bounds.hi]).all()
    assert bounds.hi > 0 > bounds.lo


@by_name
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types(name: str, dtype: Any) -> None:
    data = X.astype(np.float16)
    assert_same(solved(name, data.astype(np.float32)), solved(name, data.astype(dtype)))


@by_name
def test_observers_are_values(name: str) -> None:
    """Frozen, without state, equal when made alike."""
    observer = make_observer(name)
    assert observer == make_observer(name)
    assert dataclasses.is_dataclass(observer)
    assert type(observer).__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert vars(observer).keys() == {field.name for field in dataclasses.fields(observer)}


@by_name
def test_what_it_needs_is_enough(name: str) -> None:
    """A sketch with no more than that gives bounds; one with less says what it lacks."""
    observer = make_observer(name)
    assert observer.bounds(sketch_of(X, name=name), SPEC).hi > 0
    if observer.needs != "range":
        with pytest.raises(ValueError, match="remember"):
            observer.bounds(Sketch(detail="range"), SPEC)


@by_name
def test_unknown_arguments_are_named(name: str) -> None:
    with pytest.raises(RecipeError, match=f"observer '{name}'.*no_such"):
        make_observer(name, {"no_such": 1})


def test_unknown_observer() -> None:
    with pytest.raises(RecipeError, match=r"there is no observer 'min_max'; there are minmax, moving_average"):
        make_observer("min_max")


@by_name
def test_it_is_in_the_document(name: str) -> None:
    """docs/observers.md has a row for what is chosen, and one for how near it is."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "observers.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1]]
    assert len(rows) >= 2
