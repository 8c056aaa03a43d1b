"""Training settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

Optimizer = Literal["adam", "sgd"]

MOMENTUM: Final = 0.9
"""Nesterov momentum of "sgd"."""


@dataclass(frozen=True)
class Settings:
    """Settings of `train`.

    Attributes:
        epochs: number of passes over all samples.
        batch: samples per step.
        optimizer: "adam" (Adam, or AdamW with weight decay) or "sgd" (momentum 0.9, Nesterov).
        lr: peak learning rate of weights, biases and norms. With "adam" it is roughly the largest relative change of a
            layer's output in one step: a weight moves by ``lr * mean|w| / sqrt(inputs of an output)``, because the
            steps of all inputs of an output may have the same direction, and Adam's step size does not depend on the
            magnitude of the weights. Biases and norms move by ``0.1 * lr * mean|b|``.
        quant_lr: learning rate of scales, zero points and clipping levels, relative to their mean magnitude.
        warmup: fraction of the steps with linear warmup to the peak learning rate; cosine decay follows.
        last_lr: final learning rate, as a fraction of the peak.
        weight_decay: weight decay of weights with two or more axes; biases, norms, scales and zero points have none.
        inner_weight: weight of the mean relative squared error of inner tensors, if there are any, in the loss; 0: only
            the loss of the outputs.
        freeze_norms: fraction of the steps after which the statistics of batch norms are frozen.
        ema: decay of the exponential moving average (EMA) of all parameters, which replaces them at the end; 0: no EMA.
        clip: maximum norm for gradient clipping; 0: no clipping.
        seed: seed of the order of samples and of augmentations.
        check_every: steps between two checkpoints, if a file is given; there is also one at the end of each epoch.

    Raises:
        ValueError: an invalid value; the message names the setting.
    """

    epochs: int = 40
    batch: int = 32
    optimizer: Optimizer = "adam"
    lr: float = 0.15
    quant_lr: float = 5e-3
    warmup: float = 0.1
    last_lr: float = 0.0
    weight_decay: float = 0.0
    inner_weight: float = 0.3
    freeze_norms: float = 0.5
    ema: float = 0.0
    clip: float = 0.0
    seed: int = 0
    check_every: int = 200

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "check_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("lr", "quant_lr", "weight_decay", "inner_weight", "clip"):
            if not getattr(self, name) >= 0 or math.isinf(getattr(self, name)):
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("warmup", "last_lr", "freeze_norms"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be within 0 and 1, got {getattr(self, name)}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must be within 0 and 1, and below 1, got {self.ema}")
        if self.optimizer not in ("adam", "sgd"):
            raise ValueError(f"optimizer must be adam or sgd, got {self.optimizer}")

    def pace(self, step: int, steps: int) -> float:
        """Compute the factor of the learning rates at `step` (from 0) of `steps`."""
        rising = round(self.warmup * steps)
        if step < rising:
            return (step + 1) / (rising + 1)
        way = (step - rising) / max(steps - rising, 1)
        return self.last_lr + (1.0 - self.last_lr) * (1.0 + math.cos(math.pi * way)) / 2.0
