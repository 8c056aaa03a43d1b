"""What every rounding does."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sbonnx.spec import Array, QParams


class Rounder(ABC):
    """Weight codes from a weight and its scale. The same input gives the same codes."""

    @abstractmethod
    def round(self, weight: Array, qparams: QParams) -> Array:
        """Codes of `weight`, the same shape, dtype ``qparams.spec.dtype``, within [qmin, qmax].

        Args:
            weight: float32 or float16, any shape.
            qparams: scale and zero point, per tensor or along ``qparams.spec.axis``.
        """
