"""Errors summed feed by feed equal those of all the data at once, computed the plain way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbonnx.metrics import OutputErrors, sqnr_db


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 7), st.floats(1e-3, 10))
def test_sums_over_feeds_are_those_of_the_whole(seed: int, feeds: int, rows: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    reference = rng.standard_normal((feeds, rows, 5)).astype(np.float32)
    value = reference + noise * rng.standard_normal(reference.shape).astype(np.float32)
    errors = OutputErrors(["y"])
    for ref, val in zip(reference, value, strict=True):
        errors.add([ref], [val])
    (found,) = errors.result()
    ref, diff = reference.astype(np.float64), value.astype(np.float64) - reference
    assert found.mse == pytest.approx((diff**2).mean())
    assert found.max_abs == pytest.approx(np.abs(diff).max())
    assert found.sqnr_db == pytest.approx(10 * math.log10((ref**2).sum() / (diff**2).sum()))
    assert found.agreement == pytest.approx((reference.argmax(-1) == value.argmax(-1)).mean())
    cosine = (ref * value).sum() / np.linalg.norm(ref) / np.linalg.norm(value.astype(np.float64))
    assert found.cosine == pytest.approx(cosine, rel=1e-6)


def test_equal_outputs_have_no_noise() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    errors = OutputErrors(["y"])
    errors.add([x], [x])
    (found,) = errors.result()
    assert (found.mse, found.sqnr_db, found.cosine, found.agreement) == (0.0, math.inf, 1.0, 1.0)
    assert sqnr_db(x, x) == math.inf
    assert sqnr_db(np.zeros(3), np.ones(3)) == -math.inf


def test_values_that_are_not_finite_are_counted_where_float_is() -> None:
    reference = np.array([[1.0, np.inf, 2.0]], np.float32)
    value = np.array([[np.nan, np.inf, 2.0]], np.float32)
    errors = OutputErrors(["y"])
    errors.add([reference], [value])
    (found,) = errors.result()
    assert found.not_finite == 1


def test_a_constant_output_is_seen() -> None:
    errors = OutputErrors(["y"])
    for row in np.eye(3, dtype=np.float32):
        errors.add([row], [np.zeros(3, np.float32)])
    (found,) = errors.result()
    assert found.constant


def test_classes_of_images_lie_on_axis_1() -> None:
    reference = np.zeros((1, 3, 2, 2), np.float32)
    reference[0, 1] = 1
    value = reference.copy()
    value[0, 2, 0, 0] = 5
    errors = OutputErrors(["y"])
    errors.add([reference], [value])
    (found,) = errors.result()
    assert found.agreement == 0.75


def test_outputs_of_another_shape_are_a_mismatch() -> None:
    errors = OutputErrors(["y"])
    errors.add([np.ones((2, 3), np.float32)], [np.ones((2, 4), np.float32)])
    (found,) = errors.result()
    assert found.mismatched == 1
