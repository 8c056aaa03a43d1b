"""Weights of depthwise convolutions, within the sums and multipliers of kernels of phones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx import quantize
from tests.backends.qnn.graphs import feeds_for, parsed

TEXT = """g (float[N,8,8,8] x) => (float[N,8,8,8] y) {
    a = Conv<kernel_shape=[3,3], group=8, pads=[1,1,1,1]>(x, w0, b0)
    b = Relu(a)
    y = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(b, w1)
}"""


def parameters(path: Path, weight: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes and scales of a weight."""
    graph = onnx.load(path).graph
    stored = {value.name: numpy_helper.to_array(value) for value in graph.initializer}
    (node,) = (node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0].startswith(weight))
    return stored[node.input[0]], stored[node.input[1]]


@pytest.mark.parametrize("backend", ["onnxruntime", "web", "qnn"])
def test_depthwise_weights_have_no_lowest_code(backend: Any, tmp_path: Path) -> None:
    """ARM64 adds two of (0 - 128) * -128 in int16: outputs of a 3x3 kernel were up to 51 steps from the reference."""
    source = parsed(TEXT, {"w0": (8, 1, 3, 3), "w1": (8, 8, 3, 3)}, b0=np.zeros(8, np.float32))
    output = tmp_path / "q.onnx"
    quantize(source, feeds_for(source), output=output, backend=backend, effort="fast", verify=False)
    codes, scales = parameters(output, "w0")
    assert codes.dtype == np.int8
    assert codes.min() >= -127
    assert np.abs(codes).reshape(8, -1).max(1).min() == 127, "the range is used whole"
    assert (scales > 0).all()


def test_channels_without_weights_have_multipliers_of_the_htp(tmp_path: Path) -> None:
    """Qualcomm's emulator computes other channels, and these, with errors of 112 steps otherwise."""
    source = parsed(TEXT, {"w0": (8, 1, 3, 3), "w1": (8, 8, 3, 3)}, b0=np.zeros(8, np.float32))
    (weight,) = (value for value in source.graph.initializer if value.name == "w0")
    values = numpy_helper.to_array(weight).copy()
    values[2] *= 1e-12
    weight.CopyFrom(numpy_helper.from_array(values, "w0"))
    output = tmp_path / "q.onnx"
    quantize(source, feeds_for(source), output=output, backend="qnn", effort="fast", verify=False)
    _, scales = parameters(output, "w0")
    stored = {value.name: numpy_helper.to_array(value) for value in onnx.load(output).graph.initializer}
    pairs = [node.input[1] for node in onnx.load(output).graph.node if node.op_type == "QuantizeLinear"]
    read, written = (float(stored[name]) for name in pairs[:2])
    assert read * scales.min() / written == pytest.approx(2.0**-23, rel=1e-5)
