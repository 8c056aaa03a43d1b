"""`Distribution`: histogram or exact values of a sketch, in the form that observers use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbonnx.calib.sketches.kernels import Pages
from sbonnx.spec import Array


@dataclass(frozen=True)
class Distribution:
    """Bins and counts of C ranges at once; C is 1 for one range per tensor.

    Attributes:
        left, right: edges of the bins, (R, n), R being 1 (all ranges share the bins) or C; float64, or float32 if
            `exact`; ascending along n. Bin i holds values within [left_i, right_i]; a bin of zero width is one value.
        counts: int64 (C, n), or (1, n) if they are the same for every range. Zeros are allowed.
        lo, hi: float64 (C,), exact minimum and maximum; 0 for an empty range.
        exact: all bins have zero width (then `left is right`): nothing was rounded.
    """

    left: Array
    right: Array
    counts: Array
    lo: Array
    hi: Array
    exact: bool

    @property
    def ranges(self) -> int:
        """Number of ranges, C."""
        return len(self.lo)

    @property
    def total(self) -> Array:
        """Number of values in each range, int64 (C,)."""
        return np.broadcast_to(self.counts.sum(axis=1), (self.ranges,))


def binned(pages: Pages, lo: Array, hi: Array) -> Distribution:
    """Convert pages to a distribution of their non-empty bins, in ascending order of the values."""
    bins = 1 << pages.mantissa
    present = np.flatnonzero(pages.slots >= 0)
    keys = (present[:, None] * bins + np.arange(bins)).ravel()
    counts = pages.counts[:, pages.slots[present]].reshape(len(lo), -1)
    exponents = keys // bins % 256
    zero = exponents == 0  # zeros of either sign, and denormals, which runtimes treat as zero
    share = 1 + keys % bins / bins
    scale = np.ldexp(1.0, exponents - 127)
    near, far = scale * share, scale * (share + 1 / bins)
    negative = keys >= 256 * bins
    left, right = np.where(negative, -far, near), np.where(negative, -near, far)
    left[zero] = right[zero] = 0.0
    used = counts.any(axis=0) & ~zero
    order = np.flatnonzero(used)[np.argsort(left[used], kind="stable")]
    zeros = counts[:, zero].sum(axis=1, keepdims=True)
    if zeros.any():
        at = int(np.searchsorted(left[order], 0.0))
        left, right = np.insert(left[order], at, 0.0), np.insert(right[order], at, 0.0)
        counts = np.concatenate([counts[:, order[:at]], zeros, counts[:, order[at:]]], axis=1)
    else:
        left, right, counts = left[order], right[order], counts[:, order]
    cut = [np.clip(edge[None], lo[:, None], hi[:, None]) for edge in (left, right)]
    return Distribution(cut[0], cut[1], counts, lo, hi, exact=False)
