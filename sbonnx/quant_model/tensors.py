"""Conversion between torch tensors and NumPy arrays. torch is imported only if the caller passes tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sbonnx.torchnet import torch_module


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor."""
    return hasattr(value, "detach") and hasattr(value, "cpu")


def as_arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the tensors of a mapping to NumPy arrays."""
    return {name: value.detach().cpu().numpy() if is_tensor(value) else value for name, value in values.items()}


def as_tensors(values: Mapping[str, Any]) -> Any:
    """Convert a mapping to torch tensors: a single tensor for one value, else a tuple."""
    torch = torch_module()
    made = tuple(
        value if is_tensor(value) else torch.from_numpy(np.ascontiguousarray(value)) for value in values.values()
    )
    return made[0] if len(made) == 1 else made
