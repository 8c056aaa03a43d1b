"""Magnitude histograms of float tensors, used to decide whether half precision can hold the values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np

from sbonnx.metrics import ratio_db
from sbonnx.spec import Array

LOWEST: Final = -149
"""Octave of the smallest positive float32 number; octave e holds the magnitudes in [2^e, 2^(e+1))."""

OCTAVES: Final = 128 - LOWEST

MIDDLE: Final = 1.5
"""Representative value of an octave, relative to its lower end."""


def _none() -> Array:
    return np.zeros(OCTAVES, np.int64)


@dataclass(frozen=True)
class FloatKind:
    """A float type narrower than float32.

    Attributes:
        name: name in recipes.
        dtype: NumPy dtype of arrays.
        largest: largest finite number.
        normal: smallest normal number; below it, numbers are spaced by `least`.
        mantissa: explicit mantissa bits, without the leading one.
    """

    name: str
    dtype: np.dtype[Any]
    largest: float
    normal: float
    mantissa: int

    @property
    def least(self) -> float:
        """Smallest positive (subnormal) number."""
        return float(np.ldexp(self.normal, -self.mantissa))

    @property
    def worst_db(self) -> float:
        """Signal-to-noise ratio in dB of the normal number that rounds worst: relative error 2^-(mantissa + 1)."""
        return 20 * math.log10(2.0) * (self.mantissa + 1)

    @property
    def exact(self) -> int:
        """Largest integer up to which every integer is represented exactly."""
        return 1 << (self.mantissa + 1)


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """Magnitude statistics of one float tensor over all samples.

    Attributes:
        lo, hi: extremes of the finite values, float32 converted to Python floats; 0 if there were none.
        negative, positive: int64 (OCTAVES,), number of values per octave of their magnitude, from `LOWEST` up.
        zeros: number of values that are 0 or a float32 denormal.
        nan, inf: number of non-finite values; they are counted nowhere else.
        samples: number of samples.
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
        """Largest magnitude."""
        return max(abs(self.lo), abs(self.hi))

    @property
    def count(self) -> int:
        """Number of values, finite or not."""
        return int(self.negative.sum() + self.positive.sum()) + self.zeros + self.nan + self.inf

    @property
    def smallest(self) -> float:
        """Lower bound (within a factor of 2) of the smallest nonzero magnitude; inf if all values are 0."""
        used = np.flatnonzero(self.negative + self.positive)
        return float(np.ldexp(1.0, int(used[0]) + LOWEST)) if used.size else math.inf

    def between(self, low: float, high: float) -> int:
        """Count the values, of either sign, in the octaves within [low, high); both must be powers of 2."""
        first, last = (min(max(math.frexp(end)[1] - 1 - LOWEST, 0), OCTAVES) for end in (low, high))
        return int((self.negative + self.positive)[first:last].sum())

    def sqnr_db(self, kind: FloatKind) -> float:
        """Compute the signal-to-noise ratio in dB after rounding to `kind`; inf if all values are 0.

        A value in octave e has a root mean square rounding error of 2^(e - mantissa) / sqrt(12). Below the smallest
        normal number the error is the denormal spacing / sqrt(12), and a value below half the smallest number becomes
        0. Values above the largest number are left out: they overflow, which is reported separately.
        """
        counts = (self.negative + self.positive).astype(np.float64)
        octave = np.arange(OCTAVES) + LOWEST
        value = MIDDLE * np.ldexp(1.0, octave)
        step = np.maximum(np.ldexp(1.0, octave - kind.mantissa), kind.least)
        noise = np.where(value < kind.least / 2, value**2, step**2 / 12)
        fits = value <= kind.largest
        signal, error = float((counts * value**2)[fits].sum()), float((counts * noise)[fits].sum())
        return ratio_db(signal, error)


KINDS: Final[dict[str, FloatKind]] = {
    "fp16": FloatKind("fp16", np.dtype(np.float16), 65504.0, 2.0**-14, 10),
    "bf16": FloatKind("bf16", np.dtype(ml_dtypes.bfloat16), (2.0 - 2.0**-7) * 2.0**127, 2.0**-126, 7),
}
"""The narrower float types by their name in recipes; fp32 is the type they are narrower than."""
