"""Activations whose bounds are the lowest and the highest code behind them: a QuantizeLinear saturates there itself."""

from __future__ import annotations

import numpy as np

from sbonnx.graph import Node, edit, query
from sbonnx.ops import RECTIFIED
from sbonnx.spec import Array


def has_no_effect(node: Node, quantize: Node) -> bool:
    """Return whether the codes of the bounds of a Relu or Clip are the lowest and the highest code."""
    scale, zero = (query.constant(tensor) for tensor in quantize.inputs[1:3])
    bounds = bounds_of(node)
    if scale is None or zero is None or bounds is None or scale.size != 1:
        return False
    limits = np.iinfo(zero.dtype)
    low, high = (np.rint(np.float32(end) / scale.reshape(())) + float(zero.reshape(())) for end in bounds)
    return bool(low <= limits.min and high >= limits.max)


def remove_rectifier(node: Node, quantize: Node) -> None:
    """Let a QuantizeLinear read the input of a Relu or Clip; its bounds are kept in an attribute, for `qdq.strip`."""
    edit.replace_input(quantize, 0, node.inputs[0])
    quantize.attrs[RECTIFIED] = [0.0] if node.op == "Relu" else [*(bounds_of(node) or ())]


def bounds_of(node: Node) -> tuple[float, float] | None:
    """Return the bounds of a Relu or Clip; None if they are computed."""
    if node.op == "Relu":
        return 0.0, np.inf
    ends: list[float] = []
    for index, (name, default) in enumerate((("min", -np.inf), ("max", np.inf)), start=1):
        given = query.optional_input(node, index)
        value: Array | None = (
            np.asarray(query.attribute(node, name, default)) if given is None else query.constant(given)
        )
        if value is None or value.size != 1:
            return None
        ends.append(float(value.reshape(())))
    return ends[0], ends[1]
