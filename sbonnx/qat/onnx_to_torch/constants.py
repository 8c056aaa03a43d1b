"""Conversion of graph constants to parameters, buffers or Python numbers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from sbonnx.errors import ModelError
from sbonnx.graph import Node, Tensor
from sbonnx.graph.query import readers
from sbonnx.ops import TAKES_NUMBERS
from sbonnx.qat.onnx_to_torch.shape_arith import LONGEST
from sbonnx.spec import Array
from sbonnx.torchnet import Unfit, as_tensor

VALUES: Final = {"Resize": (1, 2), "OneHot": (2,), "QuantizeLinear": (1,), "DequantizeLinear": (1,), "Where": (1, 2)}
"""Inputs that are never weights, regardless of their size."""

MASKED: Final = 1e30
"""Constants of this magnitude or larger are masks and are not trained."""


def plain(value: Any) -> Any:
    """Return an attribute that can be copied and pickled; arrays are copied."""
    return np.array(value) if isinstance(value, np.ndarray) else value


def is_short(values: Array) -> bool:
    """Return whether the values can become Python numbers: a scalar or a short vector."""
    return values.ndim <= 1 and values.size <= LONGEST and values.dtype.kind in "iufb"


def as_numbers(values: Array) -> Any:
    """Return a scalar as a number and a vector as a tuple of numbers."""
    return tuple(values.tolist()) if values.ndim else values.item()


def made_of(name: str, values: Array, reader: Node | None) -> torch.Tensor:
    """Convert a constant to a tensor.

    Raises:
        ModelError: torch does not have the type.
    """
    try:
        made: torch.Tensor = as_tensor(torch, np.asarray(values), "cpu")
    except Unfit as error:
        by = f", which node '{reader.name}' ({reader.op}) reads" if reader is not None else ""
        raise ModelError(f"'{name}'{by}: {error}") from error
    return made


def is_weight(tensor: Tensor, values: Array) -> bool:
    """Return whether a constant becomes a trainable parameter; see `reimport.reimport`."""
    if not (values.dtype.kind == "f" or values.dtype.name == "bfloat16") or values.ndim == 0 or not values.size:
        return False
    uses = readers(tensor)
    if values.size == 1 and all(node.op in TAKES_NUMBERS for node, _ in uses):
        return False
    if all(index in VALUES.get(node.op, ()) for node, index in uses):
        return False
    return bool(np.abs(np.asarray(values, np.float32)).max() < MASKED)
