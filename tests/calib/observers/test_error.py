"""`quantization_error` against the definition on the data, and against numeric integration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sbonnx.calib.observers import quantization_error
from sbonnx.calib.observers.quantization_error import bin_means, guessed_error
from sbonnx.calib.sketches import Distribution
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, params_from_bounds
from tests.calib.observers.reference import (
    FAMILIES,
    large,
    rms,
    rms_width,
    sketch_of,
    small,
    specs,
    tensors,
    true_error,
)

FLOAT32 = 2e-7
"""Relative rounding of one float32 operation and a half."""

shrinks = st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.1, 2.0])


def shrunk(x: Array, spec: QuantSpec, low: float, high: float) -> QParams:
    """Parameters of the range of `x`, its ends shrunk."""
    with np.errstate(over="ignore"):
        return params_from_bounds(Bounds(x.min() * np.float32(low), x.max() * np.float32(high)), spec)


@settings(max_examples=300, deadline=None)
@given(x=small, spec=specs, low=shrinks, high=shrinks)
def test_exact_where_the_sketch_is(x: Array, spec: QuantSpec, low: float, high: float) -> None:
    params = shrunk(x, spec, low, high)
    found = quantization_error(sketch_of(x[None]).distribution(), params)
    np.testing.assert_allclose(found, [true_error(x, params)], rtol=1e-11)


@settings(max_examples=300, deadline=None)
@given(x=large, spec=specs, low=shrinks, high=shrinks)
def test_binned_within_the_widths_of_the_bins(x: Array, spec: QuantSpec, low: float, high: float) -> None:
    """The roots of both errors differ by no more than the rms width, which is below a 128th of the rms of the data."""
    params, distribution = shrunk(x, spec, low, high), sketch_of(x[None]).distribution()
    assert not distribution.exact
    width = rms_width(distribution)
    assert width <= rms(x) / 128
    found, true = quantization_error(distribution, params)[0], true_error(x, params)
    slack = FLOAT32 * (rms(x) + float(params.scale)) + 1e-37
    assert abs(np.sqrt(found) - np.sqrt(true)) <= width + slack


@settings(max_examples=40, deadline=None)
@given(x=st.lists(tensors(20000, 20000), min_size=3, max_size=3), spec=specs)
def test_channels_have_coarser_bins(x: list[Array], spec: QuantSpec) -> None:
    """The same per channel, with a 32nd; and each channel by its own scale."""
    rows = np.stack(x)
    params = params_from_bounds(Bounds(rows.min(axis=1), rows.max(axis=1)), spec)
    distribution = sketch_of(rows, axis=0).distribution()
    found, true = quantization_error(distribution, params), true_error(rows, params)
    size = np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1))
    slack = FLOAT32 * (size + params.scale) + 1e-37
    assert (np.abs(np.sqrt(found) - np.sqrt(true)) <= size / 32 + slack).all()


@settings(max_examples=60, deadline=None)
@given(x=large, spec=specs)
def test_what_is_guessed_comes_from_wide_bins(x: Array, spec: QuantSpec) -> None:
    """None of it where the sketch is exact; all of it where every bin is wide."""
    params = shrunk(x, spec, 1.0, 1.0)
    assert guessed_error(sketch_of(x[None, :1000]).distribution(), params).tolist() == [0.0]
    distribution = sketch_of(x[None]).distribution()
    wide = distribution.right - distribution.left >= 0.5 * float(params.scale)
    zero = np.zeros(1)
    kept = Distribution(distribution.left, distribution.right, distribution.counts * wide, zero, zero, exact=False)
    want = quantization_error(kept, params) * kept.total / len(x)
    np.testing.assert_allclose(guessed_error(distribution, params), want, rtol=1e-12)


@pytest.mark.parametrize("family", ["normal", "laplace", "relu", "gelu", "heavy tails"])
@pytest.mark.parametrize("spec", [QuantSpec(), QuantSpec(bits=4), QuantSpec(signed=False, symmetric=False)])
def test_smooth_data_is_much_nearer(family: str, spec: QuantSpec) -> None:
    """Where values do fill the bins evenly the error is right to a percent."""
    x = FAMILIES[family](np.random.default_rng(3), 400_000).astype(np.float32)
    params = shrunk(x, spec, 0.8, 0.8)
    found = quantization_error(sketch_of(x[None]).distribution(), params)[0]
    assert found == pytest.approx(float(true_error(x, params)), rel=0.01)


@settings(max_examples=200, deadline=None)
@given(
    u=st.floats(-400, 400), width=st.sampled_from([0.0, 1e-9, 1e-3, 0.3, 0.99, 1.0, 2.5, 40.0]),
    lowest=st.integers(-200, 0), steps=st.integers(1, 255),
)  # fmt: skip
def test_means_of_bins_by_numeric_integration(u: float, width: float, lowest: int, steps: int) -> None:
    at = u + (np.arange(20001) + 0.5) / 20001 * width
    off = at - np.clip(np.rint(at), lowest, lowest + steps)
    ends = (np.array([lowest]), np.array([lowest + steps]))
    found = bin_means(np.array([u]), np.array([u + width]), *ends)
    assert found[0] == pytest.approx((off**2).mean(), rel=1e-4, abs=1e-6)


def test_one_scale_for_many_ranges_and_none_seen() -> None:
    rows = np.stack([np.linspace(-1, 1, 11), np.linspace(0, 3, 11)]).astype(np.float32)
    params = params_from_bounds(Bounds(np.float32(-1), np.float32(3)), QuantSpec(bits=4, symmetric=False))
    found = quantization_error(sketch_of(rows, axis=0).distribution(), params)
    np.testing.assert_allclose(found, [true_error(row, params) for row in rows])
    nothing = np.zeros((1, 0))
    zero = np.zeros(1)
    empty = Distribution(nothing, nothing, np.zeros((1, 0), np.int64), zero, zero, exact=True)
    assert quantization_error(empty, params).tolist() == [0.0]


def test_scales_must_fit_the_ranges() -> None:
    rows = np.ones((3, 4), np.float32)
    params = params_from_bounds(Bounds(np.zeros(2, np.float32), np.ones(2, np.float32)), QuantSpec())
    with pytest.raises(ValueError, match="2 scales for 3 ranges"):
        quantization_error(sketch_of(rows, axis=0).distribution(), params)


@settings(max_examples=20, deadline=None)
@given(x=tensors(200_000, 400_000))
def test_long_and_short_rows_agree(x: Array) -> None:
    """More values than are worked on at once."""
    assume(x.any())
    params = shrunk(x, QuantSpec(bits=4), 1.0, 1.0)
    ones = np.ones((1, len(x)), np.int64)
    row = np.sort(x)[None]
    ends = np.array([float(x.min())]), np.array([float(x.max())])
    found = quantization_error(Distribution(row, row, ones, *ends, exact=True), params)
    np.testing.assert_allclose(found, [true_error(x, params)], rtol=1e-10)
