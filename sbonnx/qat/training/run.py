"""Forward pass of a trainable network on a feed by input name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from sbonnx.errors import DataError
from sbonnx.qat.module import origin_of


def run_module(module: nn.Module, feeds: Any, *, gradients: bool) -> dict[str, torch.Tensor]:
    """Run the module and return its outputs by name, on its device.

    Args:
        module: result of `sbonnx.qat.prepare` or `QuantModel.init_QAT`.
        feeds: tensors or arrays by input name, or the only input.
        gradients: record the graph for the backward pass.

    Raises:
        DataError: an input is missing or unknown.
    """
    origin = origin_of(module)
    names = list(origin.inputs)
    values = dict(feeds) if isinstance(feeds, Mapping) else {names[0]: feeds}
    missing = [name for name in names if name not in values] if isinstance(feeds, Mapping) else names[1:]
    unknown = [name for name in values if name not in names and name not in (origin.settled.get("fixed") or {})]
    if missing or unknown:
        raise DataError(f"the inputs of the network are {', '.join(names)}: missing {missing}, unknown {unknown}")
    place = getattr(next(module.parameters(), None), "device", "cpu")
    given = {
        name: (value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))).to(place)
        for name, value in origin.feed(values).items()
    }
    with torch.set_grad_enabled(gradients and torch.is_grad_enabled()):
        found: dict[str, torch.Tensor] = module(**given)
    return found
