"""Round to nearest, ties to even: what QuantizeLinear does."""

from __future__ import annotations

from typing import final

from sbonnx.rounding.base import Rounder
from sbonnx.spec import Array, QParams


@final
class Nearest(Rounder):
    """Each weight to the nearest code."""

    def round(self, weight: Array, qparams: QParams) -> Array:
        """See `Rounder.round`."""
        return qparams.quantize(weight)
