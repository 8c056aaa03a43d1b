"""Entropy search: the bin of a histogram to clip at, so that quantization loses the least information."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from sbonnx.spec import Array

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
    found, end = np.empty(len(starts)), np.empty(len(starts))
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
        found[part] = np.einsum("ij,ij->i", inside, np.log(np.maximum(shared, TINY, out=shared), out=shared))
    return found, end


def best_bin(histogram: Array, levels: int) -> int:
    """Return the number of bins to keep, with the least divergence; the largest number wins ties."""
    found = divergences(histogram, levels)
    return len(histogram) - int(np.argmin(found[::-1]))


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
