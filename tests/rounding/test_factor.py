"""Factors of second moments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.errors import NumericError
from sbonnx.rounding.search.factor import Order, back_substitute, damped, ordered_factor, pivoted_cholesky, upper_factor
from sbonnx.spec import Array
from tests.rounding.layers import rows


def moments(seed: int, groups: int, inputs: int) -> Array:
    """Second moments (G, K, K) of random rows."""
    x = rows(np.random.default_rng(seed), groups, inputs, 2 * inputs + 5).astype(np.float64)
    return np.asarray(x.transpose(0, 2, 1) @ x)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    groups=st.integers(1, 4),
    inputs=st.integers(1, 150),
    order=st.sampled_from(["pivot", "activation", "none"]),
)
def test_the_factor_is_one(seed: int, groups: int, inputs: int, order: Order) -> None:
    a = moments(seed, groups, inputs)
    columns, factor = ordered_factor(a, 0.01, order)
    assert (np.sort(columns, axis=1) == np.arange(inputs)).all()
    assert (np.triu(factor) == factor).all()
    wanted = np.stack([each[order][:, order] for each, order in zip(damped(a, 0.01), columns, strict=True)])
    np.testing.assert_allclose(factor @ factor.transpose(0, 2, 1), wanted, rtol=1e-8, atol=1e-8 * np.abs(a).max())


def test_the_least_pivot_comes_next() -> None:
    """Against the definition: the column of least moment given those chosen, each found anew."""
    a = damped(moments(3, 2, 80), 0.01)
    chosen, lower = pivoted_cholesky(a.copy())
    for group in range(2):
        for count in range(80):
            done, left = chosen[group, :count], np.setdiff1d(np.arange(80), chosen[group, :count])
            solved = np.linalg.solve(a[group][np.ix_(done, done)], a[group][np.ix_(done, left)])
            given_those = np.diagonal(a[group])[left] - np.einsum("cl,cl->l", a[group][np.ix_(done, left)], solved)
            assert left[given_those.argmin()] == chosen[group, count]
            assert lower[group, count, count] ** 2 == pytest.approx(given_those.min(), rel=1e-6)


def test_large_matrices_have_the_same_order() -> None:
    """Three panels without swaps, against the algorithm with swaps in float64."""
    a = damped(moments(2, 1, 300), 0.01)
    short = a[0].astype(np.float32)
    order = upper_factor(short)
    chosen, lower = pivoted_cholesky(a)
    np.testing.assert_array_equal(order, chosen[0, ::-1])
    np.testing.assert_allclose(short.T, lower[0, ::-1, ::-1], rtol=1e-4, atol=1e-5 * np.abs(lower).max())


def test_pivots_are_more_even() -> None:
    """The product of the pivots is the determinant in any order; their sum, that errors follow, is less."""
    a = moments(0, 1, 100)
    totals = {}
    for order in ("none", "activation", "pivot"):
        squares = np.square(np.diagonal(ordered_factor(a, 0.01, order)[1][0]))
        assert np.log(squares).sum() == pytest.approx(np.linalg.slogdet(damped(a, 0.01)[0])[1])
        totals[order] = squares.sum()
    assert totals["pivot"] < totals["activation"] < totals["none"]


def test_large_matrices_are_factored_in_float32() -> None:
    """Within what the damping covers."""
    a = moments(1, 1, 1100)
    columns, factor = ordered_factor(a, 0.01, "pivot")
    assert factor.dtype == np.float32
    wanted = damped(a, 0.0)[0][columns[0]][:, columns[0]]
    wanted[np.diag_indices(1100)] += 0.01 * np.diagonal(a[0]).mean()
    error = np.abs(factor[0].astype(np.float64) @ factor[0].T.astype(np.float64) - wanted).max()
    assert error < 1e-3 * 0.01 * np.diagonal(a[0]).mean()
    assert ordered_factor(a, 1e-4, "none")[1].dtype == np.float64


@pytest.mark.parametrize("inputs", [1, 63, 64, 65, 130])
def test_back_substitution(inputs: int) -> None:
    generator = np.random.default_rng(0)
    factor = np.linalg.cholesky(moments(0, 2, inputs))[:, ::-1, ::-1]
    wanted = generator.normal(size=(2, 3, inputs))
    right = wanted @ factor.transpose(0, 2, 1)
    np.testing.assert_allclose(back_substitute(right, factor), wanted, rtol=1e-6, atol=1e-8)


def test_dead_inputs_stand_apart() -> None:
    """Their columns of the factor hold nothing but their own pivot."""
    a = moments(0, 1, 20)
    a[:, 3], a[:, :, 3] = 0.0, 0.0
    for order in ("pivot", "activation", "none"):
        columns, factor = ordered_factor(a, 0.01, order)
        at = int(np.nonzero(columns[0] == 3)[0][0])
        assert np.count_nonzero(factor[0, at]) == np.count_nonzero(factor[0, :, at]) == 1


def test_no_factor() -> None:
    """Moments that no rows have."""
    a = np.array([[[1.0, 1e6], [1e6, 1.0]]])
    for order in ("pivot", "activation"):
        with pytest.raises(NumericError, match="positive definite"):
            ordered_factor(a, 0.01, order)
