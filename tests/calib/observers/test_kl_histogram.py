"""The entropy search, against the procedure written out bin by bin."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.observers import KlHistogram
from sbonnx.calib.observers.kl_histogram import best_bin, bins_for, divergences, levels_of, magnitudes
from sbonnx.spec import Array, QuantSpec
from tests.calib.observers.reference import FAMILIES, large, sketch_of, tensors

SPEC = QuantSpec()
ONE_SIDED = QuantSpec(signed=False, symmetric=False)


def written_out(histogram: list[float], kept: int, levels: int) -> float:
    """Divergence of keeping the first `kept` bins, as on the slides: quantize, expand, normalize, compare."""
    reference = list(histogram[:kept])
    if not sum(reference):
        return math.inf
    clipped = [*reference[:-1], reference[-1] + sum(histogram[kept:])]
    candidate, untold = [0.0] * kept, set()
    for level in range(levels):
        mine = [k for k in range(kept) if k * levels // kept == level]
        mass, filled = sum(reference[k] for k in mine), [k for k in mine if clipped[k] > 0]
        for k in filled:
            candidate[k] = mass / len(filled)
            untold |= {k} if mass == 0 else set()
    p_sum, q_sum, divergence = sum(clipped), sum(candidate), 0.0
    for k in range(kept):
        if clipped[k] > 0:
            p, q = clipped[k] / p_sum, 1e-10 if k in untold else candidate[k] / q_sum
            divergence += p * math.log(p / q)
    return divergence


@settings(max_examples=150, deadline=None)
@given(counts=st.lists(st.one_of(st.just(0), st.integers(0, 50)), min_size=2, max_size=60), data=st.data())
def test_divergences_by_the_procedure(counts: list[int], data: st.DataObject) -> None:
    counts[data.draw(st.integers(0, len(counts) - 1))] += 1
    levels = data.draw(st.integers(1, len(counts)))
    found = divergences(np.array(counts, np.float64), levels)
    want = [written_out([float(count) for count in counts], kept, levels) for kept in range(levels, len(counts) + 1)]
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-10)


def test_fractions_of_counts_do_no_harm() -> None:
    """What bins share out is no whole number, and cancels badly where a group is empty."""
    histogram = np.zeros(64)
    histogram[3:20] = 1 / 3
    histogram[40] = 1e-7
    want = [written_out([float(x) for x in histogram], kept, 8) for kept in range(8, 65)]
    np.testing.assert_allclose(divergences(histogram, 8), want, rtol=1e-6, atol=1e-9)


def test_too_few_bins() -> None:
    with pytest.raises(ValueError, match="8 bins cannot be told apart by 16 levels"):
        divergences(np.ones(8), 16)


def by_hand(x: Array, spec: QuantSpec) -> tuple[float, float]:
    """The range of `x` by numpy's histogram and the procedure, the largest threshold of equals."""
    sizes = np.abs(x[x != 0]).astype(np.float64)
    if spec.symmetric:
        levels = 2 ** (spec.bits - 1)
    else:
        levels = round(2**spec.bits * sizes.max() / (max(x.max(), 0) - min(x.min(), 0)))
    bins = 2048
    while bins > 2 * levels and 4 * bins > len(sizes):
        bins //= 2
    if levels >= bins or 4 * bins > len(sizes):
        return float(x.min()), float(x.max())
    histogram = [float(n) for n in np.histogram(sizes, bins, (0, sizes.max()))[0]]
    found = [written_out(histogram, kept, levels) for kept in range(levels, bins + 1)]
    t = sizes.max() * (bins - int(np.argmin(found[::-1]))) / bins
    return max(float(x.min()), -t), min(float(x.max()), t)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["normal", "relu", "laplace", "heavy tails", "gelu", "single outlier", "spikes"])
