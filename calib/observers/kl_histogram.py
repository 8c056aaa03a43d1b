"""The symmetric range that loses the least information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, final

import numpy as np

from sbonnx.calib.observers.base import TILE, Solver, Target, mirrored, rows_of
from sbonnx.calib.observers.cumulative import Curve
from sbonnx.calib.observers.entropy import best_bin
from sbonnx.calib.sketches import Distribution
from sbonnx.spec import Array, QuantSpec

BINS: Final = 2048
"""Bins of the histogram of |x|, as TensorRT has."""

VALUES_A_BIN: Final = 4
"""Fewer bins are made where they would hold fewer values than this on average."""


@final
@dataclass(frozen=True)
class KlHistogram(Solver):
    """Clips |x| at the threshold t whose quantized histogram has the least Kullback-Leibler divergence.

        lo = max(min x, -t),    hi = min(max x, t)

    |x| is counted in 2048 even bins up to the largest (half as many, and so on down to twice the levels, where values
    are fewer than four a bin; fewer still: the whole range). Zeros are left out: every range has them exactly. The
    search is that of `entropy.divergences`, with as many levels as there are codes up to the largest |x|: 2^(bits-1)
    for a symmetric range, and 2^bits max|x| / (max x - min x) for an affine one. t is the edge of a bin. Where the
    levels are as many as the bins nothing would be lost, and nothing is clipped.

    Error bound: exact where the sketch is. Beyond, the share of the values below any edge of the histogram is off by
    no more than the share in the one bin of the sketch (two: one a side) that the edge lies in. The threshold itself
    has no bound: its least divergence is often nearly shared by others.

    The ancestor's search writes its results in the wrong places and always picks one constant: 0.75098 max|x| at 8
    bits and 0.98535 max|x| at 4, whatever the data. It is not reproduced under any rule.

    Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017.
    """

    for_floats: ClassVar[bool] = False

    def solve(self, distribution: Distribution, target: Target) -> tuple[Array, Array]:
        """See `Solver.solve`."""
        lo, hi = distribution.lo.copy(), distribution.hi.copy()
        for index in range(distribution.ranges):
            one = rows_of(distribution, slice(index, index + 1))
            t = threshold(one, target.spec)
            lo[index], hi[index] = max(lo[index], -t), min(hi[index], t)
        return lo, hi


def threshold(distribution: Distribution, spec: QuantSpec) -> float:
    """Where to clip |x| of one range; the largest |x| where nothing is gained."""
    lo, hi = float(distribution.lo[0]), float(distribution.hi[0])
    largest = max(-lo, hi)
    zeros = int(distribution.counts[0, (distribution.left[0] == 0) & (distribution.right[0] == 0)].sum())
    levels = levels_of(lo, hi, spec)
    bins = bins_for(int(distribution.total[0]) - zeros, levels)
    if bins == 0:
        return largest
    return largest * (best_bin(magnitudes(distribution, bins), levels) / bins)


def levels_of(lo: float, hi: float, spec: QuantSpec) -> int:
    """Codes from that of 0 to that of the largest |x|, of a range that just holds [lo, hi]."""
    if spec.symmetric or lo == hi == 0:
        return 1 << (spec.bits - 1)
    return round((1 << spec.bits) * max(-lo, hi) / (max(hi, 0.0) - min(lo, 0.0)))


def bins_for(values: int, levels: int) -> int:
    """How many bins to count so many values in; 0 where they are too few, or the levels too many."""
    bins = BINS
    while bins > 2 * levels and bins * VALUES_A_BIN > values:
        bins //= 2
    return bins if levels < bins and bins * VALUES_A_BIN <= values else 0


def magnitudes(distribution: Distribution, bins: int) -> Array:
    """Counts of |x| > 0 of one range in even bins from 0 to the largest |x|, float64 (bins,)."""
    largest = max(-float(distribution.lo[0]), float(distribution.hi[0]))
    if distribution.exact:
        return _counted(distribution, bins, largest)
    edges = np.arange(bins + 1) * (largest / bins)
    edges[-1] = largest
    found = np.zeros(bins)
    for side in (distribution, mirrored(distribution)):
        counts = np.where(side.left > 0, side.counts, 0)
        positive = Distribution(side.left, side.right, counts, side.lo, side.hi, side.exact)
        found += np.diff(Curve.of(positive).upto(edges)[0])
    return np.maximum(found, 0.0)


def _counted(distribution: Distribution, bins: int, largest: float) -> Array:
    """`magnitudes` of single values: bin k holds k <= |x| bins / largest < k + 1, the last its end as well."""
    found = np.zeros(bins)
    for start in range(0, distribution.left.shape[1], TILE):
        x = np.abs(distribution.left[0, start : start + TILE].astype(np.float64))
        counts = np.where(x > 0, distribution.counts[0, start : start + TILE], 0)
        places = np.minimum((x * (bins / largest)).astype(np.int64), bins - 1)
        found += np.bincount(places, weights=counts, minlength=bins)
    return found
