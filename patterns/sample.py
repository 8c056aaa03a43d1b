"""Small models for the examples that patterns carry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import numpy_helper


def sample(text: str, *, opset: int = 17, **constants: Sequence[int] | np.ndarray) -> onnx.ModelProto:
    """A model from onnx.parser's text of one graph, with initializers beside it.

    Args:
        constants: name → values (kept as they are), or a shape to be filled with random float32 numbers, the same
            ones each time; those of a name that starts with "variance" are positive.
    """
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {text}')
    rng = np.random.default_rng(0)
    for name, given in constants.items():
        if isinstance(given, np.ndarray):
            values = given
        else:
            values = rng.normal(size=tuple(given)).astype(np.float32)
            if name.startswith("variance"):
                values = np.abs(values) + np.float32(0.5)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model
