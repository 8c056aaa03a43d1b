"""A network that 8-bit activations lose is written with few of them in 16 bits; others are left as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import sbonnx
from sbonnx.linting import lint
from sbonnx.metrics import sqnr_db
from sbonnx.runtimes import RUNTIMES
from sbonnx.spec import Array
from tests.support.models import model, run

WIDTH = 16
RANDOM = np.random.default_rng(0)
FEEDS = [{"x": RANDOM.standard_normal((1, 8, WIDTH)).astype(np.float32)} for _ in range(4)]

NETWORK = """
agraph (float[1,8,16] x) => (float[1,8,16] y)
{
    m0 = MatMul(x, w0)
    r0 = Relu(m0)
    m1 = MatMul(r0, w1)
    r1 = Relu(m1)
    far = Add(r1, offset)
    near = LayerNormalization<axis = -1>(far, scale, bias)
    m2 = MatMul(near, w2)
    r2 = Relu(m2)
    m3 = MatMul(r2, w3)
    y = Relu(m3)
}
"""


def network(offset: float) -> onnx.ModelProto:
    """Products and rectifiers, and a sum with an offset before a normalization, which removes it."""
    weights: dict[str, Any] = {
        f"w{layer}": RANDOM.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 4 for layer in range(4)
    }
    ones: Array = np.ones(WIDTH, np.float32)
    return model(NETWORK, offset=offset * ones, scale=ones, bias=ones / 8, **weights)


def outputs(proto: onnx.ModelProto) -> Array:
    return np.concatenate([run(proto, feed)["y"].ravel() for feed in FEEDS])


def wide_tensors(proto: onnx.ModelProto) -> set[str]:
    """The activations with 16 bits that are not converted from 8."""
    zeros = {value.name: numpy_helper.to_array(value).dtype for value in proto.graph.initializer}
    makers = {name: node.op_type for node in proto.graph.node for name in node.output}
    pairs = [node for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    wide = [node.input[0] for node in pairs if zeros[node.input[2]] == np.uint16]
    return {name for name in wide if makers.get(name) != "DequantizeLinear"}


def quantized(proto: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    report = sbonnx.quantize(proto, FEEDS, backend="qnn", effort="fast", verify=False, **options)
    assert report.quantized is not None
    return report.quantized


def test_the_activation_that_loses_the_outputs_has_16_bits() -> None:
    float_model = network(500.0)
    expected = outputs(float_model)
    narrow, wide = quantized(float_model, wide_activations=0), quantized(float_model, wide_activations=0.2)
    assert not wide_tensors(narrow)
    assert wide_tensors(wide) == {"far"}
    assert sqnr_db(expected, outputs(narrow)) < 6 < 25 < sqnr_db(expected, outputs(wide))
    assert lint(wide, "qnn") == []
    emulator = RUNTIMES["qnn"]
    if emulator.absent():
        pytest.skip("the emulator of the HTP is not installed")
    opened = emulator.open(wide.SerializeToString(), None)
    results = np.concatenate([np.ravel(opened.run(None, feed)[0]) for feed in FEEDS])
    assert sqnr_db(expected, results) > 12  # it normalizes less exactly
    assert not [name for name in opened.fallback() if "Linear" not in name]


def test_outputs_that_are_not_lost_stay_in_8_bits() -> None:
    assert not wide_tensors(quantized(network(0.5)))
