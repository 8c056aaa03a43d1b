"""What every observer keeps to. A row in `OBSERVERS` is tested here without another line."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.observers import OBSERVERS, Observer, make_observer
from sbonnx.errors import NumericError, RecipeError
from sbonnx.spec import Array, Bounds

X = np.random.default_rng(0).standard_normal((12, 3, 5)).astype(np.float32) * np.arange(1, 13)[:, None, None]
X = X.astype(np.float32)

ORDER_MATTERS = {"moving_average": "by definition: it weighs samples by age"}


def watch(name: str, *arrays: Array, axis: int | None = None) -> Observer:
    """The observer called `name` after it saw `arrays`."""
    observer = make_observer(name, axis)
    for array in arrays:
        observer.observe(array)
    return observer


def assert_same(one: Bounds, other: Bounds, ulps: int = 0) -> None:
    """Bit for bit, or within so many units in the last place."""
    for a, b in ((one.lo, other.lo), (one.hi, other.hi)):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_array_max_ulp(a, b, ulps) if ulps else np.testing.assert_array_equal(a, b)


by_name = pytest.mark.parametrize("name", OBSERVERS)


def by_name_unless(exceptions: dict[str, str]) -> pytest.MarkDecorator:
    """Every observer, those in `exceptions` expected to fail."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=pytest.mark.xfail(reason=exceptions[name], strict=True))
            if name in exceptions
            else name
            for name in OBSERVERS
        ],
    )


@by_name
@pytest.mark.parametrize("axis", [None, 1, 2])
def test_one_stream_or_batches(name: str, axis: int | None) -> None:
    """Where the data is cut into batches does not change the answer."""
    whole = watch(name, X, axis=axis)
    for cuts in ([3, 6, 9], [1, 2], [11]):
        assert_same(whole.bounds(), watch(name, *np.split(X, cuts), axis=axis).bounds())


