"""``diff``: differences of two quantized models of the same network."""

from __future__ import annotations

from sbonnx import graph as graphs
from sbonnx.api.arguments import known_keywords, model_files
from sbonnx.graph.storage.model_file import ModelSource
from sbonnx.qdq.difference import FileDifference, difference


@known_keywords
def diff(first: ModelSource, second: ModelSource) -> FileDifference:
    """Compare two quantized models of the same network: placement, types, scales, constants, operators.

    Args:
        first, second: paths of ONNX files, or models in memory, quantized by any tool in Q/DQ form.

    Returns:
        The differences. ``equal`` is True if there are none.

    Raises:
        ModelError: a file cannot be read.
    """
    with model_files(first, second) as (files, names):
        return FileDifference(names[0], names[1], difference(*(graphs.load(file, opset=1) for file in files)))
