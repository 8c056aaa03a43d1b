"""A rounding: to nearest, halves upwards."""

from __future__ import annotations

from typing import final

import numpy as np

from sbonnx.moments import Moments
from sbonnx.rounding import Grid, Rounder
from sbonnx.spec import Array, QParams


@final
class HalfUp(Rounder):
    """Round to nearest; a value between two codes becomes the higher one."""

    needs_moments = False

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """Round every weight; see `Rounder.solve`."""
        return np.clip(np.floor(grid.ratio() + 0.5), grid.qmin, grid.qmax), qparams
