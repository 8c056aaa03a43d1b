"""The range that is best for a normal or a Laplace distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final, Literal, final, get_args

import numpy as np

from sbonnx.calib.observers.base import Solver, Target, mean_of
from sbonnx.calib.sketches import Distribution
from sbonnx.spec import Array

Shape = Literal["gaus", "laplace"]

TWO_SIDED: Final[dict[str, tuple[float, ...]]] = {
    "gaus": (1.71, 2.15, 2.55, 2.93, 3.28, 3.61, 3.92),
    "laplace": (2.83, 3.89, 5.03, 6.2, 7.41, 8.64, 9.89),
}
"""Best clip at 2 to 8 bits, in units of sigma and of beta: the ancestor's tables."""

ONE_SIDED: Final[dict[str, tuple[float, ...]]] = {
    "gaus": (2.15, 2.55, 2.93, 3.28, 3.61, 3.92, 4.2),
    "laplace": (3.89, 5.02, 6.2, 7.41, 8.64, 9.89, 11.16),
}
"""The same where values are not negative and all codes lie on their side: about those of one bit more."""

SIGMA_OF_RANGE: Final = 0.35 * (1 + math.sqrt(math.pi * math.log(4)))
"""sigma sqrt(2 ln N) of a normal distribution, in units of half the range of N values: the paper's estimate."""


@final
@dataclass(frozen=True)
class Aciq(Solver):
    """Clips where the expected error of rounding and of clipping is least, if values follow the distribution.

        gaus:     clip = a sigma,  sigma = (hi - lo) / 2 * 0.35 (1 + sqrt(pi ln 4)) / sqrt(2 ln N),  N values
        laplace:  clip = a beta,   beta = mean |x - mean x|

    a by bits from a table, past 8 bits from `best_clip`. The range is [mean - clip, mean + clip] within the data.
    Data without negatives are taken for the upper half of a distribution about 0: sigma takes hi for half the range,
    beta is the mean of the values above 0, and the range goes up to clip (to mean + clip of the two-sided formula
    where that is further, so that values far from 0 are not cut off); a is that for codes on one side where the range
    is affine.

    Under the rule "sparsebit", as in the ancestor: ranges about 0, not limited to the data; N is the values of the
    whole tensor in a sample; one-sided (affine only) sigma from half of hi, beta about the mean, zeros included.

    Error bound: gaus is exact but for the mean. Means are taken over the middles of bins: the mean is off by no more
    than half the mean width of the bins (nothing where the sketch is exact; below a 256th of mean |x|, per channel a
    64th), beta by no more than the mean width; one-sided beta by a 256th (64th) of itself. Ends are off by no more
    than the mean, plus a times what beta is.

    Args:
        distribution: "gaus" or "laplace".

    Source: R. Banner, Y. Nahshan, D. Soudry, "Post training 4-bit quantization of convolutional networks for
    rapid-deployment", NeurIPS 2019, section 2; the ancestor's `aciq` observer.
    """

    for_floats: ClassVar[bool] = False
    distribution: Shape = "gaus"

    def __post_init__(self) -> None:
        if self.distribution not in get_args(Shape):
            raise ValueError(f"distribution must be one of {', '.join(get_args(Shape))}, got {self.distribution!r}")

    def solve(self, distribution: Distribution, target: Target) -> tuple[Array, Array]:
        """See `Solver.solve`."""
        return self._ancestors(distribution, target) if target.rule == "sparsebit" else self._ours(distribution, target)

    def _ours(self, distribution: Distribution, target: Target) -> tuple[Array, Array]:
        """(lo, hi) under the rule "exact"."""
        lo, hi, total = distribution.lo, distribution.hi, distribution.total
        bits, name = target.spec.bits, self.distribution
        mean = mean_of(distribution, lambda x: x)
        about = mean[:, None]
        if name == "gaus":
            spread, upper = _sigma((hi - lo) / 2, total), _sigma(hi, total)
        else:
            spread = mean_of(distribution, lambda x: np.abs(x - about))
            upper = mean / _share_above_zero(distribution)
        clip = spread * factor(name, bits)
        half = upper * factor(name, bits, one_sided=not target.spec.symmetric)
        top = np.where(lo >= 0, np.maximum(half, mean + clip), mean + clip)
        return np.where(lo >= 0, lo, np.maximum(lo, mean - clip)), np.minimum(hi, top)

    def _ancestors(self, distribution: Distribution, target: Target) -> tuple[Array, Array]:
        """(lo, hi) under the rule "sparsebit"."""
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
    """sigma of a normal distribution of which `values` values have a range, float64 (C,)."""
    return np.asarray(half_range * SIGMA_OF_RANGE / np.sqrt(2 * np.log(np.maximum(values, 2))))


def _share_above_zero(distribution: Distribution) -> Array:
    """Share of the values that are above 0, float64 (C,); 1 where none is."""
    share = mean_of(distribution, lambda x: x > 0)
    return np.where(share > 0, share, 1.0)


def factor(distribution: str, bits: int, one_sided: bool = False) -> float:
    """The best clip in units of sigma or beta: from the ancestor's table, past 8 bits from `best_clip`."""
    table = (ONE_SIDED if one_sided else TWO_SIDED)[distribution]
    if bits - 2 < len(table):
        return table[bits - 2]
    return best_clip(distribution, bits + int(one_sided))


@lru_cache(maxsize=64)
def best_clip(distribution: str, bits: int) -> float:
    """The clip a at which the expected error is least, in units of sigma or beta.

        gaus:     E(a) = (1 + a^2) erfc(a / sqrt 2) - a sqrt(2 / pi) exp(-a^2 / 2) + a^2 / (3 4^bits)
        laplace:  E(a) = 2 exp(-a) + a^2 / (3 4^bits)

    Half the derivative rises through 0 once; it is halved down to by bisection. One-sided, 2^bits codes for half of
    the distribution: the same equation with one bit more.

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
