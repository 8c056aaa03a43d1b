"""The range of a typical sample, recent ones weighing more."""

from __future__ import annotations

from typing import ClassVar, final

import numpy as np

from sbonnx.calib.observers.base import Observer, extremes
from sbonnx.spec import Array, Bounds


@final
class MovingAverage(Observer):
    """Exponential moving average of each sample's min and of its max.

        m_1 = x_1,    m_i = ratio * m_(i-1) + (1 - ratio) * x_i

    A sample is one slice of the leading axis (an array without axes, or one whose channel axis is
    the leading one, is one sample). A sample without a finite value is skipped. Appending a stream of
    n samples that starts with f and ends at m to one that ended at s gives m + ratio^n (s - f), so two
    halves of a stream merge with fixed state: count, first and last, in float64.

    Args:
        ratio: weight of the old value, within [0, 1).
        axis: channel axis, or None.

    Source: the ancestor's `moving_average` observer (EMA_RATIO 0.9).
    """

    order_free: ClassVar[bool] = False
    for_weights: ClassVar[bool] = False

    def __init__(self, *, ratio: float = 0.9, axis: int | None = None) -> None:
        if not 0.0 <= ratio < 1.0:
            raise ValueError(f"ratio must be at least 0 and below 1, got {ratio}")
        super().__init__(axis=axis)
        self.ratio = float(ratio)
        self._samples = 0
        self._first: Array | None = None  # (2,) or (2, C): lo and hi of the first sample
        self._now: Array | None = None

    def observe(self, x: Array) -> None:
        """See `Observer.observe`."""
        self._check_axis(x, None if self._now is None or self.axis is None else self._now.shape[1])
        one = x.ndim == 0 or self.axis == 0
        axis = self.axis if one or self.axis is None else self.axis - 1
        for sample in [x] if one else x:
            seen = extremes(np.asarray(sample), axis)
            self._count(np.asarray(sample), seen)
            if (seen.lo <= seen.hi).all():
                self._append(np.stack([seen.lo, seen.hi]).astype(np.float64))

    def merge(self, other: MovingAverage) -> None:
        """See `Observer.merge`: `other`'s samples come after this one's."""
        if other.ratio != self.ratio:
            raise ValueError(f"cannot merge a moving average of ratio {other.ratio} into one of {self.ratio}")
        self._count_from(other)
        if other._now is None or other._first is None:
            return
        if self._now is None:
            self._first, self._now, self._samples = other._first, other._now, other._samples
        elif other._samples == 1:  # the same sum as in `observe`, bit for bit
            self._append(other._first)
        else:
            self._now = other._now + self.ratio**other._samples * (self._now - other._first)
            self._samples += other._samples

    def bounds(self) -> Bounds:
        """See `Observer.bounds`."""
        lo, hi = np.zeros(2, np.float32) if self._now is None else self._now.astype(np.float32)
        return Bounds(np.asarray(lo), np.asarray(hi))

    def _append(self, sample: Array) -> None:
        """Take in the (lo, hi) of one sample."""
        if self._now is None:
            self._first = self._now = sample
        else:
            self._now = self.ratio * self._now + (1 - self.ratio) * sample
        self._samples += 1
