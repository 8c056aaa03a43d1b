"""The method of least error, against each method on its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.observers import Auto, make_observer, quantization_error
from sbonnx.calib.observers.mse import GAIN, to_beat
from sbonnx.spec import Array, Bounds, QuantSpec, params_from_bounds
from tests.calib.observers.reference import FAMILIES, error_of, large, rms, rms_width, sketch_of, small, specs

METHODS: tuple[tuple[str, dict[str, str]], ...] = (
    ("minmax", {}),
    ("percentile", {}),
    ("mse", {}),
    ("kl_histogram", {}),
    ("aciq", {"distribution": "gaus"}),
    ("aciq", {"distribution": "laplace"}),
)


@settings(max_examples=80, deadline=None)
@given(x=small, spec=specs)
def test_no_method_is_better(x: Array, spec: QuantSpec) -> None:
    sketch = sketch_of(x[None])
    found = error_of(x, Auto().bounds(sketch, spec), spec)
    for name, arguments in METHODS:
        other = error_of(x, make_observer(name, arguments).bounds(sketch, spec), spec)
        assert found <= other * (1 + 1e-9), name


@settings(max_examples=50, deadline=None)
@given(x=large, spec=specs)
def test_no_method_is_better_by_more_than_the_bound(x: Array, spec: QuantSpec) -> None:
    """Binned: the least error on the sketch, or the whole range; on the data, two widths above the least at most."""
    sketch = sketch_of(x[None])
    distribution, bounds = sketch.distribution(), Auto().bounds(sketch, spec)
    found = float(quantization_error(distribution, params_from_bounds(bounds, spec))[0])
    others = [make_observer(name, arguments).bounds(sketch, spec) for name, arguments in METHODS]
    errors = [float(quantization_error(distribution, params_from_bounds(other, spec))[0]) for other in others]
    whole, least = errors[0], min(errors)
    limit = float(to_beat(distribution, params_from_bounds(others[0], spec), np.array([whole]))[0])
    assert limit <= whole * (1 - GAIN)
    assert found == (least if least < limit else whole)
    if found == least:
        best = min(np.sqrt(error_of(x, other, spec)) for other in others)
        slack = 2 * rms_width(distribution) + 1e-6 * rms(x) + 1e-37
        assert np.sqrt(error_of(x, bounds, spec)) <= best + slack


@pytest.mark.parametrize("family", FAMILIES)
def test_never_worse_than_minmax_on_the_data(family: str) -> None:
    for spec in (QuantSpec(), QuantSpec(bits=4), QuantSpec(signed=False, symmetric=False)):
        x = FAMILIES[family](np.random.default_rng(7), 40_000).astype(np.float32)
        found = error_of(x, Auto().bounds(sketch_of(x[None]), spec), spec)
        assert found <= error_of(x, Bounds(x.min(), x.max()), spec) * (1 + 1e-9)


def test_of_equals_the_whole_range() -> None:
    """Values that every method has exactly."""
    x = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    bounds = Auto().bounds(sketch_of(x), QuantSpec(bits=2, signed=False, symmetric=False))
    assert [float(bounds.lo), float(bounds.hi)] == [0.0, 3.0]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_each_channel_has_its_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.standard_normal(600), rng.standard_t(2, 600), rng.random(600)]).astype(np.float32)
    spec = QuantSpec(bits=4)
    bounds = Auto().bounds(sketch_of(rows, axis=0), spec)
    for row, lo, hi in zip(rows, bounds.lo, bounds.hi, strict=True):
        alone = error_of(row, Auto().bounds(sketch_of(row[None]), spec), spec)
        both = error_of(row, Bounds(lo, hi), spec)
        assert both == pytest.approx(alone, rel=0.02)
