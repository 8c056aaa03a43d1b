"""Moving-average observer: the range of a typical sample, with more weight on recent ones."""

from __future__ import annotations

from typing import ClassVar, final

import numpy as np

from sbonnx.calib.observers.base import Needs, Observer
from sbonnx.calib.sketches import Sketch
from sbonnx.recipe.sections.quantizers import MovingAverageKeys
from sbonnx.spec import Bounds, QuantSpec, ScaleRule


@final
class MovingAverage(MovingAverageKeys, Observer):
    """Exponential moving average (EMA) of each sample's min and of its max.

        m_1 = x_1,    m_i = ema_ratio * m_(i-1) + (1 - ema_ratio) * x_i

    A sample is one slice of the leading axis; one without a finite value is left out. Samples are taken in the order of
    the data, however they were batched, sharded and merged, and averaged in float64.

    Error bound: exact; only the sum is rounded, at the 16th digit.

    Source: the ancestor's `moving_average` observer.
    """

    needs: ClassVar[Needs] = "track"
    for_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.ema_ratio < 1.0:
            raise ValueError(f"ema_ratio must be at least 0 and below 1, got {self.ema_ratio}")

    def bounds(self, sketch: Sketch, spec: QuantSpec, rule: ScaleRule = "exact") -> Bounds:
        samples = np.stack(sketch.track()).astype(np.float64)  # (2, S) or (2, S, C): lo and hi
        if not samples.shape[1]:
            none = np.zeros_like(sketch.lo)
            return Bounds(none, none)
        now = samples[:, 0]
        for index in range(1, samples.shape[1]):
            now = self.ema_ratio * now + (1 - self.ema_ratio) * samples[:, index]
        lo, hi = now.astype(np.float32)
        return Bounds(np.asarray(lo), np.asarray(hi))
