"""State of a training run: exponential moving average (EMA) of the parameters, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from sbonnx.errors import DataError, OutputError
from sbonnx.graph.storage.output_files import replacing
from sbonnx.system.input_files import check_regular

KEYS: Final = frozenset({"identity", "module", "optimizer", "average", "steps", "losses", "sum", "chance"})
"""Keys of a training state."""


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
        return {"steps": self._steps, "means": self._means}

    def restore(self, state: Mapping[str, object]) -> None:
        steps, means = state["steps"], state["means"]
        assert isinstance(steps, int) and isinstance(means, dict)
        self._steps = steps
        for name, value in means.items():
            self._means[name].copy_(value)


def _learned(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state to a file, atomically.

    Raises:
        OutputError: the file cannot be written; an existing checkpoint is kept.
    """
    try:
        with replacing(path) as temporary:
            torch.save(dict(state), temporary)
    except RuntimeError as error:  # torch raises it if the disk is full
        raise OutputError(f"{path}: the checkpoint cannot be written: {str(error).splitlines()[0]}") from error


def read_checkpoint(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Read the state that was written to `path`.

    Args:
        path: checkpoint file.
        identity: identity of the run to resume, compared with the "identity" of the state.

    Raises:
        DataError: the file is not a checkpoint, or the identity differs; the message names the difference.
    """
    try:
        check_regular(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for a file that is not a checkpoint, torch raises exceptions of any type
        raise DataError(f"{path} is not a training checkpoint: delete it, or use another file") from error
    stored = state.get("identity") if isinstance(state, dict) else None
    if not isinstance(stored, Mapping) or not state.keys() >= KEYS:
        raise DataError(f"{path} is not a training checkpoint: delete it, or use another file")
    for key, wanted in identity.items():
        if stored.get(key) != wanted:
            raise DataError(
                f"{path} is a checkpoint of other {key}{_difference(stored.get(key), wanted)}: delete it to start a "
                "new run, or use another file"
            )
    checked: dict[str, Any] = state
    return checked


def _difference(known: object, wanted: object) -> str:
    if not isinstance(known, Mapping) or not isinstance(wanted, Mapping):
        return f" ({known}, not {wanted})"
    for name in dict.fromkeys([*wanted, *known]):
        if known.get(name) != wanted.get(name):
            return f" ({name}: {known.get(name)}, not {wanted.get(name)})"
    return ""
