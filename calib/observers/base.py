"""What an observer is: a fixed-size summary of everything a tensor held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sbonnx.errors import NumericError
from sbonnx.spec import Array, Bounds

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Extremes:
    """Smallest and largest finite value of one array, and how many values were not finite.

    Attributes:
        lo, hi: float32, shape () or (C,); +inf and -inf where nothing finite was seen.
        nan, inf: number of NaN and of infinite values.
    """

    lo: Array
    hi: Array
    nan: int = 0
    inf: int = 0


def extremes(x: Array, axis: int | None = None) -> Extremes:
    """Extremes of `x` (any float type, any shape), over everything or per channel of `axis`.

    min and max propagate NaN and reach Inf, so an array without either is read only twice; the
    counting pass runs only where it is needed.
    """
    if x.dtype != np.float32:
        x = x.astype(np.float32)  # numpy reduces half precision ten times slower than single
    if axis is None and x.size:
        low, high = float(np.minimum.reduce(x, axis=None)), float(np.maximum.reduce(x, axis=None))
        if isfinite(low) and isfinite(high):  # called for every tensor of every sample: no arrays on this way
            return Extremes(np.asarray(low, np.float32), np.asarray(high, np.float32))
    over = None if axis is None else tuple(i for i in range(x.ndim) if i != axis)
    shape = () if axis is None else (x.shape[axis],)
    if x.size == 0:
        return Extremes(np.full(shape, np.inf, np.float32), np.full(shape, -np.inf, np.float32))
    lo, hi = np.asarray(x.min(axis=over)), np.asarray(x.max(axis=over))
    if np.isfinite(lo).all() and np.isfinite(hi).all():
        return Extremes(lo, hi)
    finite = np.isfinite(x)
    lo = np.asarray(np.min(x, axis=over, where=finite, initial=np.inf), np.float32)
    hi = np.asarray(np.max(x, axis=over, where=finite, initial=-np.inf), np.float32)
    return Extremes(lo, hi, nan=int(np.isnan(x).sum()), inf=int(np.isinf(x).sum()))


class Observer(ABC):
    """Sees a tensor batch by batch and says which range to represent. Its state does not grow with the data.

    Attributes:
        axis: channel axis of a range per channel, or None for one range.
        order_free: whether the bounds are the same bit for bit in any order of the data; where they
            are not, the walk feeds samples one by one in the order of the data set.
        for_weights: whether it makes sense on a constant.
        elements: how many values were seen, finite or not.
        nan, inf: how many of them were NaN and infinite; these are left out of the bounds.
    """

    order_free: ClassVar[bool] = True
    for_weights: ClassVar[bool] = True

    def __init__(self, *, axis: int | None = None) -> None:
        self.axis = axis
        self.elements = 0
        self.nan = 0
        self.inf = 0

    @property
    def finite(self) -> int:
        """Number of values that the bounds rest on."""
        return self.elements - self.nan - self.inf

    @abstractmethod
    def observe(self, x: Array) -> None:
        """Take in one array: float16, float32 or float64, any shape that has `axis`.

        Raises:
            NumericError: the channel axis is missing or has another length than before.
        """

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Take in what `other` saw, as if it had been seen here after everything so far. `other` is unchanged."""

    @abstractmethod
    def bounds(self) -> Bounds:
        """The range to represent, float32, shape () or (C,); (0, 0) where nothing finite was seen."""

    def _count(self, x: Array, seen: Extremes) -> None:
        """Add one array to the counts."""
        self.elements += x.size
        self.nan += seen.nan
        self.inf += seen.inf

    def _count_from(self, other: Observer) -> None:
        """Add another observer's counts; it must watch the same axis."""
        if type(other) is not type(self) or other.axis != self.axis:
            raise ValueError(f"cannot merge {type(other).__name__} on axis {other.axis} into {type(self).__name__}")
        self.elements += other.elements
        self.nan += other.nan
        self.inf += other.inf

    def _check_axis(self, x: Array, channels: int | None) -> None:
        """`x` has the channel axis, with the `channels` of the batches before (None: nothing seen yet)."""
        if self.axis is None:
            return
        if self.axis >= x.ndim:
            raise NumericError(f"a range per channel of axis {self.axis} needs that axis; the shape is {x.shape}")
        if channels is not None and x.shape[self.axis] != channels:
            raise NumericError(
                f"axis {self.axis} had {channels} channels and now has {x.shape[self.axis]}; "
                "an axis of changing length needs one range per tensor"
            )


def readable(lo: Array, hi: Array) -> Bounds:
    """Bounds of a running (lo, hi), with 0 where nothing finite was seen; a copy, safe to keep."""
    empty = lo > hi
    # `+ 0` turns -0.0 into 0.0: which of the two min() returns depends on the order of the data
    lo, hi = np.where(empty, 0, lo) + np.float32(0), np.where(empty, 0, hi) + np.float32(0)
    return Bounds(np.asarray(lo, np.float32), np.asarray(hi, np.float32))
