"""Values of a trained module, written back into constants of the graph that it was converted from."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph
from sbonnx.graph.query import constant, tensors_by_name
from sbonnx.spec import Array
from sbonnx.torchnet.onnx_to_torch.reimport import META


def write_parameters(graph: Graph, module: fx.GraphModule) -> None:
    """Set the initializers of a graph to the parameters of its module, in place. Equal values are left alone.

    Args:
        graph: the graph that `reimport` converted, or a copy.
        module: result of `reimport`, trained; parameters that were added to it later are ignored.
    """
    tensors, state = tensors_by_name(graph), module.state_dict()
    for parameter, initializer in module.meta[META]["parameters"].items():
        tensor = tensors.get(initializer)
        if parameter in state and isinstance(tensor, Constant):
            values = state[parameter].detach().float().cpu().numpy()
            if differ(np.asarray(constant(tensor)), values):
                set_values(tensor, values)


def set_values(tensor: Any, values: Array) -> None:
    """Set the values of a constant in place; its dtype and shape are kept."""
    if not isinstance(tensor, Constant):
        raise ModelError(f"'{getattr(tensor, 'name', tensor)}' is not a constant of the graph: it has no values to set")
    stored = np.asarray(constant(tensor))
    tensor.values = np.asarray(values, stored.dtype).reshape(stored.shape)


def differ(known: Array, values: Array) -> bool:
    """Return whether shapes or float32 values differ."""
    return known.shape != values.shape or not np.array_equal(known.astype(np.float32), values)
