"""Observer that chooses the method with the least error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np

from sbonnx.calib.observers.aciq import Aciq
from sbonnx.calib.observers.base import ObserverTarget, Solver
from sbonnx.calib.observers.kl_histogram import KlHistogram
from sbonnx.calib.observers.mse import Mse, to_beat
from sbonnx.calib.observers.percentile import Percentile
from sbonnx.calib.observers.quantization_error import quantization_error
from sbonnx.calib.sketches import Distribution
from sbonnx.spec import Array

METHODS: Final[tuple[Solver, ...]] = (Percentile(), Mse(), KlHistogram(), Aciq("gaus"), Aciq("laplace"))
"""Methods tried in addition to the whole range; the first one wins ties."""


@final
@dataclass(frozen=True)
class Auto(Solver):
    """The range with the least `quantization_error` of minmax, percentile, mse, kl_histogram and both of aciq.

    Chosen separately for each range (tensor or channel); the first in that order wins ties. For fp8 only the methods
    that support it (the first three) are tried. As in `mse`, the whole range is replaced only if the gain is
    significant.

    Error bound: with w as in `Mse`, the root of the true error is at most 2 w above that of the whole range, and, if
    that was replaced, of any of the methods.
    """

    def solve(self, distribution: Distribution, target: ObserverTarget) -> tuple[Array, Array]:
        lo, hi = distribution.lo, distribution.hi
        whole = target.params(lo, hi)
        least = to_beat(distribution, whole, quantization_error(distribution, whole))
        for method in METHODS:
            if target.spec.is_float and not method.for_floats:
                continue
            low, high = method.solve(distribution, target)
            error = quantization_error(distribution, target.params(low, high))
            better = error < least
            lo, hi, least = np.where(better, low, lo), np.where(better, high, hi), np.where(better, error, least)
        return lo, hi
