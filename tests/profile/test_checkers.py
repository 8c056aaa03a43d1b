"""The measures against numpy and scipy-free formulas of their own, in one piece and in many."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbonnx.errors import RecipeError
from sbonnx.metrics import sqnr_db
from sbonnx.profiling import MEASURES, make_measure
from sbonnx.profiling.checkers import kind_of
from sbonnx.spec import Array

RNG = np.random.default_rng(0)
REF = RNG.standard_normal((6, 5)).astype(np.float32)
VALUE = (REF + 0.1 * RNG.standard_normal(REF.shape)).astype(np.float32)


def softmax(x: Array) -> Array:
    """Row by row, float64."""
    e = np.exp(x.astype(np.float64))
    return np.asarray(e / e.sum(1, keepdims=True))


WIDE, OTHER = REF.astype(np.float64), VALUE.astype(np.float64)
EXPECTED = {
    "mse": float(((WIDE - OTHER) ** 2).mean()),
    "sqnr": sqnr_db(REF, VALUE),
    "cosine": float(WIDE.ravel() @ OTHER.ravel() / np.linalg.norm(WIDE) / np.linalg.norm(OTHER)),
    "max": float(np.abs(WIDE - OTHER).max()),
    "kl": float((softmax(REF) * np.log(softmax(REF) / softmax(VALUE))).sum(1).mean()),
}


@pytest.mark.parametrize("name", MEASURES)
def test_the_formula(name: str) -> None:
    measure = make_measure(name)
    measure.add(VALUE, REF)
    assert measure.result() == pytest.approx(EXPECTED[name], rel=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MEASURES)
@given(cuts=st.lists(st.integers(1, 5), max_size=3, unique=True))
def test_how_the_feeds_are_cut_does_not_matter(name: str, cuts: list[int]) -> None:
    measure = make_measure(name)
    for value, ref in zip(np.split(VALUE, sorted(cuts)), np.split(REF, sorted(cuts)), strict=True):
        measure.add(value, ref)
    assert measure.result() == pytest.approx(EXPECTED[name], rel=1e-9)


@pytest.mark.parametrize("name", MEASURES)
def test_nothing_lost_is_a_loss_of_nothing(name: str) -> None:
    """And a larger error is a larger loss, whichever way the measure runs."""
    found = []
    for amount in (0.0, 0.1, 0.5):
        measure = make_measure(name)
        measure.add(REF + amount * (VALUE - REF), REF)
        found.append(kind_of(name).loss(measure.result()))
    assert found[0] == pytest.approx(0.0, abs=1e-12)
    assert found[0] < found[1] < found[2]
    assert kind_of(name).higher_is_better == (EXPECTED[name] > 0.9)


@pytest.mark.parametrize("name", MEASURES)
def test_nothing_seen_is_no_number(name: str) -> None:
    assert math.isnan(make_measure(name).result())


@pytest.mark.parametrize("name", MEASURES)
def test_scalars_and_images(name: str) -> None:
    """Classes of an image lie on axis 1; a scalar is one class."""
    image = make_measure(name)
    image.add(VALUE.reshape(6, 5, 1, 1), REF.reshape(6, 5, 1, 1))
    assert image.result() == pytest.approx(EXPECTED[name], rel=1e-9)
    scalar = make_measure(name)
    scalar.add(np.float32(1.5) * np.ones((), np.float32), np.ones((), np.float32))
    assert math.isfinite(scalar.result())


@pytest.mark.parametrize("name", MEASURES)
def test_not_a_number_is_not_hidden(name: str) -> None:
    measure = make_measure(name)
    measure.add(np.array([np.nan, 1.0]), np.array([0.0, 1.0]))
    measure.add(np.array([2.0]), np.array([0.0]))
    assert not math.isfinite(kind_of(name).loss(measure.result()))


@pytest.mark.parametrize("name", MEASURES)
def test_infinite_values_of_both_are_no_error(name: str) -> None:
    measure = make_measure(name)
    masked = np.array([1.0, 2.0, -np.inf])
    measure.add(masked, masked)
    assert kind_of(name).loss(measure.result()) == pytest.approx(0.0, abs=1e-12)


def test_a_function_is_averaged_over_feeds() -> None:
    measure = make_measure(lambda value, ref: float(value.sum() - ref.sum()))
    measure.add(np.array([3.0]), np.array([1.0]))
    measure.add(np.array([1.0, 1.0]), np.array([1.0, 1.0]))
    assert measure.result() == 1.0


def test_an_unknown_name() -> None:
    with pytest.raises(RecipeError, match="there is no measure 'psnr': there are mse, sqnr, cosine, max, kl"):
        make_measure("psnr")
