"""What every observer keeps to: the contract of plug-ins, and arbitrary data. A row in `OBSERVERS` is tested here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sbonnx import testing
from sbonnx.calib.observers import OBSERVERS, make_observer
from sbonnx.errors import RecipeError
from sbonnx.spec import Array, Bounds, QuantSpec
from tests.calib.observers.reference import SPECS, error_of, sketch_of

X = np.random.default_rng(0).standard_normal((12, 3, 5)).astype(np.float32) * np.arange(1, 13)[:, None, None]
X = X.astype(np.float32)

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
