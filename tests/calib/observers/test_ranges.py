"""Min-max and the moving average, which rest on extremes alone, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sbonnx.calib.observers import MinMax, MovingAverage, make_observer
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import RecipeError
from sbonnx.spec import Array, QuantSpec
from tests.calib.observers.reference import sketch_of

FLOATS = st.floats(-1e6, 1e6, width=32)
SPEC = QuantSpec()


@given(x=arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=4, max_side=5), elements=FLOATS))
def test_minmax_is_min_and_max(x: Array) -> None:
    bounds = MinMax().bounds(sketch_of(*x, name="minmax"), SPEC)
    assert (bounds.lo, bounds.hi) == (x.min(), x.max())
    channels = MinMax().bounds(sketch_of(*x[:, None], axis=1, name="minmax"), SPEC)
    over = tuple(i for i in range(x.ndim) if i != 1)
    np.testing.assert_array_equal(channels.lo, x.min(axis=over))
    np.testing.assert_array_equal(channels.hi, x.max(axis=over))


def test_minus_zero_does_not_depend_on_the_order() -> None:
    signs = [np.array([value], np.float32) for value in (0.0, -0.0)]
    one, other = (MinMax().bounds(sketch_of(*order, name="minmax"), SPEC) for order in (signs, signs[::-1]))
    assert np.signbit(one.lo) == np.signbit(other.lo)


@given(samples=st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=8), ratio=st.floats(0, 0.99))
def test_moving_average_by_its_definition(samples: list[tuple[float, float]], ratio: float) -> None:
    lo, hi = min(samples[0]), max(samples[0])
    for sample in samples[1:]:
        lo, hi = ratio * lo + (1 - ratio) * min(sample), ratio * hi + (1 - ratio) * max(sample)
    sketch = sketch_of(np.array(samples, np.float32), name="moving_average")
    bounds = MovingAverage(ema_ratio=ratio).bounds(sketch, SPEC)
    assert (bounds.lo, bounds.hi) == (np.float32(lo), np.float32(hi))


def test_moving_average_takes_samples_in_the_order_of_the_data() -> None:
    """Not in that of their arrival."""
    x = np.arange(12, dtype=np.float32).reshape(4, 3) ** 2
    straight = sketch_of(*x[:, None], name="moving_average")
    mixed = Sketch(detail="range", track=True)
    for index in (2, 0, 3, 1):
        mixed.observe(x[index : index + 1], index)
    observer = MovingAverage()
    assert observer.bounds(straight, SPEC).hi == observer.bounds(mixed, SPEC).hi
    backwards = sketch_of(*x[::-1, None], name="moving_average")
    assert observer.bounds(straight, SPEC).hi != observer.bounds(backwards, SPEC).hi


def test_moving_average_skips_a_sample_without_numbers() -> None:
    sketch = sketch_of(np.array([[1, 2], [np.nan, np.nan], [3, 5]], np.float32), name="moving_average")
    assert MovingAverage().bounds(sketch, SPEC).hi == np.float32(0.9 * 2 + 0.1 * 5)
    assert sketch.nan == 2


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 2.0])
def test_moving_average_ratio(ratio: float) -> None:
    with pytest.raises(RecipeError, match=r"ratio must be at least 0 and below 1"):
        make_observer("moving_average", {"ema_ratio": ratio})


def test_moving_average_is_for_activations() -> None:
    assert not MovingAverage.for_weights
    assert MovingAverage.for_activations
