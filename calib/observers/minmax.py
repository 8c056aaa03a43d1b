"""Min-max observer: the exact range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from sbonnx.calib.observers.base import Needs, Observer
from sbonnx.calib.sketches import Sketch
from sbonnx.spec import Bounds, QuantSpec, ScaleRule


@final
@dataclass(frozen=True)
class MinMax(Observer):
    """Smallest and largest finite value, per tensor or per channel.

        lo = min x,    hi = max x

    Error bound: none is needed, sketches keep minimum and maximum exactly.
    """

    needs: ClassVar[Needs] = "range"

    def bounds(self, sketch: Sketch, spec: QuantSpec, rule: ScaleRule = "exact") -> Bounds:
        return Bounds(sketch.lo, sketch.hi)
