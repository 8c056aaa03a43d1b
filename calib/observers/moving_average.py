"""Moving-average observer: the range of a typical sample, with more weight on recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from sbonnx.calib.observers.base import Needs, Observer
from sbonnx.calib.sketches import Sketch
from sbonnx.spec import Bounds, QuantSpec, ScaleRule


@final
@dataclass(frozen=True)
class MovingAverage(Observer):
    """Exponential moving average (EMA) of each sample's min and of its max.

        m_1 = x_1,    m_i = ratio * m_(i-1) + (1 - ratio) * x_i

    A sample is one slice of the leading axis; one without a finite value is left out. Samples are taken in the order of
    the data, however they were batched, sharded and merged, and averaged in float64.

    Error bound: exact; only the sum is rounded, at the 16th digit.

    Args:
        ratio: weight of the old value, within [0, 1).

    Source: the ancestor's `moving_average` observer (EMA_RATIO 0.9).
    """

    needs: ClassVar[Needs] = "track"
    for_weights: ClassVar[bool] = False

    ratio: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio < 1.0:
            raise ValueError(f"ratio must be at least 0 and below 1, got {self.ratio}")

    def bounds(self, sketch: Sketch, spec: QuantSpec, rule: ScaleRule = "exact") -> Bounds:
        samples = np.stack(sketch.track()).astype(np.float64)  # (2, S) or (2, S, C): lo and hi
        if not samples.shape[1]:
            none = np.zeros_like(sketch.lo)
            return Bounds(none, none)
        now = samples[:, 0]
        for index in range(1, samples.shape[1]):
            now = self.ratio * now + (1 - self.ratio) * samples[:, index]
        lo, hi = now.astype(np.float32)
        return Bounds(np.asarray(lo), np.asarray(hi))
