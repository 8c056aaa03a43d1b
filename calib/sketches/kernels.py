"""Minimum, maximum and leading-bits histograms of arrays: compiled if available, else in numpy, with equal results."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sbonnx.spec import Array
from sbonnx.system.native import address, compiled

native = compiled("sbonnx.calib.sketches._kernels")

PAGES: Final = 512
"""Number of pages: one per sign and exponent of float32. The leading bits of the mantissa name the bin."""

TABLES: Final = 2
"""Number of tables that the compiled loop alternates between."""

CHUNK: Final = 1 << 18
"""Number of values that numpy counts at a time."""

_local = threading.local()


def extremes(x: Array) -> tuple[Array, Array, bool]:
    """Compute (lo, hi, finite) of each row of `x`: float32 (rows, columns >= 1), contiguous; lo and hi float32 (rows,).

    If a row holds NaN or Inf, `finite` is False and its lo and hi are undefined.
    """
    rows, columns = x.shape
    if native is None:
        lo, hi = np.asarray(x.min(axis=1)), np.asarray(x.max(axis=1))
        return lo, hi, bool(np.isfinite(lo).all() and np.isfinite(hi).all())
    lo, hi = np.empty(rows, np.float32), np.empty(rows, np.float32)
    fine: bool = native.extremes(address(x), rows, columns, address(lo), address(hi))
    return lo, hi, fine


@dataclass
class Pages:
    """Histogram of the bins in use, for each of several rows.

    Attributes:
        mantissa: leading bits of the mantissa that name a bin: 2^mantissa bins per page.
        slots: int16 (512,), position of each page in `counts`, -1 for a page without counts.
        counts: int64 (rows, pages in use, 2^mantissa).
    """

    mantissa: int
    slots: Array
    counts: Array

    @classmethod
    def empty(cls, rows: int, mantissa: int) -> Pages:
        """Create an empty histogram."""
        return cls(mantissa, np.full(PAGES, -1, np.int16), np.zeros((rows, 0, 1 << mantissa), np.int64))

    def add_pages(self, pages: Array) -> None:
        """Add empty `pages` (numbers below 512, none in use yet)."""
        rows, used, bins = self.counts.shape
        self.slots[pages] = np.arange(used, used + len(pages))
        self.counts = np.concatenate([self.counts, np.zeros((rows, len(pages), bins), np.int64)], axis=1)

    def merge(self, other: Pages) -> None:
        """Add the counts of `other`, which is unchanged."""
        theirs = np.flatnonzero(other.slots >= 0)
        new = theirs[self.slots[theirs] < 0]
        if len(new):
            self.add_pages(new)
        self.counts[:, self.slots[theirs]] += other.counts[:, other.slots[theirs]]

    def clear_below(self, cut: float) -> None:
        """Set the counts of all bins below a negative number to 0, in place."""
        bins = 1 << self.mantissa
        pages = np.flatnonzero(self.slots >= 0)
        keys = pages[:, None] * bins + np.arange(bins)
        near = np.ldexp(1 + keys % bins / bins, keys // bins % 256 - 127)  # the end of the bin next to zero
        below = (keys >= 256 * bins) & (near >= -cut)
        self.counts[:, self.slots[pages]] = np.where(below, 0, self.counts[:, self.slots[pages]])

    def count(self, x: Array) -> tuple[Array, Array, bool]:
        """Count `x` and return its extremes: float32 (rows, columns >= 1), contiguous; see `extremes`.

        Rows before the first non-finite one are counted, that one and those after it are not.
        """
        if native is None:
            return self._count_in_numpy(x)
        rows, columns = x.shape
        lo, hi = np.empty(rows, np.float32), np.empty(rows, np.float32)
        tables = table(self.mantissa)
        at = 0
        while True:
            missing = np.zeros(PAGES, np.uint8)
            at = native.count(
                address(x), rows, columns, self.mantissa, address(self.slots), address(self.counts),
                self.counts.shape[1], address(tables), address(lo), address(hi), address(missing), at,
            )  # fmt: skip
            if at < 0 or at == rows:
                return lo, hi, at == rows
            self.add_pages(np.flatnonzero(missing))

    def _count_in_numpy(self, x: Array) -> tuple[Array, Array, bool]:
        lo, hi, fine = extremes(x)
        bins = 1 << self.mantissa
        for row, (values, low, high) in enumerate(zip(x, lo, hi, strict=True)):
            if not (np.isfinite(low) and np.isfinite(high)):
                break
            leading = values.view(np.uint32)
            counts = np.zeros(PAGES * bins, np.int64)
            for start in range(0, len(leading), CHUNK):
                keys = leading[start : start + CHUNK] >> np.uint32(23 - self.mantissa)
                counts += np.bincount(keys, minlength=PAGES * bins)
            pages = counts.reshape(PAGES, bins)
            used = np.flatnonzero(pages.any(axis=1))
            new = used[self.slots[used] < 0]
            if len(new):
                self.add_pages(new)
            self.counts[row, self.slots[used]] += pages[used]
        return lo, hi, fine


def table(mantissa: int) -> Array:
    """Return this thread's counting tables, all zero; the compiled loop resets them."""
    tables: dict[int, Any] = _local.__dict__.setdefault("tables", {})
    if mantissa not in tables:
        tables[mantissa] = np.zeros((TABLES, PAGES << mantissa), np.uint32)
    mine: Array = tables[mantissa]
    return mine
