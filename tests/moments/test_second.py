"""Error, mean error and centring of moments, against rows that are there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.moments import Moments
from sbonnx.spec import Array
from tests.support.linear_ops import layer_of


def moments_of(x: Array, quantized: Array, outputs: int) -> Moments:
    """Of rows (G, n, K); the same object for both is one stream."""
    groups, rows, inputs = x.shape
    layout = layer_of("Conv", {"group": groups}, (groups * outputs, inputs, 1))
    a = quantized.swapaxes(1, 2) @ quantized
    if x is quantized:
        mean = x.mean(axis=1)
        return Moments(layout, rows, a, a, a, mean, mean)
    b, c = x.swapaxes(1, 2) @ quantized, x.swapaxes(1, 2) @ x
    return Moments(layout, rows, a, b, c, x.mean(axis=1), quantized.mean(axis=1))


@settings(max_examples=100, deadline=None)
@given(st.tuples(*[st.integers(1, 4)] * 4), st.booleans(), st.integers(0, 2**16))
def test_against_rows(sizes: tuple[int, int, int, int], two: bool, seed: int) -> None:
    """Squared error, mean error, and the squared error that is left when a bias takes up the mean."""
    groups, rows, inputs, outputs = sizes
    random = np.random.default_rng(seed)
    x = random.normal(1.0, 1.0, (groups, rows, inputs))
    quantized = x + random.normal(0.5, 0.3, x.shape) if two else x
    weight, other = random.normal(size=(2, groups, outputs, inputs))
    found = moments_of(x, quantized, outputs)
    assert found.is_one_stream is not two
    gap = x @ weight.swapaxes(1, 2) - quantized @ other.swapaxes(1, 2)
    np.testing.assert_allclose(found.error(weight, other), (gap**2).mean(axis=1), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.means.mean_error(weight, other), gap.mean(axis=1), rtol=1e-9, atol=1e-9)
    centred = found.centred()
    assert centred.is_one_stream is not two
    np.testing.assert_allclose(centred.error(weight, other), gap.var(axis=1), rtol=1e-9, atol=1e-9)
    assert not centred.means.mean_error(weight, other).any()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_the_error_of_the_inputs(share: float) -> None:
    random = np.random.default_rng(0)
    x = random.normal(1.0, 1.0, (2, 30, 4))
    quantized = x + random.normal(0.5, 0.3, x.shape)
    found = moments_of(x, quantized, 3).towards(share)
    expected = moments_of(quantized + share * (x - quantized), quantized, 3)
    for name in ("a", "b", "c", "mean", "mean_quantized"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9)


def test_an_error_of_nothing_is_never_negative() -> None:
    """Cancellation would leave -1e-15 and worse."""
    x = np.random.default_rng(0).normal(size=(1, 50, 6))
    weight = np.random.default_rng(1).normal(size=(1, 4, 6)) * 1e4
    error = moments_of(x, x.copy(), 4).error(weight, weight)
    assert (error >= 0).all()
    assert error.max() == pytest.approx(0.0, abs=1e-4)
