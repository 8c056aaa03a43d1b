"""In-place Adam on numpy arrays, for rounding methods whose gradient is a matrix product."""

from __future__ import annotations

from typing import Final, final

import numpy as np

from sbonnx.spec import Array

DECAY: Final = 0.9
DECAY_SQUARE: Final = 0.999
TINY: Final = 1e-8
"""Hyperparameters of the paper, which are also torch's defaults."""


def factors(rate: float, steps: int) -> Array:
    """Return the bias-corrected step factors ``rate / (1 - 0.9^t)`` and ``1 / (1 - 0.999^t)``, t from 1, (steps, 2)."""
    t = np.arange(1.0, steps + 1.0)
    return np.stack([rate / (1.0 - DECAY**t), 1.0 / (1.0 - DECAY_SQUARE**t)], axis=1)


@final
class Adam:
    """Adam optimizer with per-element step sizes.

        m = 0.9 m + 0.1 g,   v = 0.999 v + 0.001 g^2,   x -= rate * (m / (1 - 0.9^t)) / (sqrt(v / (1 - 0.999^t)) + 1e-8)

    Source: Kingma & Ba 2015, "Adam: A Method for Stochastic Optimization", algorithm 1.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._mean = np.zeros(shape, np.float32)
        self._square = np.zeros(shape, np.float32)
        self._part = np.empty(shape, np.float32)
        self._steps = 0

    def step(self, values: Array, gradient: Array, rate: float) -> None:
        """Update `values`, float32, in place. `gradient`, float32 of the same shape, is overwritten."""
        self._steps += 1
        part = self._part
        np.subtract(gradient, self._mean, out=part)
        part *= 1.0 - DECAY
        self._mean += part
        np.multiply(gradient, gradient, out=gradient)
        gradient -= self._square
        gradient *= 1.0 - DECAY_SQUARE
        self._square += gradient
        np.multiply(self._square, 1.0 / (1.0 - DECAY_SQUARE**self._steps), out=part)
        np.sqrt(part, out=part)
        part += TINY
        np.divide(self._mean, part, out=part)
        part *= rate / (1.0 - DECAY**self._steps)
        values -= part
