"""Weights of linear ops without integer kernel: 8 bits in the file, floats once onnxruntime has loaded it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx import qdq
from tests.support.models import model, run

Mode = Literal["static", "dynamic", "weight_only"]

RNG = np.random.default_rng(0)

CONV = "agraph (float[1,8,16,16] x) => (float[1,16,16,16] y) { y = Conv <pads = [1,1,1,1]> (x, w) }"

LOOP = """agraph (float[1,64] x) => (float[1,64] y) {
    y, ys = Loop <body = body (int64 i, bool c, float[1,64] h) => (bool d, float[1,64] k, float[1,64] o) {
        d = Identity (c)
        p = MatMul (h, w)
        k = Tanh (p)
        o = Identity (k)
    }> (steps, yes, x)
}"""

SPECTRUM = """agraph (float[64,128] x) => (float[64,128] y) {
    a = Tanh (x)
    s = MatMul (a, w)
    p = Mul (s, s)
    e = Add (p, one)
    l = Log (e)
    y = MatMul (l, v)
}"""


def network(name: str) -> onnx.ModelProto:
    if name == "conv":
        return model(CONV, w=RNG.standard_normal((16, 8, 3, 3)).astype(np.float32))
    weight = (RNG.standard_normal((64, 64)) / 8).astype(np.float32)
    return model(LOOP, w=weight, steps=np.array(4), yes=np.array(True))


@pytest.mark.parametrize(
    ("name", "mode"),
    [("conv", "weight_only"), ("loop", "static"), ("loop", "dynamic"), ("loop", "weight_only")],
)
def test_weights_without_kernel_are_stored_in_8_bits(name: str, mode: Mode, tmp_path: Path) -> None:
    proto, path = network(name), tmp_path / "q.onnx"
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    feeds = [{"x": RNG.standard_normal(shape).astype(np.float32)} for _ in range(4)]
    sbonnx.quantize(proto, feeds, output=path, mode=mode, verify=False)
    assert path.stat().st_size < 0.4 * proto.ByteSize()
    floats, values = (run(file, feeds[0], level="all")["y"] for file in (proto, str(path)))
    assert 10 * np.log10(np.sum(floats**2) / np.sum((floats - values) ** 2)) > 35

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    loaded = graphs.load(tmp_path / "loaded.onnx")
    ops = [node.op for _, body in graphs.query.scopes(loaded) for node in body.nodes]
    assert not {"Cast", "Mul", "DequantizeLinear"} & set(ops)

    graph = graphs.load(path)
    qdq.unfold(graph)
    pairs = [node for _, body in graphs.query.scopes(graph) for node in body.nodes if node.op == "DequantizeLinear"]
    assert [pair.inputs[0].dtype for pair in pairs] == [np.int8]


@pytest.mark.parametrize("mode", ["static", "dynamic", "weight_only"])
def test_bases_of_spectra_stay_float(mode: Mode, tmp_path: Path) -> None:
    """The product before the Log; that after it is quantized."""
    w, v = (RNG.standard_normal((128, 128)).astype(np.float32) for _ in range(2))
    proto = model(SPECTRUM, w=w, v=v, one=np.array(1, np.float32))
    feeds = [{"x": RNG.standard_normal((64, 128)).astype(np.float32)} for _ in range(4)]
    report = sbonnx.quantize(proto, feeds, output=tmp_path / "q.onnx", mode=mode, verify=False)
    assert [site.tensor for site in report.sites if site.role == "weight"] == ["v"]
    assert any(refusal.code == "log-of-power" for refusal in report.refusals)
