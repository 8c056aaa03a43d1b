"""Percentiles against sorting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.observers import Percentile, make_observer
from sbonnx.calib.observers.base import ObserverTarget
from sbonnx.calib.sketches import Distribution
from sbonnx.errors import RecipeError
from sbonnx.spec import Array, QuantSpec, ScaleRule
from tests.calib.observers.reference import large, sketch_of, small

SPEC = QuantSpec()
alphas = st.sampled_from([0.0, 1e-4, 1e-3, 0.01, 0.05, 0.25, 0.49])
rules: st.SearchStrategy[ScaleRule] = st.sampled_from(["exact", "sparsebit"])


def sorted_out(x: Array, alpha: float, rule: ScaleRule) -> tuple[float, float]:
    """The definition: ranks among the sorted values, counted from 1."""
    values = sorted(float(value) for value in x)
    below = sum(value < 0 for value in values)
    cut_low, cut_high = round(alpha * below), round(alpha * (len(values) - below))
    lowest = max(cut_low, 1) if rule == "sparsebit" else cut_low + 1
    lo = values[lowest - 1] if below else 0.0
    hi = values[len(values) - cut_high - 1] if below < len(values) else 0.0
    return lo, hi


@settings(max_examples=200, deadline=None)
@given(x=small, alpha=alphas, rule=rules)
def test_exact_where_the_sketch_is(x: Array, alpha: float, rule: ScaleRule) -> None:
    bounds = Percentile(alpha).bounds(sketch_of(x[None]), SPEC, rule)
    lo, hi = sorted_out(x, alpha, rule)
    if rule == "exact":  # a side without values ends where the data do
        lo, hi = max(lo, float(x.min())), min(hi, float(x.max()))
    assert (float(bounds.lo), float(bounds.hi)) == (lo, hi)


@settings(max_examples=60, deadline=None)
@given(x=large, alpha=alphas, rule=rules)
def test_binned_is_off_by_less_than_a_128th(x: Array, alpha: float, rule: ScaleRule) -> None:
    bounds = Percentile(alpha).bounds(sketch_of(x[None]), SPEC, rule)
    for found, exact in zip((bounds.lo, bounds.hi), sorted_out(x, alpha, rule), strict=True):
        if rule == "exact":
            exact = min(max(exact, float(x.min())), float(x.max()))
        assert abs(float(found) - exact) <= abs(exact) / 128 * (1 + 1e-6)
    if alpha == 0:
        ends = (min(float(x.min()), 0.0), max(float(x.max()), 0.0)) if rule == "sparsebit" else (x.min(), x.max())
        assert (bounds.lo, bounds.hi) == ends


def test_places_within_a_bin_follow_the_rank() -> None:
    """Smooth data: nearer than the width of the bin."""
    x = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    bounds = Percentile(0.01).bounds(sketch_of(x[None]), SPEC)
    lo, hi = sorted_out(x, 0.01, "exact")
    assert [float(bounds.lo), float(bounds.hi)] == pytest.approx([lo, hi], rel=1e-3)


def test_channels_with_values_on_one_side_or_none() -> None:
    rng = np.random.default_rng(1)
    wide = np.stack([rng.random(9000), -rng.random(9000), np.zeros(9000), rng.standard_normal(9000)])
    for rows, limit in ((wide[:, :2000], 0.0), (wide, 1 / 32)):
        rows = rows.astype(np.float32)
        bounds = Percentile(0.02).bounds(sketch_of(rows, axis=0), SPEC, "sparsebit")
        for row, lo, hi in zip(rows, bounds.lo, bounds.hi, strict=True):
            want = sorted_out(row, 0.02, "sparsebit")
            assert [float(lo), float(hi)] == pytest.approx(list(want), rel=limit)


def test_values_seen_several_times() -> None:
    """A distribution of single values need not count each once."""
    values = np.array([[-2.0, -1.0, 0.0, 5.0, 9.0]])
    counts = np.array([[1, 9, 80, 9, 1]])
    lo, hi = np.array([-2.0]), np.array([9.0])
    exact = Distribution(values, values, counts, lo, hi, exact=True)
    found = Percentile(0.12).solve(exact, ObserverTarget.of(SPEC))
    assert [float(end[0]) for end in found] == [-1.0, 0.0]


@pytest.mark.parametrize("alpha", [-0.1, 0.5, 99.9])
def test_alpha_is_a_share(alpha: float) -> None:
    with pytest.raises(RecipeError, match=r"alpha must be at least 0 and below 0\.5"):
        make_observer("percentile", {"alpha": alpha})
