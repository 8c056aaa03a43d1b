"""A moving average of the parameters, which lies nearer to the minimum than the last step does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn


@final
class Average:
    """Mean of the parameters of a module over its steps, newer ones counting more; buffers as they are at the end.

        average <- average + (1 - decay) / (1 - decay^t) * (parameter - average)   at step t

    which is the average with decay, divided by what its weights add up to; a parameter that stays where it is, is its
    own average bit for bit.

    Args:
        module: whose parameters.
        decay: below 1.

    Source: Polyak & Juditsky 1992; the division as in Adam (Kingma & Ba 2015, section 3).
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay, self._steps = decay, 0
        self._means = {name: torch.zeros_like(value) for name, value in _learned(module).items()}

    def add(self, module: nn.Module) -> None:
        """One step was made."""
        self._steps += 1
        weight = (1.0 - self._decay) / (1.0 - self._decay**self._steps)
        for name, value in _learned(module).items():
            self._means[name].lerp_(value.detach(), weight)

    def load_into(self, module: nn.Module) -> None:
        """The averages become the parameters of `module`; nothing where no step was made."""
        with torch.no_grad():
            for name, value in _learned(module).items() if self._steps else ():
                value.copy_(self._means[name])

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"steps": self._steps, "means": self._means}

    def restore(self, state: Mapping[str, object]) -> None:
        """From a checkpoint."""
        steps, means = state["steps"], state["means"]
        assert isinstance(steps, int) and isinstance(means, dict)
        self._steps = steps
        for name, value in means.items():
            self._means[name].copy_(value)


def _learned(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.named_parameters() if value.requires_grad}
