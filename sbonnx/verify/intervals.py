"""95 % confidence intervals of shares, means and ratios of energies over samples. They are deterministic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from sbonnx.spec import Array

Interval = tuple[float, float]
"""Lower and upper end; (-inf, inf) if nothing is known, as for the mean of one sample."""

UNKNOWN: Final[Interval] = (-math.inf, math.inf)

CONFIDENCE: Final = 0.95

NORMAL: Final = 1.959964
"""0.975 quantile of the normal distribution."""

T_QUANTILES: Final = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""0.975 quantiles of Student's t distribution for 1 to 30 degrees of freedom."""


def t_quantile(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t distribution.

    Above the table: the first terms of the expansion in 1 / `freedom` (Abramowitz and Stegun 26.7.5), exact to 1e-4.

    Args:
        freedom: degrees of freedom, 1 or more.
    """
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def wilson(hits: int, count: int) -> Interval:
    """Compute Wilson's score interval of a share: `hits` of `count` independent samples (Wilson 1927).

    It stays within 0 to 1, and does not collapse if all or none are hits.
    """
    if not count:
        return UNKNOWN
    share, z2 = hits / count, NORMAL**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = NORMAL / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return (centre - half if hits else 0.0), (centre + half if hits < count else 1.0)


def paired(gained: int, lost: int, count: int) -> Interval:
    """Compute the interval of a difference of two shares on the same samples: Agresti and Min (2005), adjusted Wald.

    Half a sample is added to each of the four cells of hits and misses: without any change, the interval is not empty.

    Args:
        gained, lost: samples that are a hit of the second alone, and of the first alone.
        count: number of samples.
    """
    total = count + 2
    difference = (gained - lost) / total
    half = NORMAL * math.sqrt(max((gained + lost + 1) / total - difference**2, 0.0) / total)
    return difference - half, difference + half


def of_mean(values: Array) -> Interval:
    """Compute Student's interval of the mean of independent values, shape (samples,)."""
    if len(values) < 2 or not np.isfinite(values).all():
        return UNKNOWN
    half = t_quantile(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


def of_median(values: Array) -> Interval:
    """Compute the interval of the median of independent values, shape (samples,), for any distribution.

    Its ends are order statistics (David & Nagaraja 2003, section 7.1): the largest rank r with
    ``P(Binomial(n, 1/2) < r) <= 0.025``. Fewer than 6 values have none.
    """
    ordered, hits = np.sort(values), np.arange(len(values) // 2)
    factors = np.log((len(values) - hits) / (hits + 1))  # of each binomial coefficient over the one before
    chances = np.exp(np.cumsum(factors) - factors - len(values) * math.log(2))  # of 0, 1, ... hits
    rank = int(np.count_nonzero(np.cumsum(chances) <= (1 - CONFIDENCE) / 2))
    return (float(ordered[rank - 1]), float(ordered[-rank])) if rank else UNKNOWN


def of_ratio(above: Array, below: Array) -> Interval:
    """Compute the interval of ``sum(above) / sum(below)``: delta method (Cochran 1977, 2.11) on the logarithm.

    The logarithm keeps the interval above 0, and makes it symmetric in decibel.

    Args:
        above, below: of the same samples, shape (samples,), 0 or more.
    """
    if len(above) < 2 or not above.sum() or not below.sum() or not np.isfinite(above).all():
        return UNKNOWN
    ratio = float(above.sum() / below.sum())
    residual = float(((above - ratio * below) ** 2).sum())
    spread = math.sqrt(residual * len(above) / (len(above) - 1)) / float(above.sum())
    factor = math.exp(t_quantile(len(above) - 1) * spread)
    return ratio / factor, ratio * factor


RESAMPLES: Final = 1000
"""Number of bootstrap samples (Efron and Tibshirani 1993: 1000 or more for percentiles)."""


def resampled(values: Sequence[Callable[[Array], float]], count: int) -> Array:
    """Compute statistics of the same bootstrap samples, shape (statistics, `RESAMPLES`), for paired differences.

    Args:
        values: statistics, as functions of how often each sample counts, shape (count,).
        count: number of samples.
    """
    rng = np.random.default_rng(0)
    draws = np.empty((len(values), RESAMPLES))
    if count < 2:
        draws[:] = np.nan
        return draws
    for place in range(RESAMPLES):
        counts = np.bincount(rng.integers(0, count, count), minlength=count).astype(np.float64)
        draws[:, place] = [value(counts) for value in values]
    return draws


def percentile(draws: Array) -> Interval:
    """Return the percentile interval of bootstrap draws (Efron and Tibshirani 1993, 13.3).

    Draws without a value (a class that occurs in no sample) are left out; if they are more than a tenth, nothing is
    known.
    """
    finite = draws[np.isfinite(draws)]
    if len(finite) < 0.9 * len(draws):
        return UNKNOWN
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(finite, [tail, 100 - tail])
    return float(low), float(high)
