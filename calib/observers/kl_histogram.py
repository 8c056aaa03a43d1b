"""Entropy observer: the symmetric range that loses the least information."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final, final

import numpy as np

from sbonnx.calib.observers.base import TILE, ObserverTarget, Solver, mirrored, rows_of
from sbonnx.calib.observers.cumulative import Curve
from sbonnx.calib.sketches import Distribution
from sbonnx.spec import Array, QuantSpec

FLOOR: Final = 1e-10
"""Probability assigned to values beyond a last level that is empty."""

TINY: Final = 1e-300
"""Stands for 0 in a logarithm that is multiplied by 0."""

BLOCK: Final = 1 << 14
"""Number of groups processed at once: a temporary takes 128 KiB."""


def divergences(histogram: Array, levels: int) -> Array:
    """Compute the Kullback-Leibler divergence of clipping after the first i bins, for i = levels .. len(histogram).

    P is the first i bins, with the counts beyond them added to the last one. Q is the first i bins without that, summed
    in `levels` groups of neighbours (bin k in group floor(k levels / i)); each group is distributed evenly over its
    bins that are not empty in P. Both sum to 1.

        KL(i) = sum over P_k > 0 of P_k ln(P_k / Q_k),    Q_k at least 1e-10 if its group is empty

    Summed by groups, with prefix sums of h, h ln h and of the non-empty bins, so that a candidate costs `levels` steps.

    Args:
        histogram: float64 (bins,), counts of |x|, not all 0.

    Returns:
        float64 (bins - levels + 1,), nats; +inf if the first i bins are empty.

    Raises:
        ValueError: there are fewer bins than levels.

    Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017, slides 38 to 40.
    """
    bins = len(histogram)
    if bins < levels:
        raise ValueError(f"{bins} bins cannot be told apart by {levels} levels")
    kept = np.arange(levels, bins + 1)
    mass, used, logs = (np.concatenate([[0.0], np.cumsum(x)]) for x in (histogram, histogram > 0, _xlogx(histogram)))
    total, first, last = mass[-1], mass[kept], histogram[kept - 1]
    beyond = total - first
    opened = (last == 0) & (beyond > 0)  # the last bin is not empty in P, although it is in the histogram
    gathered, end = _gathered(mass, used, opened, _starts(bins, levels))
    with np.errstate(divide="ignore", invalid="ignore"):
        least = np.where(end > 0, np.log(end) - np.log(first), np.log(FLOOR))
        cross = gathered - first * np.log(first) + beyond * least  # sum of P ln Q, not yet divided by the total
        own = logs[kept - 1] + _xlogx(last + beyond) - total * np.log(total)
        return np.asarray(np.where(first > 0, (own - cross) / total, np.inf))


def _gathered(mass: Array, used: Array, opened: Array, starts: Array) -> tuple[Array, Array]:
    """Compute the sum over the groups of m ln(m / z), and m / z of the last group, float64 (candidates,) each.

    m is the mass of a group, z the number of its non-empty bins. Candidates are processed in blocks that fit the cache.

    Args:
        mass, used: prefix sums of the histogram and of its non-empty bins.
        opened: candidates with one more non-empty bin in the last group.
        starts: see `_starts`.
    """
    total, end = np.empty(len(starts)), np.empty(len(starts))
    rows = max(1, BLOCK // starts.shape[1])
    for start in range(0, len(starts), rows):
        part = slice(start, start + rows)
        edges = starts[part]
        inside, filled = np.diff(mass.take(edges), axis=1), np.diff(used.take(edges), axis=1)
        filled[:, -1] += opened[part]
        inside *= filled > 0  # removes cancellation errors of the prefix sums of fractions
        np.maximum(filled, 1.0, out=filled)
        shared = np.divide(inside, filled, out=filled)
        end[part] = shared[:, -1]
        total[part] = np.einsum("ij,ij->i", inside, np.log(np.maximum(shared, TINY, out=shared), out=shared))
    return total, end


def best_bin(histogram: Array, levels: int) -> int:
    """Return the number of bins to keep, with the least divergence; the largest number wins ties."""
    divergence_of_bins = divergences(histogram, levels)
    return len(histogram) - int(np.argmin(divergence_of_bins[::-1]))


@lru_cache(maxsize=8)
def _starts(bins: int, levels: int) -> Array:
    """Compute the first bin of each group and the end of the last, int64 (bins - levels + 1, levels + 1).

    Row i is for i + levels kept bins.
    """
    kept = np.arange(levels, bins + 1)[:, None]
    starts: Array = -(-np.arange(levels + 1) * kept // levels)
    return starts


def _xlogx(x: Array) -> Array:
    """Compute x ln x, 0 if x is 0."""
    return np.asarray(x * np.log(np.where(x > 0, x, 1.0)))


BINS: Final = 2048
"""Number of bins of the histogram of |x|, as in TensorRT."""

VALUES_A_BIN: Final = 4
"""Minimum mean number of values per bin; fewer bins are used if there would be fewer values."""


@final
@dataclass(frozen=True)
class KlHistogram(Solver):
    """Clips |x| at the threshold t whose quantized histogram has the least Kullback-Leibler divergence.

        lo = max(min x, -t),    hi = min(max x, t)

    |x| is counted in 2048 uniform bins up to the largest. The number of bins is halved, down to twice the levels, while
    there are fewer than four values per bin; with fewer values still, the whole range is used. Zeros are left out:
    every range represents them exactly. The search is that of `entropy.divergences`, with as many levels as there are
    integers up to the largest |x|: 2^(bits-1) for a symmetric range, and 2^bits max|x| / (max x - min x) for an affine
    one. t is the edge of a bin. If there are as many levels as bins, nothing would be lost, and nothing is clipped.

    Error bound: exact if the sketch is. Otherwise the share of the values below any edge of the histogram has an error
    of at most the share in the one bin of the sketch (two: one per side) that contains the edge. The threshold itself
    has no bound: other thresholds often have nearly the same divergence.

    The ancestor's search writes its results to the wrong positions and always picks one constant: 0.75098 max|x| at 8
    bits and 0.98535 max|x| at 4, whatever the data. It is not reproduced under any rule.

    Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017.
    """

    for_floats: ClassVar[bool] = False

    def solve(self, distribution: Distribution, target: ObserverTarget) -> tuple[Array, Array]:
        lo, hi = distribution.lo.copy(), distribution.hi.copy()
        for index in range(distribution.ranges):
            row = rows_of(distribution, slice(index, index + 1))
            t = threshold(row, target.spec)
            lo[index], hi[index] = max(lo[index], -t), min(hi[index], t)
        return lo, hi


def threshold(distribution: Distribution, spec: QuantSpec) -> float:
    """Compute the threshold for |x| of one range; the largest |x| if clipping gains nothing."""
    lo, hi = float(distribution.lo[0]), float(distribution.hi[0])
    largest = max(-lo, hi)
    zeros = int(distribution.counts[0, (distribution.left[0] == 0) & (distribution.right[0] == 0)].sum())
    levels = levels_of(lo, hi, spec)
    bins = bins_for(int(distribution.total[0]) - zeros, levels)
    if bins == 0:
        return largest
    return largest * (best_bin(magnitudes(distribution, bins), levels) / bins)


def levels_of(lo: float, hi: float, spec: QuantSpec) -> int:
    """Count the integers from that of 0 to that of the largest |x|, for a range that exactly holds [lo, hi]."""
    if spec.symmetric or lo == hi == 0:
        return 1 << (spec.bits - 1)
    return round((1 << spec.bits) * max(-lo, hi) / (max(hi, 0.0) - min(lo, 0.0)))


def bins_for(values: int, levels: int) -> int:
    """Return the number of bins for `values` values; 0 if there are too few values, or too many levels."""
    bins = BINS
    while bins > 2 * levels and bins * VALUES_A_BIN > values:
        bins //= 2
    return bins if levels < bins and bins * VALUES_A_BIN <= values else 0


def magnitudes(distribution: Distribution, bins: int) -> Array:
    """Count |x| > 0 of one range in uniform bins from 0 to the largest |x|, float64 (bins,)."""
    largest = max(-float(distribution.lo[0]), float(distribution.hi[0]))
    if distribution.exact:
        return _counted(distribution, bins, largest)
    edges = np.arange(bins + 1) * (largest / bins)
    edges[-1] = largest
    histogram = np.zeros(bins)
    for side in (distribution, mirrored(distribution)):
        counts = np.where(side.left > 0, side.counts, 0)
        positive = Distribution(side.left, side.right, counts, side.lo, side.hi, side.exact)
        histogram += np.diff(Curve.of(positive).upto(edges)[0])
    return np.maximum(histogram, 0.0)


def _counted(distribution: Distribution, bins: int, largest: float) -> Array:
    """Count single values as `magnitudes`: bin k holds k <= |x| bins / largest < k + 1, the last its end as well."""
    histogram = np.zeros(bins)
    for start in range(0, distribution.left.shape[1], TILE):
        x = np.abs(distribution.left[0, start : start + TILE].astype(np.float64))
        counts = np.where(x > 0, distribution.counts[0, start : start + TILE], 0)
        places = np.minimum((x * (bins / largest)).astype(np.int64), bins - 1)
        histogram += np.bincount(places, weights=counts, minlength=bins)
    return histogram
