"""``diff``: differences of two quantized models of the same network."""

from __future__ import annotations

from pathlib import Path

from sbonnx import graph as graphs
from sbonnx.api.arguments import File
from sbonnx.qdq.difference import FileDifference, difference


def diff(first: File, second: File) -> FileDifference:
    """Compare two quantized models of the same network: placement, types, scales, constants, operators.

    Args:
        first, second: paths of ONNX files, quantized by any tool in Q/DQ form.

    Returns:
        The differences. ``equal`` is True if there are none.

    Raises:
        ModelError: a file cannot be read.
    """
    files = Path(first), Path(second)
    return FileDifference(str(first), str(second), difference(*(graphs.load(file, opset=1) for file in files)))
