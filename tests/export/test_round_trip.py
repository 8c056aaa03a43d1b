"""What the exports write, read by the code that takes earlier quantizations out: the float network comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx import graph as graphs
from sbonnx import qdq
from tests.support.models import model, residual, run
from tests.support.writing import both_forms, ops, sqnr, without_data

RNG = np.random.default_rng(0)
X = {"x": RNG.standard_normal((3, 256)).astype(np.float32)}
TWO = "agraph (float[N,256] x) => (float[N,256] y) { h = MatMul (x, w)  y = Gemm <transB = 1> (h, v, b) }"


def float_again(made: onnx.ModelProto) -> onnx.ModelProto:
    graph = graphs.load(made, opset=21)
    assert not qdq.make_float(graph, requantize=True)
    return graphs.to_proto(graph)


@pytest.mark.parametrize(
    ("wish", "least"),
    [
        ({"mode": "dynamic"}, 35),
        ({"mode": "weight_only"}, 17),
        ({"mode": "weight_only", "w_bit": 8}, 38),
        ({"mode": "weight_only", "w_qscheme": "per-channel-symmetric"}, 16),
    ],
)
def test_weights_come_back_as_they_were_rounded(wish: dict[str, Any], least: float) -> None:
    proto = model(TWO, w=(256, 256), v=(256, 256), b=256)
    made, _ = without_data(proto, accuracy_level=1, cpu="vnni", **wish)
    back = float_again(made)
    assert ops(back)["MatMul"] + ops(back)["Gemm"] == 2 and not ops(back)["DequantizeLinear"]
    assert sqnr(run(proto, X)["y"], run(back, X)["y"]) > least
    if wish["mode"] == "weight_only":  # nothing but the weights was rounded
        assert sqnr(run(made, X)["y"], run(back, X)["y"]) > 100


def test_a_network_of_integer_ops_comes_back() -> None:
    data = [{"x": RNG.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(4)]
    _, integers, _ = both_forms(residual(), data)
    back = float_again(integers)
    assert (ops(back)["Conv"], ops(back)["Gemm"], ops(back)["QLinearConv"]) == (3, 1, 0)
    for feed in data:
        assert sqnr(run(residual(), feed)["y"], run(back, feed)["y"]) > 30
