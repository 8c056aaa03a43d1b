"""A moving average of the parameters, which lies nearer to the minimum than the last step does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn


@final
class Average:
    """Mean of the parameters of a module over its steps, newer ones counting more; buffers as they are at the end.

        average <- decay * average + (1 - decay) * parameter,   divided by 1 - decay^t when it is read

    Args:
        module: whose parameters.
        decay: below 1.

    Source: Polyak & Juditsky 1992; the division as in Adam (Kingma & Ba 2015, section 3).
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay, self._steps = decay, 0
        self._sums = {name: torch.zeros_like(value) for name, value in _learned(module).items()}

    def add(self, module: nn.Module) -> None:
        """One step was made."""
        self._steps += 1
        for name, value in _learned(module).items():
            self._sums[name].lerp_(value.detach(), 1.0 - self._decay)

    def load_into(self, module: nn.Module) -> None:
        """The averages become the parameters of `module`; nothing where no step was made."""
        with torch.no_grad():
            for name, value in _learned(module).items() if self._steps else ():
                value.copy_(self._sums[name] / (1.0 - self._decay**self._steps))

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"steps": self._steps, "sums": self._sums}

    def restore(self, state: Mapping[str, object]) -> None:
        """From a checkpoint."""
        steps, sums = state["steps"], state["sums"]
        assert isinstance(steps, int) and isinstance(sums, dict)
        self._steps = steps
        for name, value in sums.items():
            self._sums[name].copy_(value)


def _learned(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.named_parameters() if value.requires_grad}
