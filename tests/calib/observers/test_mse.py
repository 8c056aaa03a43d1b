"""The least mean squared error, against dense searches on the data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.observers import Mse, quantization_error
from sbonnx.calib.observers.base import ObserverTarget
from sbonnx.calib.observers.mse import errors_of, least_ends
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, ScaleRule, params_from_bounds
from tests.calib.observers.reference import (
    FAMILIES,
    error_of,
    large,
    rms,
    rms_width,
    sketch_of,
    small,
    specs,
    true_error,
)

rules: st.SearchStrategy[ScaleRule] = st.sampled_from(["exact", "sparsebit"])


def params_of(bounds: Bounds, spec: QuantSpec, rule: ScaleRule = "exact") -> QParams:
    """Parameters by the rule."""
    return params_from_bounds(bounds, spec, rule=rule)


def whole(x: Array) -> Bounds:
    """The range of `x`."""
    return Bounds(x.min(), x.max())


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(x=st.one_of(small, large), spec=specs, rule=rules)
def test_never_worse_than_minmax_on_the_sketch(x: Array, spec: QuantSpec, rule: ScaleRule) -> None:
    sketch = sketch_of(x[None])
    found = quantization_error(sketch.distribution(), params_of(Mse().bounds(sketch, spec, rule), spec, rule))
    assert found <= quantization_error(sketch.distribution(), params_of(whole(x), spec, rule))


@settings(max_examples=100, deadline=None)
@given(x=small, spec=specs)
def test_never_worse_than_minmax_on_data_that_stay_exact(x: Array, spec: QuantSpec) -> None:
    found = error_of(x, Mse().bounds(sketch_of(x[None]), spec), spec)
    assert found <= error_of(x, whole(x), spec) * (1 + 1e-12)


@settings(max_examples=80, deadline=None)
@given(x=large, spec=specs)
def test_binned_is_worse_than_a_range_tried_by_two_widths_at_most(x: Array, spec: QuantSpec) -> None:
    """The bound, against the whole range."""
    sketch = sketch_of(x[None])
    found = np.sqrt(error_of(x, Mse().bounds(sketch, spec), spec))
    slack = 1e-6 * rms(x) + 1e-37
    assert found <= np.sqrt(error_of(x, whole(x), spec)) + 2 * rms_width(sketch.distribution()) + slack


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [QuantSpec(), QuantSpec(bits=4), QuantSpec(signed=False, symmetric=False)])
def test_binned_is_not_worse_than_minmax_on_the_data(family: str, spec: QuantSpec) -> None:
    """What is lost by knowing values to a bin does not show, spikes at the ends and grids included."""
    x = FAMILIES[family](np.random.default_rng(5), 50_000).astype(np.float32)
    found = error_of(x, Mse().bounds(sketch_of(x[None]), spec), spec)
    assert found <= error_of(x, whole(x), spec) * (1 + 1e-9)


def dense(x: Array, spec: QuantSpec, count: int) -> float:
    """Least error of `x` over `count` ranges (of two ends: its square)."""
    shares = np.geomspace(1, 0.003, count).astype(np.float32)
    if spec.symmetric:
        t = np.abs(x).max() * shares
        bounds = Bounds(np.maximum(x.min(), -t), np.minimum(x.max(), t))
    else:
        low, high = np.meshgrid(x.min() * shares, x.max() * shares)
        bounds = Bounds(low.ravel(), high.ravel())
    return float(true_error(np.broadcast_to(x, (bounds.lo.size, len(x))), params_of(bounds, spec)).min())


@pytest.mark.parametrize("family", ["normal", "laplace", "relu", "gelu", "heavy tails", "offset", "single outlier"])
@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (QuantSpec(), 400),
        (QuantSpec(bits=4), 400),
        (QuantSpec(bits=2), 400),
        (QuantSpec(bits=4, signed=False, symmetric=False), 30),
        (QuantSpec(bits=8, symmetric=False), 30),
    ],
)
def test_near_a_dense_search(family: str, spec: QuantSpec, count: int) -> None:
    """On average level with it, and a few percent above at worst."""
    ratios = []
    for seed in range(5):
        x = FAMILIES[family](np.random.default_rng(seed), 500).astype(np.float32)
        ratios.append(error_of(x, Mse().bounds(sketch_of(x[None]), spec), spec) / dense(x, spec, count))
    assert np.mean(ratios) < 1.005
    assert max(ratios) < 1.03


@settings(max_examples=40, deadline=None)
@given(x=small)
def test_the_ancestors_grid(x: Array) -> None:
    """The best of 80 steps, the first of equals."""
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    best, want = np.inf, whole(x)
    for step in range(80):
        share = np.float32(1 - 0.01 * step)
        tried = Bounds(x.min() * share, x.max() * share)
        error = float(true_error(x, params_of(tried, spec, "sparsebit")))
        if error < best * (1 - 1e-12):
            best, want = error, tried
    found = Mse().bounds(sketch_of(x[None]), spec, "sparsebit")
    got = float(true_error(x, params_of(found, spec, "sparsebit")))
    assert got == pytest.approx(best, rel=1e-9)
    if best < float(true_error(x, params_of(whole(x), spec, "sparsebit"))) * (1 - 1e-9):
        np.testing.assert_allclose([found.lo, found.hi], [want.lo, want.hi], rtol=0.02)


@settings(max_examples=60, deadline=None)
@given(x=st.one_of(small, large), spec=specs, low=st.floats(0.05, 1), high=st.floats(0.05, 1))
def test_quick_errors_rank_like_the_true_ones(x: Array, spec: QuantSpec, low: float, high: float) -> None:
    """Both quick ways give `quantization_error`, for one range (running totals) and for two (values or bins)."""
    for rows in (x[None], np.stack([x, x])):
        distribution = sketch_of(rows, axis=0).distribution()
        target = ObserverTarget.of(spec)
        lo, hi = (np.full((2, len(rows)), float(end)) for end in (x.min() * low, x.max() * high))
        lo[1], hi[1] = float(x.min()), float(x.max())
        found = errors_of([distribution], target)(lo, hi)
        assert found.shape == (2, len(rows))
        for row in range(2):
            want = quantization_error(distribution, target.params(lo[row], hi[row]))
            scale = float(target.params(lo[row], hi[row]).scale[0])
            # One way rounds the value that a code stands for to float32: an error e becomes e + d, |d| <= 2 eps |x|.
            d = 2e-7 * rms(x)
            slack = (1e-6 * scale) ** 2 + 1e-12 * rms(x) ** 2 + d**2 + 2 * d * np.sqrt(want.max())
            np.testing.assert_allclose(found[row], want, rtol=1e-3, atol=slack + 1e-80)


@settings(max_examples=60, deadline=None)
@given(x=st.one_of(small, large), spec=st.sampled_from([QuantSpec(bits=4), QuantSpec(bits=3, symmetric=False)]))
def test_ends_that_are_not_tried_could_not_be_better(x: Array, spec: QuantSpec) -> None:
    distribution = sketch_of(x[None]).distribution()
    error = quantization_error(distribution, params_of(whole(x), spec))
    low, high = (float(end[0]) for end in least_ends(distribution, error))
    wide = x.astype(np.float64)
    if high > 0:
        assert (np.maximum(wide - 0.98 * high, 0) ** 2).mean() >= float(error[0]) * (1 - 1e-9)
    if low < 0:
        assert (np.maximum(0.98 * low - wide, 0) ** 2).mean() >= float(error[0]) * (1 - 1e-9)
