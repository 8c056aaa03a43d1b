"""Sums before normalizations, and Pads of codes: the same numbers in kernels that onnxruntime runs faster."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from sbonnx import graph as graphs
from sbonnx.backends.onnxruntime.rewrites import pad_codes, write_sums
from sbonnx.spec import Array
from tests.support.models import model, run

RESIDUAL = """agraph (float[N,4,8] x) => (float[N,4,8] y) {
    m = MatMul (x, w)
    b = Add (ADDED)
    r = Add (SUMMED)
    y = LayerNormalization (r, gamma, beta)
}"""


def kernels(proto: onnx.ModelProto, folder: Path) -> Counter[str]:
    """Ops of the graph as onnxruntime runs it."""
    path = folder / "optimised.onnx"
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(str(path)).graph.node)


def feed(*shape: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


@pytest.mark.parametrize("summed", ["b, x", "x, b"])
@pytest.mark.parametrize("added", ["m, bias", "bias, m"])
def test_residual_sums_are_not_fused_and_equal(added: str, summed: str, tmp_path: Path) -> None:
    proto = model(RESIDUAL.replace("ADDED", added).replace("SUMMED", summed), w=(8, 8), bias=8, gamma=8, beta=8)
    graph = graphs.load(proto, opset=1)
    assert len(write_sums(graph)) == 1
    written = graphs.to_proto(graph)
    onnx.checker.check_model(written, full_check=True)
    assert [node.op_type for node in written.graph.node] == ["MatMul", "Sum", "LayerNormalization"]
    np.testing.assert_array_equal(run(proto, feed(2, 4, 8))["y"], run(written, feed(2, 4, 8))["y"])
    assert kernels(proto, tmp_path)["SkipLayerNormalization"] == 1
    assert kernels(written, tmp_path)["SkipLayerNormalization"] == 0


def test_a_bias_that_others_read_stays_an_addition() -> None:
    text = RESIDUAL.replace("ADDED", "m, bias").replace("SUMMED", "b, x").replace(" y)", " y, float[N,4,8] b)", 1)
    proto = model(text, w=(8, 8), bias=8, gamma=8, beta=8)
    graph = graphs.load(proto, opset=1)
    assert len(write_sums(graph)) == 1
    written = graphs.to_proto(graph)
    assert [node.op_type for node in written.graph.node] == ["MatMul", "Add", "Sum", "LayerNormalization"]
    for name, value in run(proto, feed(2, 4, 8)).items():
        np.testing.assert_array_equal(run(written, feed(2, 4, 8))[name], value)


def test_sums_elsewhere_and_integer_ones_stay() -> None:
    plain = model("agraph (float[2,8] x) => (float[2,8] y) { a = Sigmoid (x) y = Add (a, x) }")
    integer = model(
        """agraph (float[2,8] x) => (float[2,8] y) {
            q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z)
            a = Add (d, d) aq = QuantizeLinear (a, s, z) ad = DequantizeLinear (aq, s, z)
            y = LayerNormalization (ad, gamma)
        }""",
        s=np.float32(0.1),
        z=np.uint8(3),
        gamma=8,
    )
    assert [write_sums(graphs.load(proto, opset=1)) for proto in (plain, integer)] == [[], []]


PADDED = """agraph (float[N,2,4,4] x) => (float[N,2,6,6] y) {
    q = QuantizeLinear (x, s, z)
    d = DequantizeLinear (q, s, z)
    p = Pad <MODE> (d, pads, FILL)
    pq = QuantizeLinear (p, s2, z)
    y = DequantizeLinear (pq, s2, z)
}"""


def padded(mode: str = "constant", fill: float | None = 0.0, scale: float = 0.1) -> onnx.ModelProto:
    text = PADDED.replace("MODE", f'mode = "{mode}"').replace(", FILL", "" if fill is None else ", fill")
    more = {} if fill is None else {"fill": np.float32(fill)}
    pads = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    return model(text, s=np.float32(0.1), s2=np.float32(scale), z=np.uint8(77), pads=pads, **more)


@pytest.mark.parametrize(("mode", "fill"), [("constant", 0.0), ("constant", None), ("reflect", None), ("edge", None)])
def test_pads_of_codes_equal_pads_of_values(mode: str, fill: float | None) -> None:
    proto = padded(mode, fill)
    graph = graphs.load(proto, opset=1)
    assert len(pad_codes(graph)) == 1
    written = graphs.to_proto(graph)
    onnx.checker.check_model(written, full_check=True)
    assert [node.op_type for node in written.graph.node] == ["QuantizeLinear", "Pad", "DequantizeLinear"]
    for level in ("off", "all"):
        there, here = (run(one, feed(2, 2, 4, 4), level=level)["y"] for one in (proto, written))
        np.testing.assert_array_equal(there, here)


def test_another_fill_or_scale_stays_float() -> None:
    assert [pad_codes(graphs.load(proto, opset=1)) for proto in (padded(fill=0.5), padded(scale=0.2))] == [[], []]
