"""How a network is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

Optimizer = Literal["adam", "sgd"]

MOMENTUM: Final = 0.9
"""Of "sgd", with Nesterov's step."""


@dataclass(frozen=True)
class Settings:
    """How `train` goes about it.

    Attributes:
        epochs: times that all samples are seen.
        batch: samples a step.
        optimizer: "adam" (without weight decay it is Adam, with it AdamW) or "sgd" (momentum 0.9, Nesterov).
        lr: learning rate of weights, biases and norms at its highest. With "adam" it is by how much, at most about, a
            step changes what a layer gives: a weight moves by ``lr * mean|w| / sqrt(inputs of an output)``, for the
            steps of all inputs of an output may well go the same way, and Adam's know nothing of how small weights
            are. Biases and norms move by ``0.1 * lr * mean|b|``.
        quant_lr: that of scales, zero points and clips, in parts of their mean magnitude.
        warmup: share of the steps in which the learning rate rises to its highest; then it falls by half a cosine.
        last_lr: share of the highest that is left at the end.
        weight_decay: of weights of two axes and more; biases, norms, scales and zero points have none.
        inner_weight: of the mean relative squared error of inner tensors, beside the loss of the outputs, where there
            are such tensors; 0: the outputs alone.
        freeze_norms: share of the steps after which batch norms keep the statistics that they have.
        ema: decay of the moving average of all parameters that is what training gives; 0: the last parameters.
        clip: norm to which gradients are cut; 0: they are not.
        seed: of the order of samples.
        check_every: steps between two checkpoints, where there is a file for them; the end of an epoch is one too.

    Raises:
        ValueError: a number that makes no sense, named.
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
        """What learning rates are multiplied with at `step` (from 0) of `steps`."""
        rising = round(self.warmup * steps)
        if step < rising:
            return (step + 1) / (rising + 1)
        way = (step - rising) / max(steps - rising, 1)
        return self.last_lr + (1.0 - self.last_lr) * (1.0 + math.cos(math.pi * way)) / 2.0
