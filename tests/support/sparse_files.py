"""Zeros of the weights in a written file, read with onnx alone: groups along input channels at one kernel tap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from sbonnx.spec import Array


def stored_weights(path: Path | str | onnx.ModelProto) -> dict[str, tuple[onnx.NodeProto, Array]]:
    """Weights by node name, as floats in the file layout: floats, or (code - zero point) * scale."""
    proto = path if isinstance(path, onnx.ModelProto) else onnx.load(path)
    values = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    makers = {name: node for node in proto.graph.node for name in node.output}
    found = {}
    for node in proto.graph.node:
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            continue
        name = node.input[1]
        if name in values:
            found[node.name] = (node, values[name].astype(np.float64))
        elif name in makers and makers[name].op_type == "DequantizeLinear":
            pair = makers[name]
            codes, scale = values[pair.input[0]].astype(np.float64), values[pair.input[1]].astype(np.float64)
            zero = values[pair.input[2]].astype(np.float64) if len(pair.input) > 2 else np.zeros_like(scale)
            axis = next((one.i for one in pair.attribute if one.name == "axis"), 1)
            sides = [1] * codes.ndim
            if scale.size > 1:
                sides[axis] = -1
            found[node.name] = (node, (codes - zero.reshape(sides)) * scale.reshape(sides))
    return found


def most_in_a_group(node: onnx.NodeProto, weight: Array, size: int) -> int:
    """The largest number of values that are not zero among `size` input channels in a row, at one output and tap."""
    transposed = any(one.name == "transB" and one.i for one in node.attribute)
    if node.op_type != "Conv":  # (inputs, outputs), or (outputs, inputs)
        weight = weight if transposed else weight.T
    counts = [(weight[:, first : first + size] != 0).sum(axis=1).max() for first in range(0, weight.shape[1], size)]
    return int(max(counts))
