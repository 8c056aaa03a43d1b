"""Mean and variance of channels, however the data are cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.correct.running_variance import RunningVariance


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([(3,), (3, 4), (3, 2, 5)]), st.floats(-1e4, 1e4))
def test_pieces_give_what_the_whole_gives(seed: int, pieces: int, dims: tuple[int, ...], offset: float) -> None:
    """Far from 0 as well, where the difference of two sums of squares would hold nothing."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((7, *dims)) + offset).astype(np.float32)
    whole = RunningVariance.of(x, 1)
    merged = RunningVariance.of(x[:0], 1)
    for piece in np.array_split(x, pieces):
        merged = merged.merge(RunningVariance.of(piece, 1))
    exact = np.moveaxis(x, 1, 0).reshape(3, -1).astype(np.float64)
    for found in (whole, merged):
        assert found.count == exact.shape[1]
        np.testing.assert_allclose(found.mean, exact.mean(axis=1), rtol=1e-12)
        np.testing.assert_allclose(found.variance, exact.var(axis=1), rtol=1e-7, atol=1e-12)


def test_channels_along_any_axis() -> None:
    x = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float16)
    for axis in range(3):
        exact = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1).astype(np.float64)
        np.testing.assert_allclose(RunningVariance.of(x, axis).variance, exact.var(axis=1), rtol=1e-9)


def test_nothing_seen_is_no_variance() -> None:
    assert RunningVariance.of(np.zeros((0, 2), np.float32), 1).variance.tolist() == [0.0, 0.0]
