"""Error, mean error and centring of moments, against rows that are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.moments import Moments
from sbonnx.spec import Array
from tests.support.linear_ops import layer_of


def moments_of(x: Array, quantized: Array, outputs: int, *, of_errors: bool = False) -> Moments:
    """Of rows (G, n, K); the same object for both is one stream."""
    groups, _, inputs = x.shape
    layout = layer_of("Conv", {"group": groups}, (groups * outputs, inputs, 1))
    return Moments.of_rows(layout, x, quantized, of_errors=of_errors)


@settings(max_examples=100, deadline=None)
@given(st.tuples(*[st.integers(1, 4)] * 4), st.booleans(), st.booleans(), st.integers(0, 2**16))
def test_against_rows(sizes: tuple[int, int, int, int], two: bool, of_errors: bool, seed: int) -> None:
    """Squared error, mean error, and the squared error that is left when a bias takes up the mean."""
    groups, rows, inputs, outputs = sizes
    random = np.random.default_rng(seed)
    x = random.normal(1.0, 1.0, (groups, rows, inputs))
    quantized = x + random.normal(0.5, 0.3, x.shape) if two else x
    weight, other = random.normal(size=(2, groups, outputs, inputs))
    found = moments_of(x, quantized, outputs, of_errors=of_errors)
    assert found.is_one_stream is not two
    gap = x @ weight.swapaxes(1, 2) - quantized @ other.swapaxes(1, 2)
    np.testing.assert_allclose(found.error(weight, other), (gap**2).mean(axis=1), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.means.mean_error(weight, other), gap.mean(axis=1), rtol=1e-9, atol=1e-9)
    centred = found.centred()
    assert centred.is_one_stream is not two
    np.testing.assert_allclose(centred.error(weight, other), gap.var(axis=1), rtol=1e-9, atol=1e-9)
    assert not centred.means.mean_error(weight, other).any()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("of_errors", [False, True])
def test_a_share_of_the_error_of_the_inputs(share: float, of_errors: bool) -> None:
    random = np.random.default_rng(0)
    x = random.normal(1.0, 1.0, (2, 30, 4))
    quantized = x + random.normal(0.5, 0.3, x.shape)
    found = moments_of(x, quantized, 3, of_errors=of_errors).towards(share)
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


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_moments_of_errors_are_the_same_moments(share: float) -> None:
    """Centred, a share, shrunk, and over two sets of samples; in place it is the same and no matrix is copied."""
    random = np.random.default_rng(3)
    weight, other = random.normal(size=(2, 2, 3, 5))
    forms = []
    for of_errors in (False, True):
        one, more = (
            moments_of(x, x + np.random.default_rng(1).normal(0.2, 0.3, x.shape), 3, of_errors=of_errors)
            for x in (np.random.default_rng(seed).normal(1, 1, (2, 40, 5)) for seed in (4, 5))
        )
        first = one.merged(more).centred().towards(share).shrunk(0.3)
        joined = one.merged(more, in_place=True)
        second = joined.centred(in_place=True).shrunk(0.3, in_place=True).towards(share)
        assert second.a is one.a
        assert not of_errors or second.cross is one.cross
        forms += [first, second]
    for form in forms:
        for name in ("a", "b", "c", "rows"):
            np.testing.assert_allclose(getattr(form, name), getattr(forms[0], name), rtol=1e-9, atol=1e-9, err_msg=name)
        for name in ("error", "gradient"):
            found, wanted = (getattr(each, name)(weight, other) for each in (form, forms[0]))
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
        pulls = [each.pull(weight) for each in (form, forms[0])]
        assert form is forms[0] or not form.of_errors or (pulls[0] is None) == (share == 0.0)
        own, first_pull = (np.zeros_like(weight) if pull is None else pull for pull in pulls)
        np.testing.assert_allclose(own, first_pull, rtol=1e-9, atol=1e-9)


def test_products_of_a_weight_are_those_of_this_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stored for the last weight and matrices, and shared with views and other shares of the errors."""
    random = np.random.default_rng(0)
    x = random.normal(size=(1, 30, 6)).astype(np.float32)
    quantized = x + random.normal(0.5, 0.3, x.shape).astype(np.float32)
    weights = random.normal(size=(3, 1, 4, 6)).astype(np.float32)
    other = np.rint(weights[0])
    found = moments_of(x, quantized, 4, of_errors=True)
    forms = [found, found.towards(0.5), found.centred(), found.shrunk(0.2), found.part(slice(None))]
    for weight in (*weights, weights[0], weights[0][:, :2], weights[0].copy()):
        for number, form in enumerate(forms):
            fresh = moments_of(x, quantized, 4, of_errors=True)
            fresh = [fresh, fresh.towards(0.5), fresh.centred(), fresh.shrunk(0.2), fresh][number]
            rows = other[:, : weight.shape[1]]
            np.testing.assert_array_equal(form.error(weight, rows), fresh.error(weight, rows))
            np.testing.assert_array_equal(form.gradient(weight, rows), fresh.gradient(weight, rows))
    products: list[str] = []
    once = Moments._once

    def counted(self: Moments, name: str, weight: Array, total: Array | None, run: Any) -> Array:
        def counting(w: Array, matrix: Array) -> Array:
            products.append(name)
            return np.asarray(run(w, matrix))

        return once(self, name, weight, total, counting)

    monkeypatch.setattr(Moments, "_once", counted)
    found = moments_of(x, quantized, 4, of_errors=True)
    for values in (other, other + 1):
        found.gradient(weights[0], values)
        found.error(weights[0][:], values)
    assert sorted(products) == ["error of inputs", "pulled"]
