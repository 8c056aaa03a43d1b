"""How large the values of a tensor were: what decides whether half precision can hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np

from sbonnx.spec import Array

LOWEST: Final = -149
"""Octave of the smallest number that float32 has; octave e holds the magnitudes from 2^e to below 2^(e+1)."""

OCTAVES: Final = 128 - LOWEST

MIDDLE: Final = 1.5
"""Where in its octave a value is taken to lie."""


def _none() -> Array:
    return np.zeros(OCTAVES, np.int64)


@dataclass(frozen=True)
class FloatKind:
    """A float type narrower than float32.

    Attributes:
        name: as written in recipes.
        dtype: of arrays.
        largest: the largest finite number.
        normal: the smallest normal number; below it numbers are `least` apart.
        mantissa: bits behind the leading one.
    """

    name: str
    dtype: np.dtype[Any]
    largest: float
    normal: float
    mantissa: int

    @property
    def least(self) -> float:
        """The smallest number above 0."""
        return float(np.ldexp(self.normal, -self.mantissa))

    @property
    def worst_db(self) -> float:
        """Signal to noise, decibel, of the normal number that rounds worst: it is off by 2^-(mantissa + 1)."""
        return 20 * math.log10(2.0) * (self.mantissa + 1)

    @property
    def exact(self) -> int:
        """Every whole number up to this one has its own."""
        return 1 << (self.mantissa + 1)


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """What was seen of one float tensor, over all samples.

    Attributes:
        lo, hi: extremes of the finite values, float32 rounded to Python's; 0 where there were none.
        negative, positive: int64 (OCTAVES,), values by octave of their magnitude, from `LOWEST` up.
        zeros: values that are 0, or that float32 can only hold as a denormal.
        nan, inf: values that were not finite; they are in nothing else.
        samples: how many samples were seen.
    """

    lo: float = 0.0
    hi: float = 0.0
    negative: Array = field(default_factory=_none, repr=False)
    positive: Array = field(default_factory=_none, repr=False)
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    samples: int = 0

    @property
    def peak(self) -> float:
        """The largest magnitude."""
        return max(abs(self.lo), abs(self.hi))

    @property
    def count(self) -> int:
        """Number of values, finite or not."""
        return int(self.negative.sum() + self.positive.sum()) + self.zeros + self.nan + self.inf

    @property
    def smallest(self) -> float:
        """A lower bound (within a factor of 2) of the smallest magnitude above 0; inf where all are 0."""
        used = np.flatnonzero(self.negative + self.positive)
        return float(np.ldexp(1.0, int(used[0]) + LOWEST)) if used.size else math.inf

    def between(self, low: float, high: float) -> int:
        """Values, of either sign, in the octaves that lie within [low, high), both powers of 2."""
        first, last = (min(max(math.frexp(end)[1] - 1 - LOWEST, 0), OCTAVES) for end in (low, high))
        return int((self.negative + self.positive)[first:last].sum())

    def sqnr_db(self, kind: FloatKind) -> float:
        """Signal to noise that rounding to `kind` leaves, decibel; inf where all values are 0.

        A value of octave e is rounded by 2^(e - mantissa) / sqrt(12) in the mean square, one below the smallest normal
        number by the distance of denormals / sqrt(12), and one below half the smallest number becomes 0. Values past
        the largest number are left out: they overflow, which is another matter.
        """
        counts = (self.negative + self.positive).astype(np.float64)
        octave = np.arange(OCTAVES) + LOWEST
        value = MIDDLE * np.ldexp(1.0, octave)
        step = np.maximum(np.ldexp(1.0, octave - kind.mantissa), kind.least)
        noise = np.where(value < kind.least / 2, value**2, step**2 / 12)
        fits = value <= kind.largest
        signal, error = float((counts * value**2)[fits].sum()), float((counts * noise)[fits].sum())
        return 10 * math.log10(signal / error) if signal > 0 and error > 0 else math.inf


KINDS: Final[dict[str, FloatKind]] = {
    "fp16": FloatKind("fp16", np.dtype(np.float16), 65504.0, 2.0**-14, 10),
    "bf16": FloatKind("bf16", np.dtype(ml_dtypes.bfloat16), (2.0 - 2.0**-7) * 2.0**127, 2.0**-126, 7),
}
"""By the name that recipes use; fp32 is what they are narrower than."""
