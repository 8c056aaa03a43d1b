"""ACIQ observer: the optimal range for a normal or a Laplace distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar, Final, final

import numpy as np

from sbonnx.calib.observers.base import ObserverTarget, Solver, mean_of
from sbonnx.calib.sketches import Distribution
from sbonnx.recipe.sections.quantizers import AciqKeys
from sbonnx.spec import Array

TWO_SIDED: Final[dict[str, tuple[float, ...]]] = {
    "gaus": (1.71, 2.15, 2.55, 2.93, 3.28, 3.61, 3.92),
    "laplace": (2.83, 3.89, 5.03, 6.2, 7.41, 8.64, 9.89),
}
"""Optimal clip at 2 to 8 bits, in units of sigma and of beta: the ancestor's tables."""

ONE_SIDED: Final[dict[str, tuple[float, ...]]] = {
    "gaus": (2.15, 2.55, 2.93, 3.28, 3.61, 3.92, 4.2),
    "laplace": (3.89, 5.02, 6.2, 7.41, 8.64, 9.89, 11.16),
}
"""Optimal clip for non-negative values that use all integers on one side: close to the clip for one bit more."""

SIGMA_OF_RANGE: Final = 0.35 * (1 + math.sqrt(math.pi * math.log(4)))
"""sigma sqrt(2 ln N) of a normal distribution, in units of half the range of N values: the paper's estimate."""


@final
class Aciq(AciqKeys, Solver):
    """Clips where the expected sum of rounding and clipping error is least, if the values follow the distribution.

        gaus:     clip = a sigma,  sigma = (hi - lo) / 2 * 0.35 (1 + sqrt(pi ln 4)) / sqrt(2 ln N),  N values
        laplace:  clip = a beta,   beta = mean |x - mean x|

    The factor a comes from a table by bits, above 8 bits from `best_clip`. The range is [mean - clip, mean + clip],
    limited to the data. Non-negative data are treated as the upper half of a distribution about 0: sigma uses hi as
    half the range, beta is the mean of the values above 0, and the range ends at clip (at mean + clip of the two-sided
    formula if that is larger, so that values far from 0 are not clipped). For these, a is the one-sided factor if the
    range is affine.

    Under the rule "sparsebit", as in the ancestor: ranges about 0, not limited to the data; N is the number of values
    of the whole tensor in a sample; one-sided (affine only) sigma from half of hi, beta about the mean, zeros included.

    Error bound: gaus is exact except for the mean. Means are taken over the centres of bins: the error of the mean is
    at most half the mean width of the bins (0 if the sketch is exact; below a 256th of mean |x|, per channel a 64th),
    that of beta at most the mean width; that of one-sided beta at most a 256th (64th) of itself. The error of an end is
    at most that of the mean plus a times that of beta.

    Source: R. Banner, Y. Nahshan, D. Soudry, "Post training 4-bit quantization of convolutional networks for
    rapid-deployment", NeurIPS 2019, section 2; the ancestor's `aciq` observer.
    """

    for_floats: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.distribution not in TWO_SIDED:
            raise ValueError(f"distribution must be one of {', '.join(TWO_SIDED)}, got {self.distribution!r}")

    def solve(self, distribution: Distribution, target: ObserverTarget) -> tuple[Array, Array]:
        return self._ancestors(distribution, target) if target.rule == "sparsebit" else self._ours(distribution, target)

    def _ours(self, distribution: Distribution, target: ObserverTarget) -> tuple[Array, Array]:
        """Compute (lo, hi) under the rule "exact"."""
        lo, hi, total = distribution.lo, distribution.hi, distribution.total
        bits, name = target.spec.bits, self.distribution
        mean = mean_of(distribution, lambda x: x)
        about = mean[:, None]
        if name == "gaus":
            spread, upper = _sigma((hi - lo) / 2, total), _sigma(hi, total)
        else:
            spread = mean_of(distribution, lambda x: np.abs(x - about))
            above = mean_of(distribution, lambda x: x > 0)  # share of the values
            upper = mean / np.where(above > 0, above, 1.0)
        clip = spread * factor(name, bits)
        half = upper * factor(name, bits, one_sided=not target.spec.symmetric)
        top = np.where(lo >= 0, np.maximum(half, mean + clip), mean + clip)
        return np.where(lo >= 0, lo, np.maximum(lo, mean - clip)), np.minimum(hi, top)

    def _ancestors(self, distribution: Distribution, target: ObserverTarget) -> tuple[Array, Array]:
        """Compute (lo, hi) under the rule "sparsebit"."""
        lo, hi, bits = distribution.lo, distribution.hi, target.spec.bits
        half = (lo >= 0) & (not target.spec.symmetric)
        if self.distribution == "gaus":
            spread = _sigma((hi - lo) / 2, np.full(len(lo), target.sample_size))
        else:
            mean = mean_of(distribution, lambda x: x)[:, None]
            spread = mean_of(distribution, lambda x: np.abs(x - mean))
        clip = spread * np.where(half, factor(self.distribution, bits, True), factor(self.distribution, bits))
        return np.where(half, 0.0, -clip), clip


def _sigma(half_range: Array, values: Array) -> Array:
    """Estimate sigma of a normal distribution from the range of `values` values, float64 (C,)."""
    return np.asarray(half_range * SIGMA_OF_RANGE / np.sqrt(2 * np.log(np.maximum(values, 2))))


def factor(distribution: str, bits: int, one_sided: bool = False) -> float:
    """Return the optimal clip in units of sigma or beta: from the ancestor's table, above 8 bits from `best_clip`."""
    table = (ONE_SIDED if one_sided else TWO_SIDED)[distribution]
    if bits - 2 < len(table):
        return table[bits - 2]
    return best_clip(distribution, bits + int(one_sided))


@lru_cache(maxsize=64)
def best_clip(distribution: str, bits: int) -> float:
    """Compute the clip a with the least expected error, in units of sigma or beta.

        gaus:     E(a) = (1 + a^2) erfc(a / sqrt 2) - a sqrt(2 / pi) exp(-a^2 / 2) + a^2 / (3 4^bits)
        laplace:  E(a) = 2 exp(-a) + a^2 / (3 4^bits)

    Half the derivative crosses 0 once, from below; the root is found by bisection. One-sided, 2^bits integers represent
    half of the distribution: the same equation with one bit more.

    Source: Banner et al. 2019, equations 4 to 6.
    """
    noise = 1 / (3 * 4.0**bits)

    def gaus(a: float) -> float:
        return a * math.erfc(a / math.sqrt(2)) - math.sqrt(2 / math.pi) * math.exp(-a * a / 2) + a * noise

    def laplace(a: float) -> float:
        return a * noise - math.exp(-a)

    slope: Callable[[float], float] = gaus if distribution == "gaus" else laplace
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return low
