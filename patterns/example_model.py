"""Small models for the examples of patterns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import numpy_helper


def sample(text: str, *, opset: int = 17, **constants: Sequence[int] | np.ndarray) -> onnx.ModelProto:
    """Create a model from onnx.parser's text of one graph and separate initializers.

    Args:
        text: the graph.
        opset: its opset.
        constants: name → values (used as given), or a shape to fill with random float32 numbers from a fixed seed;
            those whose name starts with "variance" are positive.
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
