"""The exact range."""

from __future__ import annotations

from typing import final

import numpy as np

from sbonnx.calib.observers.base import Observer, extremes, readable
from sbonnx.spec import Array, Bounds


@final
class MinMax(Observer):
    """Smallest and largest finite value ever seen, per tensor or per channel. Exact in any order.

    State: two float32 per range.
    """

    def __init__(self, *, axis: int | None = None) -> None:
        super().__init__(axis=axis)
        self._lo: Array | None = None
        self._hi: Array | None = None

    def observe(self, x: Array) -> None:
        """See `Observer.observe`."""
        self._check_axis(x, None if self._lo is None or self.axis is None else self._lo.shape[0])
        seen = extremes(x, self.axis)
        self._count(x, seen)
        self._widen(seen.lo, seen.hi)

    def merge(self, other: MinMax) -> None:
        """See `Observer.merge`."""
        self._count_from(other)
        if other._lo is not None and other._hi is not None:
            self._widen(other._lo, other._hi)

    def bounds(self) -> Bounds:
        """See `Observer.bounds`."""
        if self._lo is None or self._hi is None:
            return Bounds(np.zeros((), np.float32), np.zeros((), np.float32))
        return readable(self._lo, self._hi)

    def _widen(self, lo: Array, hi: Array) -> None:
        """Include [lo, hi]."""
        self._lo = lo if self._lo is None else np.asarray(np.minimum(self._lo, lo))
        self._hi = hi if self._hi is None else np.asarray(np.maximum(self._hi, hi))
