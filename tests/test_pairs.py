"""Limits of codes by pairs of neighbours, against loops and exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sbonnx.spec import (
    PAIR_LIMIT,
    PAIR_SUM,
    SAFE_CODE,
    Array,
    Bounds,
    QParams,
    QuantSpec,
    bounds_of,
    pair_bounds,
    pair_limits,
    pair_scale,
    pair_sums,
    params_from_bounds,
)

RATIOS = st.integers(-2400, 2400).map(lambda eighths: eighths / 8)  # sums are exact


def pairs_of(count: int, channels: int) -> list[tuple[int, int]]:
    """Neighbours in the whole row, and in each tap, whose channels may be padded to an even number."""
    whole = [(at, at + 1) for at in range(0, count - 1, 2)]
    taps = [(tap + at, tap + at + 1) for tap in range(0, count, channels) for at in range(0, channels - 1, 2)]
    return sorted({*whole, *taps})


@st.composite
def rows(draw: st.DrawFn) -> tuple[Array, int]:
    channels, taps = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return draw(hnp.arrays(np.float32, (2, channels * taps), elements=RATIOS)), channels


def test_the_limit_is_that_of_16_bits() -> None:
    """By all bytes: two products of the largest input fit as long as the codes sum to 128, and not at 129."""
    codes = np.arange(-128, 128)
    worst = 255 * (codes[:, None] + codes)
    fits = (worst >= -PAIR_LIMIT - 1) & (worst <= PAIR_LIMIT)
    np.testing.assert_array_equal(fits, np.abs(codes[:, None] + codes) <= PAIR_SUM)
    assert 2 * SAFE_CODE == PAIR_SUM


@settings(deadline=None)
@given(case=rows())
def test_limits(case: tuple[Array, int]) -> None:
    """Codes at the limits fit, whatever the neighbour does; the nearest codes are within them where they fit."""
    ratio, channels = case
    low, high = pair_limits(ratio, channels)
    assert (low >= -127).all() and (high <= 127).all() and (low <= -1).all() and (high >= 1).all()
    pairs, near = pairs_of(ratio.shape[1], channels), np.clip(np.rint(ratio), -127, 127)
    fits = np.ones(ratio.shape, bool)
    for one, other in pairs:
        assert (high[:, one] + high[:, other] <= PAIR_SUM).all() and (low[:, one] + low[:, other] >= -PAIR_SUM).all()
        same = near[:, one] * near[:, other] > 0
        over = same & (np.abs(near[:, one] + near[:, other]) > PAIR_SUM)
        fits[:, one] &= ~over
        fits[:, other] &= ~over
    assert ((low <= near) & (near <= high))[fits].all()


@settings(deadline=None)
@given(case=rows())
def test_sums(case: tuple[Array, int]) -> None:
    ratio, channels = case
    taken = [[(abs(a[i] + a[j])) for i, j in pairs_of(len(a), channels) if a[i] * a[j] >= 0] for a in ratio]
    most, alone = np.array([max(each, default=0.0) for each in taken]), np.abs(ratio).max(axis=1)
    found = pair_sums(ratio, channels)  # neighbours of different signs count one by one
    assert ((found == most) | ((found >= most) & (found <= alone))).all()


def test_the_nearest_codes_of_a_pair_are_the_best_that_fit() -> None:
    """By all pairs of codes: at most a step of 1 from the optimum in each, where rounding alone would not fit."""
    rng = np.random.default_rng(0)
    codes = np.array(list(itertools.product(range(-127, 128), repeat=2)))
    codes = codes[(np.abs(codes.sum(axis=1)) <= PAIR_SUM)]
    spec = QuantSpec(pairs=(0,))
    for _ in range(50):
        weight = rng.laplace(size=2).astype(np.float32) * 60
        qparams = QParams(np.float32(1), np.int8(0), spec)
        best = ((codes - weight) ** 2).sum(axis=1).min()
        found = ((qparams.quantize(weight).astype(int) - weight) ** 2).sum()
        assert found <= best + 1.0


@pytest.mark.parametrize(
    ("shape", "spec", "columns"),
    [
        ((5, 3, 3, 3), QuantSpec(axis=0, pairs=(2, 3, 1)), (0, 2, 3, 1)),
        ((5, 4, 7), QuantSpec(axis=0, pairs=(2, 1)), (0, 2, 1)),
        ((9, 5), QuantSpec(axis=1, pairs=(0,)), (1, 0)),
        ((2, 9, 5), QuantSpec(axis=2, pairs=(1,)), (2, 0, 1)),
        ((5, 9), QuantSpec(pairs=(1,)), (0, 1)),
    ],
)
@pytest.mark.parametrize("times", [1.0, 0.3])
def test_quantized_weights_fit(shape: tuple[int, ...], spec: QuantSpec, columns: tuple[int, ...], times: float) -> None:
    """At their own scale nothing is clipped by more than rounding; at smaller ones all pairs fit."""
    weight = np.random.default_rng(0).laplace(size=shape).astype(np.float32)
    bounds = pair_bounds(weight, spec, bounds_of(weight, spec.axis))
    qparams = params_from_bounds(Bounds(bounds.lo * np.float32(times), bounds.hi * np.float32(times)), spec)
    codes = qparams.quantize(weight)
    channels = shape[spec.pairs[-1]]
    kernel = codes.transpose(columns).reshape(-1, int(np.prod([shape[at] for at in spec.pairs]))).astype(int)
    for one, other in pairs_of(kernel.shape[1], channels):
        same = kernel[:, one] * kernel[:, other] >= 0
        assert (np.abs(kernel[:, one] + kernel[:, other])[same] <= PAIR_SUM).all()
    if times == 1.0:
        off = np.abs(qparams.dequantize(codes) - weight) / qparams.along(qparams.scale, shape)
        assert off.max() <= 1.0 + 1e-3
        most = np.abs(codes.astype(int)).max(axis=None if spec.axis is None else tuple(
            at for at in range(len(shape)) if at != spec.axis
        ))  # fmt: skip
        assert (most > SAFE_CODE).any()
        assert (pair_scale(weight, spec) <= qparams.scale * (1 + 1e-5)).all()


def test_slices_of_a_large_weight_are_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of inputs are cut between pairs."""
    weight = np.random.default_rng(0).laplace(size=(23, 6)).astype(np.float32)
    spec = QuantSpec(axis=1, pairs=(0,))
    qparams = params_from_bounds(bounds_of(weight, 1), spec)
    whole = qparams.quantize(weight)
    monkeypatch.setattr("sbonnx.spec.AT_ONCE", 19)
    np.testing.assert_array_equal(qparams.quantize(weight), whole)


def test_only_types_with_a_sign_and_8_bits_have_limits() -> None:
    for other in ({"bits": 7}, {"signed": False}, {"symmetric": False}, {"axis": 0, "block_size": 2}):
        with pytest.raises(ValueError, match="limits of pairs"):
            QuantSpec(**{"pairs": (1,), **other})  # type: ignore[arg-type]
    assert QuantSpec(pairs=(1,)).unpaired() == QuantSpec(bits=7) and QuantSpec().unpaired() == QuantSpec()
