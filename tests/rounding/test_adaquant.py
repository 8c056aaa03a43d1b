"""AdaQuant by moments: scales at their best, outputs that share them kept together, and what a file can store."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.rounding import Rounded
from sbonnx.rounding.adaquant import FURTHEST, AdaQuant, _Sharing
from sbonnx.rounding.gptq import Gptq
from sbonnx.spec import MIN_SCALE_FP16, Array, QParams, QuantSpec, params_from_bounds
from tests.rounding.layers import CASES, CHANNELS, Case, Layer, layer, scales


def explicit(one: Layer, codes: Array, scale: Array) -> float:
    """The error with other scales."""
    moved = replace(one.qparams, scale=scale.astype(np.float32))
    return float(one.error(Rounded(codes, moved)).sum())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), case=st.sampled_from(sorted(CASES)))
def test_never_worse_than_gptq_within_the_limits(seed: int, case: str) -> None:
    one = layer(CASES[case], seed)
    found = AdaQuant(iterations=60).round(one.weight, one.qparams, one.moments)
    first = Gptq().round(one.weight, one.qparams, one.moments)
    assert one.error(found).sum() <= one.error(first).sum() * (1 + 1e-5) + 1e-9
    factor = found.qparams.scale / one.qparams.scale
    assert factor.min() >= 1 / FURTHEST * (1 - 1e-6) and factor.max() <= FURTHEST * (1 + 1e-6)


@pytest.mark.parametrize("case", ["conv", "conv, two streams", "conv, affine", "conv, one scale", "matmul, blocks"])
def test_scales_are_the_best_of_their_codes(case: str) -> None:
    """No step of a thousandth, up or down, of any scale alone is better."""
    one = layer(CASES[case])
    found = AdaQuant(iterations=60).round(one.weight, one.qparams, one.moments)
    scale = found.qparams.scale
    here = explicit(one, found.codes, scale)
    for index in np.ndindex(scale.shape):
        for factor in (0.999, 1.001):
            other = scale.copy()
            other[index] *= factor
            assert explicit(one, found.codes, other) > here * (1 - 1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_a_range_that_is_too_wide_is_mended(seed: int) -> None:
    """Twice as wide as it should be, at 3 bits: much is won over the best codes of the scales that were given."""
    one = layer(Case("Conv", (6, 3, 2, 2), QuantSpec(bits=3, axis=0)), seed)
    wide = replace(one, qparams=replace(one.qparams, scale=2 * one.qparams.scale))
    found = AdaQuant().round(wide.weight, wide.qparams, wide.moments)
    plain = Gptq().round(wide.weight, wide.qparams, wide.moments)
    assert wide.error(found).sum() < 0.6 * wide.error(plain).sum()
    assert np.median(found.qparams.scale / wide.qparams.scale) < 0.9


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("conv", 6),
        ("conv, one scale", 1),
        ("depthwise", 5),
        ("conv transpose, groups", 4),  # a scale serves one output of each group
        ("matmul, a scale an input", 1),
        ("matmul, blocks", 5),
        ("matmul, batches", 1),
    ],
)
def test_outputs_that_share_scales_are_one_unit(case: str, count: int) -> None:
    one = layer(CASES[case])
    sharing = _Sharing.of(one.qparams, one.moments)
    assert sharing.count == count
    ids = one.layout.spread(np.arange(one.qparams.scale.size).reshape(one.qparams.scale.shape), one.qparams)
    of = {scale: sharing.units[g, o] for g, o, k in np.ndindex(ids.shape) for scale in [ids[g, o, k]]}
    for g, o, k in np.ndindex(ids.shape):
        assert of[ids[g, o, k]] == sharing.units[g, o] == sharing.of_scale[ids[g, o, k]]
    values = np.random.default_rng(0).normal(size=ids.shape)
    np.testing.assert_allclose(
        sharing.over_scales(values), [values[ids == scale].sum() for scale in range(one.qparams.scale.size)]
    )


@pytest.mark.parametrize("small", [1.0, 1e-4])
def test_scales_of_half_precision_stay_so(small: float) -> None:
    """A model in float16 stores them in two bytes, and none below its smallest normal number."""
    one = layer(Case("Conv", (6, 3, 2, 2), CHANNELS))
    weight = one.weight * np.float32(small)
    bounds = scales(weight, CHANNELS).limits
    one = replace(one, weight=weight, qparams=params_from_bounds(bounds, CHANNELS, scale_dtype=np.float16))
    found = AdaQuant().round(one.weight, one.qparams, one.moments)
    moved = found.qparams.scale
    assert (moved != one.qparams.scale).any()
    np.testing.assert_array_equal(moved, moved.astype(np.float16).astype(np.float32))
    assert moved.min() >= MIN_SCALE_FP16


def test_nothing_to_gain_gives_back_what_was_given() -> None:
    """Weights that lie on their codes: the very scales, and those codes."""
    codes = np.random.default_rng(0).integers(-7, 8, (4, 9)).astype(np.int8)
    one = layer(Case("Gemm", (4, 9), CHANNELS, {"transB": 1}))
    qparams = QParams(np.array([0.5, 1, 2, 0.25], np.float32), np.zeros(4, np.int8), CHANNELS)
    one = replace(one, weight=qparams.dequantize(codes), qparams=qparams)
    found = AdaQuant().round(one.weight, qparams, one.moments)
    assert found.qparams is qparams
    np.testing.assert_array_equal(found.codes, codes)


def test_arguments_out_of_range() -> None:
    with pytest.raises(ValueError, match="must be"):
        AdaQuant(iterations=0)
    with pytest.raises(ValueError, match="must be"):
        AdaQuant(sweeps=-1)
