"""Errors summed feed by feed equal those of all the data at once, computed the plain way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbonnx.metrics import OutputDifferences, sqnr_db


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 7), st.floats(1e-3, 10))
def test_sums_over_feeds_are_those_of_the_whole(seed: int, feeds: int, rows: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    reference = rng.standard_normal((feeds, rows, 5)).astype(np.float32)
    value = reference + noise * rng.standard_normal(reference.shape).astype(np.float32)
    errors = OutputDifferences(["y"])
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
    errors = OutputDifferences(["y"])
    errors.add([x], [x])
    (found,) = errors.result()
    assert (found.mse, found.sqnr_db, found.cosine, found.agreement) == (0.0, math.inf, 1.0, 1.0)
    assert sqnr_db(x, x) == math.inf
    assert sqnr_db(np.zeros(3), np.ones(3)) == -math.inf


def test_values_that_are_not_finite_are_counted_where_float_is() -> None:
    reference = np.array([[1.0, np.inf, 2.0]], np.float32)
    value = np.array([[np.nan, np.inf, 2.0]], np.float32)
    errors = OutputDifferences(["y"])
    errors.add([reference], [value])
    (found,) = errors.result()
    assert found.not_finite == 1


def test_a_constant_output_is_seen() -> None:
    errors = OutputDifferences(["y"])
    for row in np.eye(3, dtype=np.float32):
        errors.add([row], [np.zeros(3, np.float32)])
    (found,) = errors.result()
    assert found.constant


@pytest.mark.parametrize("batch", [1, 4])
def test_an_output_that_no_longer_depends_on_the_sample_is_seen(batch: int) -> None:
    """A network at chance level: always the same scores, not far from the mean of the float ones."""
    rng = np.random.default_rng(0)
    reference = (np.linspace(0, 10, 10) + rng.standard_normal((8, 10))).astype(np.float32)
    dead, alive, still = OutputDifferences(["y"]), OutputDifferences(["y"]), OutputDifferences(["y"])
    for start in range(0, 8, batch):
        rows = reference[start : start + batch]
        mean = np.broadcast_to(reference.mean(0), rows.shape)
        dead.add([rows], [mean])
        alive.add([rows], [np.rint(rows)])
        still.add([mean * (1 + 1e-6 * rows)], [mean])
    assert dead.result()[0].frozen
    assert dead.result()[0].sqnr_db > 10, "the ratio alone does not tell"
    assert not alive.result()[0].frozen
    assert not still.result()[0].frozen, "nor does the float one"


def test_classes_of_images_lie_on_axis_1() -> None:
    reference = np.zeros((1, 3, 2, 2), np.float32)
    reference[0, 1] = 1
    value = reference.copy()
    value[0, 2, 0, 0] = 5
    errors = OutputDifferences(["y"])
    errors.add([reference], [value])
    (found,) = errors.result()
    assert found.agreement == 0.75


def test_outputs_of_another_shape_are_a_mismatch() -> None:
    errors = OutputDifferences(["y"])
    errors.add([np.ones((2, 3), np.float32)], [np.ones((2, 4), np.float32)])
    (found,) = errors.result()
    assert (found.mismatched, found.compared) == (1, 0)
