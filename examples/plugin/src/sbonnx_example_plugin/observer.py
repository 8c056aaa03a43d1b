"""An observer: the range without the rarest values at each end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from sbonnx.calib.observers import Observer, Percentile
from sbonnx.calib.observers.base import Needs
from sbonnx.calib.sketches import Sketch
from sbonnx.spec import Bounds, QuantSpec, ScaleRule


@final
@dataclass(frozen=True)
class Trimmed(Observer):
    """Percentile at a fixed share.

    Attributes:
        share: of the values that are left out at each end.
    """

    share: float = 0.005
    needs: ClassVar[Needs] = "histogram"

    def bounds(self, sketch: Sketch, spec: QuantSpec, rule: ScaleRule = "exact") -> Bounds:
        """Compute the range; see `Observer.bounds`."""
        return Percentile(self.share).bounds(sketch, spec, rule)
