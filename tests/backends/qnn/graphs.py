"""Small float models as ONNX text, with random weights, and feeds for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from sbonnx.spec import Array

SIZE = 4


def parsed(text: str, weights: dict[str, tuple[int, ...]], **constants: Any) -> onnx.ModelProto:
    """A model with weights of unit gain; nodes are named after their outputs."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')
    for name, shape in weights.items():
        fan_in = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
        values = rng.normal(0, 1 / np.sqrt(fan_in), shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def feeds_for(model: onnx.ModelProto, count: int = 4) -> list[dict[str, Array]]:
    """Normal values for the input ``x``."""
    rng = np.random.default_rng(1)
    dims = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim][1:]
    return [{"x": rng.normal(size=(SIZE, *dims)).astype(np.float32)} for _ in range(count)]