@settings(max_examples=30, deadline=None)
@given(cuts=st.sets(st.integers(1, 11)), tree=st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", OBSERVERS)
def test_merged_pieces_in_order(name: str, cuts: set[int], tree: Any) -> None:
    """Pieces observed apart, neighbours merged in any grouping: the bounds of the whole stream.

    An order-free observer gives them bit for bit; others in exact arithmetic, so to the last place of float32.
    """
    pieces = [watch(name, piece) for piece in np.split(X, sorted(cuts))]
    while len(pieces) > 1:
        at = tree.randrange(len(pieces) - 1)
        right = pieces.pop(at + 1)
        pieces[at].merge(right)
    assert_same(watch(name, X).bounds(), pieces[0].bounds(), ulps=0 if OBSERVERS[name].order_free else 1)
    assert pieces[0].elements == X.size


@by_name_unless(ORDER_MATTERS)
def test_any_order(name: str) -> None:
    """The order of samples, and of merges, does not change the answer."""
    order = np.random.default_rng(1).permutation(len(X))
    assert_same(watch(name, X).bounds(), watch(name, X[order]).bounds())


@by_name
def test_order_free_is_said_truly(name: str) -> None:
    assert OBSERVERS[name].order_free == (name not in ORDER_MATTERS)


@by_name
def test_single_samples_merge_bit_for_bit(name: str) -> None:
    """What the walk does for observers that depend on the order: one fresh observer a sample."""
    merged = make_observer(name, None)
    for row in range(len(X)):
        merged.merge(watch(name, X[row : row + 1]))
    assert_same(watch(name, X).bounds(), merged.bounds())


@by_name
def test_merging_leaves_the_other_alone(name: str) -> None:
    other = watch(name, X[:3])
    before = other.bounds()
    one = watch(name, X[3:])
    one.merge(other)
    one.observe(X * 100)
    assert_same(before, other.bounds())
    fresh = make_observer(name, None)
    fresh.merge(other)
    fresh.observe(X * 100)
    assert_same(before, other.bounds())


@by_name
@pytest.mark.parametrize("axis", [1, 2])
def test_per_channel_is_each_channel_alone(name: str, axis: int) -> None:
    bounds = watch(name, X, axis=axis).bounds()
    assert bounds.lo.shape == bounds.hi.shape == (X.shape[axis],)
    for channel in range(X.shape[axis]):
        alone = watch(name, np.take(X, [channel], axis)).bounds()
        np.testing.assert_array_equal(bounds.lo[channel], alone.lo)
        np.testing.assert_array_equal(bounds.hi[channel], alone.hi)


@by_name
def test_bounds_lie_within_the_data(name: str) -> None:
    bounds = watch(name, X).bounds()
    assert bounds.lo.shape == ()
    assert X.min() <= bounds.lo <= bounds.hi <= X.max()


@by_name
@pytest.mark.parametrize("value", [0.0, -2.5, 1e-42, 3e38])
def test_constant_data(name: str, value: float) -> None:
    data = np.full((4, 3), value, np.float32)
    bounds = watch(name, data).bounds()
    np.testing.assert_array_equal([bounds.lo, bounds.hi], [data[0, 0]] * 2)


@by_name
def test_nothing_seen_is_zero(name: str) -> None:
    for observer in (make_observer(name, None), watch(name, np.zeros((2, 0, 3), np.float32))):
        bounds = observer.bounds()
        assert [float(bounds.lo), float(bounds.hi), observer.finite] == [0, 0, 0]


@by_name
@pytest.mark.parametrize("axis", [None, 1])
def test_nan_and_inf_are_counted_and_left_out(name: str, axis: int | None) -> None:
    dirty = X.copy()
    dirty[2, 1, 0] = np.nan
    dirty[5, 0, 1:3] = np.inf
    dirty[7, 2, 4] = -np.inf
    observer = watch(name, dirty, axis=axis)
    assert (observer.nan, observer.inf, observer.elements) == (1, 3, X.size)
    assert observer.finite == X.size - 4
    bounds = observer.bounds()
    assert np.isfinite(bounds.lo).all() and np.isfinite(bounds.hi).all()
    merged = watch(name, dirty[:6], axis=axis)
    merged.merge(watch(name, dirty[6:], axis=axis))
    assert (merged.nan, merged.inf) == (1, 3)


@by_name
def test_only_nan(name: str) -> None:
    observer = watch(name, np.full((2, 3), np.nan, np.float32))
    bounds = observer.bounds()
    assert [float(bounds.lo), float(bounds.hi), observer.finite] == [0, 0, 0]


@by_name
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types(name: str, dtype: Any) -> None:
    data = X.astype(np.float16)
    assert_same(watch(name, data.astype(np.float32)).bounds(), watch(name, data.astype(dtype)).bounds())


@by_name
def test_any_shape(name: str) -> None:
    bounds = watch(name, np.float32(3), np.ones(4, np.float32), np.ones((2, 3, 4, 5, 6), np.float32)).bounds()
    assert bounds.hi >= 1
    varied = watch(name, X[:, :, :2], X[:, :, :4], X[:1], axis=1)
    assert varied.bounds().lo.shape == (3,)


@by_name
def test_state_does_not_grow(name: str) -> None:
    def size(observer: Observer) -> int:
        return sum(getattr(value, "nbytes", sys.getsizeof(value)) for value in vars(observer).values())

    observer = watch(name, X)
    before = size(observer)
    for _ in range(50):
        observer.observe(X)
    assert size(observer) <= before + 8  # a larger count may take a digit more


@by_name
def test_channels_must_stay(name: str) -> None:
    observer = watch(name, X, axis=1)
    with pytest.raises(NumericError, match="axis 1 had 3 channels and now has 2"):
        observer.observe(X[:, :2])
    with pytest.raises(NumericError, match="needs that axis"):
        watch(name, np.ones(3, np.float32), axis=1)


@by_name
def test_unlike_observers_do_not_merge(name: str) -> None:
    with pytest.raises(ValueError, match="cannot merge"):
        watch(name, X, axis=1).merge(watch(name, X, axis=2))


@by_name
def test_unknown_arguments_are_named(name: str) -> None:
    with pytest.raises(RecipeError, match=f"observer '{name}'.*no_such"):
        make_observer(name, None, {"no_such": 1})


def test_unknown_observer() -> None:
    with pytest.raises(RecipeError, match=r"there is no observer 'min_max'; there are minmax, moving_average"):
        make_observer("min_max", None)
