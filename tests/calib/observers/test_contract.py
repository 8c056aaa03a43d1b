"""What every observer keeps to: the contract of plug-ins, and arbitrary data. A row in `OBSERVERS` is tested here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx import testing
from sbonnx.calib.observers import OBSERVERS, make_observer
from sbonnx.errors import RecipeError
from sbonnx.spec import Array, Bounds, QuantSpec, params_from_bounds
from tests.calib.observers.reference import EXACT, SPECS, error_of, large, sketch_of, small

X = np.random.default_rng(0).standard_normal((12, 3, 5)).astype(np.float32) * np.arange(1, 13)[:, None, None]
X = X.astype(np.float32)
LONG = np.random.default_rng(1).laplace(size=(12, 3, EXACT // 18)).astype(np.float32)
"""Twice of what stays exact."""

SEARCHES = {"mse", "auto"}
"""One range is searched by other arithmetic than many: not the same bits, as good a range."""

by_name = pytest.mark.parametrize("name", OBSERVERS)
SPEC = QuantSpec(bits=4, signed=False, symmetric=False)


def solved(name: str, *arrays: Array, axis: int | None = None, spec: QuantSpec = SPEC) -> Bounds:
    """The bounds of the observer called `name` after it saw `arrays`."""
    return make_observer(name).bounds(sketch_of(*arrays, axis=axis, name=name), spec)


def assert_same(one: Bounds, other: Bounds) -> None:
    """Bit for bit."""
    for a, b in ((one.lo, other.lo), (one.hi, other.hi)):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@by_name
def test_the_contract_of_plugins(name: str) -> None:
    testing.check_observer(name)


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
    """And give parameters, whatever the data. Sparsebit's rule goes beyond, never anywhere that is not finite."""
    sketch = sketch_of(x[None], name=name)
    bounds, other = (make_observer(name).bounds(sketch, spec, rule) for rule in ("exact", "sparsebit"))
    assert bounds.lo.shape == ()
    assert x.min() <= bounds.lo <= bounds.hi <= x.max()
    assert not (np.signbit(bounds.lo) and bounds.lo == 0)
    assert params_from_bounds(bounds, spec).scale > 0
    assert other.lo <= other.hi and np.isfinite([other.lo, other.hi]).all()


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
