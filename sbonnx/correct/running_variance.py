"""Streaming mean and variance of each channel of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sbonnx.spec import Array


@dataclass(frozen=True)
class RunningVariance:
    """Mean and variance of each channel. Size and merging cost do not depend on the number of values.

    Attributes:
        count: number of values of each channel.
        mean: float64 (C,).
        squares: sum of squared distances to the mean, float64 (C,).
    """

    count: int
    mean: Array
    squares: Array

    @staticmethod
    def of(x: Array, axis: int) -> RunningVariance:
        """Compute the statistics of one array with its channels along `axis`; sums in float64.

        Deviations are taken from the channel means of this array, which avoids cancellation.
        """
        if axis == 1 and x.ndim > 1:
            rows = x.reshape(x.shape[0], x.shape[1], math.prod(x.shape[2:]))
        else:
            rows = np.moveaxis(x, axis, 0).reshape(1, x.shape[axis], x.size // max(x.shape[axis], 1))
        count = rows.shape[0] * rows.shape[2]
        if not count:
            return RunningVariance(0, np.zeros(rows.shape[1]), np.zeros(rows.shape[1]))
        mean = rows.mean(axis=(0, 2), dtype=np.float64)
        away = rows - mean[:, None]  # float64
        return RunningVariance(count, mean, np.einsum("ncs,ncs->c", away, away))

    def merge(self, other: RunningVariance) -> RunningVariance:
        """Return the statistics over the values of both.

        Source: Chan, Golub, LeVeque, Algorithms for computing the sample variance, 1983, formula 2.1.
        """
        count = self.count + other.count
        if not count:
            return self
        away = other.mean - self.mean
        share = other.count / count
        return RunningVariance(
            count, self.mean + away * share, self.squares + other.squares + away**2 * (self.count * share)
        )

    @property
    def variance(self) -> Array:
        """Population variance, float64 (C,), as in batch normalization; 0 without values."""
        return self.squares / max(self.count, 1)


__all__ = ["RunningVariance"]
