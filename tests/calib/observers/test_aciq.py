"""Clips for assumed distributions, against numeric integration of the paper's expected error."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from sbonnx.calib.observers import Aciq, make_observer
from sbonnx.calib.observers.aciq import ONE_SIDED, TWO_SIDED, best_clip, factor
from sbonnx.errors import RecipeError
from sbonnx.recipe.value_types import Distribution
from sbonnx.spec import Array, QuantSpec
from tests.calib.observers.reference import large, sketch_of

AFFINE = QuantSpec(signed=False, symmetric=False)
SYMMETRIC = QuantSpec()
shapes = pytest.mark.parametrize("shape", ["gaus", "laplace"])


def expected_error(shape: Distribution, bits: int, clip: float) -> float:
    """Of a distribution of unit sigma or beta clipped at +-clip: the tails by sums, the noise as the paper takes it."""
    x = np.linspace(0, 60, 600_001)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) if shape == "gaus" else np.exp(-x) / 2
    tails = 2 * float((np.maximum(x - clip, 0) ** 2 * density).sum() * (x[1] - x[0]))
    return float(tails + clip**2 / (3 * 4**bits))


@shapes
@pytest.mark.parametrize("bits", [2, 4, 8, 10, 12])
def test_the_best_clip_has_the_least_expected_error(shape: Distribution, bits: int) -> None:
    best = best_clip(shape, bits)
    least = expected_error(shape, bits, best)
    for other in (best * 0.97, best * 1.03):
        assert least < expected_error(shape, bits, other)


@shapes
@pytest.mark.parametrize("bits", range(2, 9))
def test_the_ancestors_tables_are_best_clips(shape: Distribution, bits: int) -> None:
    """To two decimals; one-sided ones are those of a bit more."""
    assert TWO_SIDED[shape][bits - 2] == pytest.approx(best_clip(shape, bits), abs=0.011)
    assert ONE_SIDED[shape][bits - 2] == pytest.approx(best_clip(shape, bits + 1), abs=0.02)


@shapes
def test_widths_past_the_table_go_on_from_it(shape: Distribution) -> None:
    for one_sided in (False, True):
        clips = [factor(shape, bits, one_sided) for bits in range(2, 17)]
        assert clips == sorted(clips)
        assert clips[7] == best_clip(shape, 9 + one_sided)


@settings(max_examples=60, deadline=None)
@given(x=large)
def test_gaus_rests_on_the_extremes_and_the_count(x: Array) -> None:
    lo, hi, n = float(x.min()), float(x.max()), len(x)
    unit = 0.35 * (1 + math.sqrt(math.pi * math.log(4))) / math.sqrt(2 * math.log(n))
    mean = float(x.astype(np.float64).mean())
    slack = float(np.abs(x.astype(np.float64)).mean()) / 256 + 1e-6 * abs(mean)
    clip = 3.92 * unit * (hi - lo) / 2
    want_hi = mean + clip if lo < 0 else max(mean + clip, 4.2 * unit * hi)
    bounds = Aciq("gaus").bounds(sketch_of(x[None]), AFFINE)
    assert bounds.hi == pytest.approx(min(hi, want_hi), abs=slack, rel=1e-6)
    assert bounds.lo == pytest.approx(lo if lo >= 0 else max(lo, mean - clip), abs=slack, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(x=large)
def test_laplace_rests_on_means(x: Array) -> None:
    """The bound: half a mean width for the mean, a mean width for beta, a 256th of itself for one side."""
    wide = x.astype(np.float64)
    lo, hi, mean = wide.min(), wide.max(), wide.mean()
    beta, size = np.abs(wide - mean).mean(), np.abs(wide).mean()
    bounds = Aciq("laplace").bounds(sketch_of(x[None]), AFFINE)
    slack = size / 256 + 9.89 * size / 128
    want_hi = mean + 9.89 * beta
    if lo >= 0:
        above = wide[wide > 0]
        upper = above.mean() if len(above) else 0.0
        want_hi, slack = max(want_hi, 11.16 * upper), max(slack, 11.16 * upper / 256)
    assert abs(float(bounds.hi) - min(hi, want_hi)) <= slack * (1 + 1e-6)
    assert abs(float(bounds.lo) - (lo if lo >= 0 else max(lo, mean - 9.89 * beta))) <= slack * (1 + 1e-6)


@shapes
def test_data_of_the_assumed_distribution_get_its_best_clip(shape: Distribution) -> None:
    """sigma and beta of the parent distribution are found, one-sided from its upper half too."""
    rng = np.random.default_rng(4)
    x = (rng.standard_normal(500_000) if shape == "gaus" else rng.laplace(size=500_000)) * 3
    four = {True: QuantSpec(bits=4), False: QuantSpec(bits=4, signed=False, symmetric=False)}
    loose = 0.12 if shape == "gaus" else 0.01  # sigma is guessed from the range
    clip = 3 * factor(shape, 4)
    both = Aciq(shape).bounds(sketch_of(x.astype(np.float32)[None]), four[True])
    assert [float(-both.lo), float(both.hi)] == pytest.approx([clip, clip], rel=loose)
    half = np.maximum(x, 0).astype(np.float32)[None]
    for symmetric, want in ((True, clip), (False, 3 * factor(shape, 4, True))):
        upper = Aciq(shape).bounds(sketch_of(half), four[symmetric])
        assert [float(upper.lo), float(upper.hi)] == pytest.approx([0.0, want], rel=loose)


@shapes
def test_ranges_lie_about_the_mean(shape: Distribution) -> None:
    """Values far from 0 are not cut off, which is what the ancestor's range about 0 does."""
    x = (np.random.default_rng(5).standard_normal(20_000) * 0.1 + 10).astype(np.float32)[None]
    for sign in (1, -1):
        for spec in (SYMMETRIC, AFFINE):
            bounds = Aciq(shape).bounds(sketch_of(sign * x), spec)
            assert bounds.hi >= np.quantile(sign * x, 0.99)
            assert bounds.lo <= np.quantile(sign * x, 0.01)
        old = Aciq(shape).bounds(sketch_of(sign * x), SYMMETRIC, "sparsebit")
        assert old.hi < 2


@shapes
def test_the_ancestors_ranges_pass_the_data(shape: Distribution) -> None:
    x = np.random.default_rng(6).uniform(-1, 1, 20_000).astype(np.float32)[None]
    old = Aciq(shape).bounds(sketch_of(x), SYMMETRIC, "sparsebit")
    ours = Aciq(shape).bounds(sketch_of(x), SYMMETRIC)
    assert ours.hi <= x.max()
    if shape == "laplace":
        assert old.hi > 4 * x.max()


def test_the_distribution_has_two_names() -> None:
    with pytest.raises(RecipeError, match="distribution must be one of gaus, laplace, got 'normal'"):
        make_observer("aciq", {"distribution": "normal"})
