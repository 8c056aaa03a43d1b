"""Exponential moving average (EMA) of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn


@final
class Average:
    """Exponential moving average (EMA) of the trained parameters of a module. Buffers are not averaged.

        average <- average + (1 - decay) / (1 - decay^t) * (parameter - average)   at step t

    This is the EMA with bias correction, i.e. divided by the sum of its weights. The average of a parameter that does
    not change equals the parameter bit for bit.

    Args:
        module: module with the parameters.
        decay: decay of the average, below 1.

    Source: Polyak & Juditsky 1992; the division as in Adam (Kingma & Ba 2015, section 3).
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay, self._steps = decay, 0
        self._means = {name: torch.zeros_like(value) for name, value in _learned(module).items()}

    def add(self, module: nn.Module) -> None:
        """Update the average after a training step."""
        self._steps += 1
        weight = (1.0 - self._decay) / (1.0 - self._decay**self._steps)
        for name, value in _learned(module).items():
            self._means[name].lerp_(value.detach(), weight)

    def load_into(self, module: nn.Module) -> None:
        """Copy the averages into the parameters of `module`; a no-op before the first step."""
        with torch.no_grad():
            for name, value in _learned(module).items() if self._steps else ():
                value.copy_(self._means[name])

    def state(self) -> dict[str, object]:
        """Return the state for a checkpoint."""
        return {"steps": self._steps, "means": self._means}

    def restore(self, state: Mapping[str, object]) -> None:
        """Restore the state of a checkpoint."""
        steps, means = state["steps"], state["means"]
        assert isinstance(steps, int) and isinstance(means, dict)
        self._steps = steps
        for name, value in means.items():
            self._means[name].copy_(value)


def _learned(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.named_parameters() if value.requires_grad}
