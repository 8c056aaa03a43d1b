"""Observers against numbers from elsewhere: the ancestor's, and the definition written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sbonnx.calib.observers import MinMax, MovingAverage, make_observer
from sbonnx.errors import RecipeError
from sbonnx.spec import Array, QuantSpec, params_from_bounds


def golden_tensor() -> Array:
    """The ancestor's activation tensor, (4, 8, 8, 8), range -3.584 .. 12.036158."""
    i = np.arange(4 * 8 * 8 * 8)
    t = ((37 * i) % 1009) / 504.5 - 0.8
    x = (4 * t**3).reshape(4, 8, 8, 8)
    return (x * (1 + 0.25 * np.arange(4))[:, None, None, None]).astype(np.float32)


def test_the_golden_tensor_is_the_ancestors() -> None:
    x = golden_tensor()
    assert (x.min(), x.max()) == (pytest.approx(-3.584, abs=1e-6), pytest.approx(12.036158, abs=1e-6))


SYMMETRIC, AFFINE = "symmetric", "affine"

GOLDEN = [
    ("minmax", SYMMETRIC, 8, False, 0.094401, 0),
    ("minmax", SYMMETRIC, 4, False, 1.604821, 0),
    ("minmax", AFFINE, 8, False, 0.061256, 59),
    ("minmax", AFFINE, 4, False, 1.041344, 3),
    ("minmax", AFFINE, 8, True, 0.047201, 0),
    ("minmax", AFFINE, 4, True, 0.802411, 0),
    ("moving_average", SYMMETRIC, 8, False, 0.061278, 0),
    ("moving_average", SYMMETRIC, 4, False, 1.041729, 0),
    ("moving_average", AFFINE, 8, False, 0.039789, 59),
    ("moving_average", AFFINE, 4, False, 0.676410, 3),
    ("moving_average", AFFINE, 8, True, 0.030639, 0),
    ("moving_average", AFFINE, 4, True, 0.520865, 0),
]


@pytest.mark.parametrize(("name", "scheme", "bits", "relu", "scale", "zero"), GOLDEN)
def test_the_ancestors_numbers(name: str, scheme: str, bits: int, relu: bool, scale: float, zero: int) -> None:
    """Two batches of two, to the six decimals that were printed."""
    x = np.maximum(golden_tensor(), 0) if relu else golden_tensor()
    observer = make_observer(name, None)
    for batch in np.split(x, 2):
        observer.observe(batch)
    symmetric = scheme == SYMMETRIC
    spec = QuantSpec(bits=bits, signed=symmetric, symmetric=symmetric)
    found = params_from_bounds(observer.bounds(), spec, rule="sparsebit")
    assert float(found.scale) == pytest.approx(scale, abs=5.1e-7)
    assert int(found.zero_point) == zero


FLOATS = st.floats(-1e6, 1e6, width=32)


@given(x=arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=4, max_side=5), elements=FLOATS))
def test_minmax_is_min_and_max(x: Array) -> None:
    observer = MinMax()
    channels = MinMax(axis=1)
    for row in x:
        observer.observe(row)
        channels.observe(row[None])
    assert (observer.bounds().lo, observer.bounds().hi) == (x.min(), x.max())
    over = tuple(i for i in range(x.ndim) if i != 1)
    np.testing.assert_array_equal(channels.bounds().lo, x.min(axis=over))
    np.testing.assert_array_equal(channels.bounds().hi, x.max(axis=over))


def test_minus_zero_does_not_depend_on_the_order() -> None:
    one, other = MinMax(), MinMax()
    for value in (0.0, -0.0):
        one.observe(np.array([value], np.float32))
        other.observe(np.array([-value], np.float32))
    assert np.signbit(one.bounds().lo) == np.signbit(other.bounds().lo)


@given(samples=st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=8), ratio=st.floats(0, 0.99))
def test_moving_average_by_its_definition(samples: list[tuple[float, float]], ratio: float) -> None:
    lo, hi = min(samples[0]), max(samples[0])
    for sample in samples[1:]:
        lo, hi = ratio * lo + (1 - ratio) * min(sample), ratio * hi + (1 - ratio) * max(sample)
    observer = MovingAverage(ratio=ratio)
    observer.observe(np.array(samples, np.float32))
    assert (observer.bounds().lo, observer.bounds().hi) == (np.float32(lo), np.float32(hi))


def test_moving_average_skips_a_sample_without_numbers() -> None:
    observer = MovingAverage()
    observer.observe(np.array([[1, 2], [np.nan, np.nan], [3, 5]], np.float32))
    assert observer.bounds().hi == np.float32(0.9 * 2 + 0.1 * 5)
    assert observer.nan == 2


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 2.0])
def test_moving_average_ratio(ratio: float) -> None:
    with pytest.raises(RecipeError, match=r"ratio must be at least 0 and below 1"):
        make_observer("moving_average", None, {"ratio": ratio})


def test_moving_averages_of_different_ratio_do_not_merge() -> None:
    with pytest.raises(ValueError, match=r"ratio 0\.8 into one of 0\.9"):
        MovingAverage().merge(MovingAverage(ratio=0.8))
