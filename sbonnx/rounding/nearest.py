"""Round to nearest, ties to even, as QuantizeLinear does."""

from __future__ import annotations

from typing import final

import numpy as np

from sbonnx.moments import Moments
from sbonnx.rounding.base import Grid, Rounder
from sbonnx.spec import Array, QParams


@final
class Nearest(Rounder):
    """Rounds each weight to the nearest code."""

    needs_moments = False

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """Round every weight to the nearest code; see `Rounder.solve`."""
        return np.clip(np.rint(grid.ratio()), grid.qmin, grid.qmax), qparams