@pytest.mark.parametrize("spec", [QuantSpec(bits=4), QuantSpec(bits=3, signed=False, symmetric=False), ONE_SIDED])
def test_thresholds_by_brute_force(family: str, spec: QuantSpec) -> None:
    size = 1200 if spec.bits == 8 else 700
    x = FAMILIES[family](np.random.default_rng(11), size).astype(np.float32)
    bounds = KlHistogram().bounds(sketch_of(x[None]), spec)
    assert (float(bounds.lo), float(bounds.hi)) == pytest.approx(by_hand(x, spec), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(x=tensors(10, 5000), bins=st.sampled_from([16, 256, 2048]))
def test_exact_histograms_are_those_of_numpy(x: Array, bins: int) -> None:
    if not x.any():
        return
    sizes = np.abs(x.astype(np.float64))
    found = magnitudes(sketch_of(x[None]).distribution(), bins)
    want = np.histogram(sizes[sizes > 0], bins, (0, sizes.max()))[0]
    assert found.sum() == want.sum()
    assert np.abs(np.cumsum(found) - np.cumsum(want)).max() <= (np.abs(sizes * bins / sizes.max() % 1) < 1e-9).sum()


@settings(max_examples=60, deadline=None)
@given(x=large)
def test_binned_histograms_are_off_by_the_bins_at_an_edge(x: Array) -> None:
    """The share below any edge: by no more than what the sketch's bins around it hold."""
    if not x.any():
        return
    distribution = sketch_of(x[None]).distribution()
    found = np.cumsum(magnitudes(distribution, 256))
    sizes = np.abs(x.astype(np.float64))
    edges = np.arange(1, 257) / 256 * sizes.max()
    want = np.searchsorted(np.sort(sizes[sizes > 0]), edges, side="right")
    left, right, counts = distribution.left[0], distribution.right[0], distribution.counts[0]
    around = [sum(counts[(left <= end) & (end <= right)].sum() for end in (edge, -edge)) for edge in edges]
    assert (np.abs(found - want) <= np.array(around) + 1e-6 * len(x)).all()
    assert found[-1] == pytest.approx(len(sizes[sizes > 0]))


@pytest.mark.parametrize("family", ["normal", "relu", "laplace", "gelu", "heavy tails"])
def test_binned_thresholds_are_as_good_as_exact_ones(family: str) -> None:
    """No bound holds for the threshold; what it costs on the exact histogram is next to the least."""
    x = FAMILIES[family](np.random.default_rng(2), 300_000).astype(np.float32)
    sizes = np.abs(x[x != 0]).astype(np.float64)
    exact = np.histogram(sizes, 2048, (0, sizes.max()))[0].astype(np.float64)
    found = divergences(exact, 128)
    kept = best_bin(magnitudes(sketch_of(x[None]).distribution(), 2048), 128)
    assert found[kept - 128] <= found.min() + 2e-3


def test_equal_values_are_kept() -> None:
    """A single spike: nothing is clipped, where the ancestor clips a quarter."""
    for value in (3.0, -3.0):
        x = np.full((1, 40_000), value, np.float32)
        bounds = KlHistogram().bounds(sketch_of(x), SPEC)
        assert [float(bounds.lo), float(bounds.hi)] == [value, value]


def test_an_outlier_is_clipped_and_the_bulk_is_not() -> None:
    rng = np.random.default_rng(0)
    x = np.append(rng.standard_normal(100_000), 40.0).astype(np.float32)
    bounds = KlHistogram().bounds(sketch_of(x[None]), SPEC)
    assert 3.5 < bounds.hi < 10
    assert x.min() <= bounds.lo < -3.5


@pytest.mark.parametrize(
    ("lo", "hi", "spec", "levels"),
    [
        (-1.0, 1.0, SPEC, 128),
        (0.0, 1.0, SPEC, 128),
        (0.0, 1.0, ONE_SIDED, 256),
        (-1.0, 1.0, ONE_SIDED, 128),
        (-1.0, 3.0, ONE_SIDED, 192),
        (-1.0, 0.0, QuantSpec(bits=4, symmetric=False), 16),
        (0.0, 0.0, ONE_SIDED, 128),
    ],
)
def test_levels_are_the_codes_on_the_longer_side(lo: float, hi: float, spec: QuantSpec, levels: int) -> None:
    assert levels_of(lo, hi, spec) == levels


def test_bins_follow_the_number_of_values() -> None:
    assert bins_for(1 << 20, 128) == bins_for(8192, 128) == 2048
    assert bins_for(8191, 128) == 1024
    assert bins_for(1024, 128) == 256
    assert bins_for(1023, 128) == 0
    assert bins_for(1 << 30, 1 << 15) == 0
    weights = np.random.default_rng(0).standard_normal((3, 500)).astype(np.float32)
    bounds = KlHistogram().bounds(sketch_of(weights, axis=0), SPEC)
    np.testing.assert_array_equal(bounds.hi, weights.max(axis=1))
