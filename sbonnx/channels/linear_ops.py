"""Ids of the input and output channels of linear operators."""

from __future__ import annotations

import numpy as np

from sbonnx.channels.ids import FIXED, along
from sbonnx.channels.trace import Trace, is_float
from sbonnx.graph import Node, Tensor
from sbonnx.graph.query import constant, shape
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import CONVOLUTIONS, LINEAR
from sbonnx.report.codes import Reason
from sbonnx.spec import Array


def layer_of(trace: Trace, node: Node, *, shared: bool = False) -> LinearLayer | None:
    """Return the layer of a linear node whose constants can be changed.

    Otherwise the channels of its inputs are fixed and None is returned, except for a product of two activations, which
    passes the columns of its second factor.

    Args:
        shared: whether a weight can be changed that several nodes read.
    """
    weight = node.inputs[LINEAR[node.op].weight]
    why = _unsuitable(node, weight, shared=shared)
    if why is not None and node.op == "MatMul" and constant(weight) is None:
        _product(trace, node)
        return None
    layer = LinearLayer.of_shape(node.op, node.attrs, tuple(weight.shape)) if why is None else why
    if isinstance(layer, str):
        trace.refuse(node, layer)
        return None
    return layer


def input_ids(trace: Trace, node: Node, layer: LinearLayer) -> Array:
    """Return the ids of the input channels of a layer, int64 (in channels,); all fixed if they vary elsewhere."""
    x = node.inputs[0]
    ids = trace.known(x) if node.op not in CONVOLUTIONS else trace.full(x)
    if ids is not None:
        ids = ids.reshape((1,) * max(0, 2 - ids.ndim) + ids.shape)
    inputs = along(ids, layer.data_axis, layer.in_channels)
    if inputs is None:
        trace.keep(x, Reason("channels-on-several-axes", f"'{node.name}' reads channels along several axes"))
        inputs = np.full(layer.in_channels, FIXED, np.int64)
    return inputs


def give_outputs(trace: Trace, node: Node, layer: LinearLayer, outputs: Array) -> None:
    """Set the ids of the output of a layer, (out channels,)."""
    spatial = (1,) * (len(layer.shape) - 2) if node.op in CONVOLUTIONS else ()
    trace.give(node.outputs[0], outputs if node.op == "MatMul" else outputs.reshape(1, -1, *spatial))


def _unsuitable(node: Node, weight: Tensor, *, shared: bool) -> Reason | None:
    """Return why the constants of a linear node cannot be changed, or None."""
    if constant(weight) is None:
        return Reason("weight-computed", f"the weight of {node.op} '{node.name}' is computed")
    if len(weight.outputs) > 1 and not shared:
        return Reason(
            "weight-is-shared", f"weight '{weight.name}' of '{node.name}' is read {len(weight.outputs)} times"
        )
    if not is_float(weight):
        return Reason("weight-type", f"the weight of {node.op} '{node.name}' is not float16, float32 or float64")
    index = LINEAR[node.op].bias
    bias = None if index is None or index >= len(node.inputs) else node.inputs[index]
    if bias is not None and bias.name and constant(bias) is None:
        return Reason("bias-computed", f"the bias of {node.op} '{node.name}' is computed")
    return None


def _product(trace: Trace, node: Node) -> None:
    """Product of two activations, y = a b: columns of b are columns of y; a is fixed."""
    a, b = node.inputs
    ids = trace.known(b)
    trace.keep(a, Reason("summed-over", f"MatMul '{node.name}' sums over it"))
    if ids is None:
        return
    if len(shape(b) or ()) < 2:
        trace.refuse(node)
    elif ids.ndim >= 2 and ids.shape[-2] > 1:
        trace.keep(b, Reason("summed-over", f"MatMul '{node.name}' sums over it"))
    else:
        trace.give(node.outputs[0], ids)
