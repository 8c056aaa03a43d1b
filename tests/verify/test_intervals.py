"""Intervals: published values, and coverage of what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sbonnx.verify import intervals


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)],
)
def test_wilson(hits: int, count: int, low: float, high: float) -> None:
    """The last two are those of Newcombe 1998, table I, method 3."""
    assert intervals.wilson(hits, count) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (30, 2.0423), (40, 2.0211), (60, 2.0003), (120, 1.9799)]
)
def test_quantiles_of_student(freedom: int, quantile: float) -> None:
    """The table and the expansion, against published tables."""
    assert intervals.t_quantile(freedom) == pytest.approx(quantile, abs=2e-4)


def test_nothing_is_known_of_one_sample() -> None:
    assert intervals.of_mean(np.ones(1)) == intervals.UNKNOWN
    assert intervals.of_ratio(np.ones(1), np.ones(1)) == intervals.UNKNOWN
    assert intervals.wilson(0, 0) == intervals.UNKNOWN
    low, high = intervals.wilson(1, 1)
    assert 0.2 < low < high == 1.0, "a share is bounded"


def test_coverage() -> None:
    """About 95 of 100 intervals contain the value of the population, for means and for ratios of energies."""
    rng, hits = np.random.default_rng(0), [0, 0]
    for _ in range(1000):
        signal = rng.gamma(8.0, 1.0, 24)
        noise = 0.1 * signal * rng.gamma(8.0, 1 / 8, 24)
        for number, (low, high) in enumerate((intervals.of_mean(signal), intervals.of_ratio(noise, signal))):
            hits[number] += low <= (8.0, 0.1)[number] <= high
    assert all(920 <= count <= 975 for count in hits), hits


def test_energies_that_are_not_finite_have_no_interval() -> None:
    assert intervals.of_ratio(np.array([1.0, math.inf]), np.ones(2)) == intervals.UNKNOWN
    assert intervals.of_mean(np.array([1.0, math.nan])) == intervals.UNKNOWN


@pytest.mark.parametrize(("share", "changed"), [(0.01, 0.02), (0.05, 0.1), (0.0, 0.05)])
def test_paired_differences_are_covered(share: float, changed: float) -> None:
    """Of 2,000 sets of 200 samples, about 95 % of the intervals contain the difference; none is empty."""
    rng, count = np.random.default_rng(2), 200
    lost, gained = (changed + share) / 2, (changed - share) / 2
    draws = rng.multinomial(count, [gained, lost, 1 - gained - lost], 2000)
    ends = np.array([intervals.paired(int(a), int(b), count) for a, b, _ in draws])
    assert 0.93 < ((ends[:, 0] <= -share) & (-share <= ends[:, 1])).mean() < 0.99
    assert (ends[:, 1] > ends[:, 0]).all()
    low, high = intervals.paired(0, 0, 10)
    assert low < -0.1 and high > 0.1, "ten equal decisions prove little"
