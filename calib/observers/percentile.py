"""Percentile observer: the range without its outermost values."""

from __future__ import annotations

from typing import final

import numpy as np

from sbonnx.calib.observers.base import ObserverTarget, Solver, singles
from sbonnx.calib.sketches import Distribution
from sbonnx.recipe.sections.quantizers import PercentileKeys
from sbonnx.spec import Array


@final
class Percentile(PercentileKeys, Solver):
    """Leaves out a share of the values at each end, separately for negative and for other values.

        k+ = round(alpha * count(x >= 0)),  hi = the largest value after leaving out k+   (0 if no value is >= 0)
        k- = round(alpha * count(x < 0)),   lo = the smallest value after leaving out k-  (0 if no value is < 0)

    Halves are rounded to even. Under the rule "sparsebit" the lower end leaves out max(k- - 1, 0), as in the ancestor,
    which counts ranks from 1 on both sides.

    Error bound: exact if the sketch is. Otherwise an end is in the bin of the exact one, at the position of its rank in
    a uniformly filled bin: the error is less than a 128th of itself (per channel: a 32nd). With alpha = 0 the ends are
    the exact minimum and maximum.

    Source: the ancestor's `percentile` observer.
    """

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha < 0.5:
            raise ValueError(f"alpha must be at least 0 and below 0.5, got {self.alpha}")

    def solve(self, distribution: Distribution, target: ObserverTarget) -> tuple[Array, Array]:
        total = distribution.total
        negative = distribution.left < 0
        below = negative.sum(axis=1) if singles(distribution) else (negative * distribution.counts).sum(axis=1)
        dropped = np.rint(self.alpha * below).astype(np.int64)
        if target.rule == "sparsebit":
            dropped = np.maximum(dropped - 1, 0)
        above = np.rint(self.alpha * (total - below)).astype(np.int64)
        lo = np.where(below > 0, _ranked(distribution, dropped), 0.0)
        hi = np.where(below < total, _ranked(distribution, total - 1 - above), 0.0)
        return lo, hi


def _ranked(distribution: Distribution, rank: Array) -> Array:
    """Return the value at a rank (0: the smallest) of each range, float64 (C,); ranks are limited to the valid ones."""
    rank = np.clip(rank, 0, np.maximum(distribution.total - 1, 0))
    if singles(distribution):
        return _of_each(distribution.left, rank).astype(np.float64)
    counts = distribution.counts
    upto = np.cumsum(counts, axis=1)
    bins = np.searchsorted(upto[0], rank, side="right") if len(upto) == 1 else (upto <= rank[:, None]).sum(axis=1)
    bins = np.minimum(bins, counts.shape[1] - 1)  # for an empty range
    left, inside = _of_each(distribution.left, bins).astype(np.float64), _of_each(counts, bins)
    if distribution.exact:
        return left
    share = (rank - (_of_each(upto, bins) - inside) + 0.5) / np.maximum(inside, 1)
    value = left + (_of_each(distribution.right, bins) - left) * share
    value = np.where(rank == 0, distribution.lo, value)
    return np.asarray(np.where(rank == distribution.total - 1, distribution.hi, value))


def _of_each(values: Array, bins: Array) -> Array:
    """Return one value of each row of (R, n), R being 1 or C: (C,)."""
    return np.asarray(values[np.arange(len(values)) if len(values) > 1 else 0, bins])
