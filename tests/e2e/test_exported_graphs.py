"""What exporters write, cut down to the part that once came out wrong: onnxruntime takes the result and runs it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

import sbonnx
from sbonnx import graph as graphs
from sbonnx.spec import Array
from tests.support.models import model, run

RNG = np.random.default_rng(7)


def feeds(*shape: int, count: int = 2) -> list[dict[str, Array]]:
    return [{"x": RNG.standard_normal(shape).astype(np.float32)} for _ in range(count)]


def optimized(proto: onnx.ModelProto, folder: Path) -> Counter[str]:
    """Op types that onnxruntime runs in the end."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(str(folder / "optimized.onnx")).graph.node)


def quantized(proto: onnx.ModelProto, samples: Any, **wishes: Any) -> onnx.ModelProto:
    report = sbonnx.quantize(proto, samples, **wishes)
    assert report.ok, report.problems
    assert report.quantized is not None
    return report.quantized


LINEAR = (
    "agraph (float[{batch},6,16] x) => (float[{batch},6,8] y) {{ m = MatMul (x, w)  a = Add (m, b)  y = Tanh (a) }}"
)


def test_a_linear_layer_of_static_shape_runs_in_integers(tmp_path: Path) -> None:
    """onnxruntime makes MatMul and Add of static shape a Gemm, which is integer only with a bias in int32."""
    made = quantized(model(LINEAR.format(batch=2), w=(16, 8), b=8), feeds(2, 6, 16))
    ops = optimized(made, tmp_path)
    assert ops["QGemm"] == 1
    assert not {"Gemm", "MatMul", "DequantizeLinear"} & set(ops)


def test_a_linear_layer_of_dynamic_shape_keeps_its_float_bias(tmp_path: Path) -> None:
    made = quantized(model(LINEAR.format(batch="N"), w=(16, 8), b=8), feeds(2, 6, 16))
    ops = optimized(made, tmp_path)
    assert ops["MatMulIntegerToFloat"] == 1
    assert not {"Gemm", "MatMul", "DequantizeLinear"} & set(ops)


@pytest.mark.parametrize(
    "between", ["p = MaxPool <kernel_shape = [2,2]> (r)", "p = Clip (r, low, high)", "p = Relu (r)"]
)
def test_four_bit_activations_run_at_every_level(between: str) -> None:
    """onnxruntime moves pairs past these ops and has no kernel for 4-bit codes behind them."""
    proto = model(
        f"""agraph (float[N,4,8,8] x) => (float[N,4,1,1] y) {{
            c = Conv (x, w)  r = Relu (c)  {between}  d = Conv (p, v)  e = Relu (d)  y = GlobalAveragePool (e)
        }}""",
        opset=21,
        w=(4, 4, 1, 1),
        v=(4, 4, 1, 1),
        low=np.float32(0),
        high=np.float32(6),
    )
    made = quantized(proto, feeds(2, 4, 8, 8), backend="virtual", bits="w4a4", rounding="nearest", min_sqnr=3)
    feed = feeds(3, 4, 8, 8)[0]
    assert run(made, feed, level="all")["y"] == pytest.approx(run(made, feed)["y"], abs=1e-5)


@pytest.mark.parametrize("bits", [3, 4])
def test_narrow_activations_need_no_newer_opset(bits: int) -> None:
    proto = model(LINEAR.format(batch="N"), opset=13, w=(16, 8), b=8)
    made = quantized(proto, feeds(2, 6, 16), backend="virtual", bits=f"w8a{bits}", min_sqnr=3)
    assert {entry.version for entry in made.opset_import if not entry.domain} == {13}


NUMBERS = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "eight": 8}

DECODED = """
agraph (float[N,4,8,8] x) => (float[N,P,Q] y) {
    c = Conv (x, w, b)
    s = Shape (c)
    n = Slice (s, zero, one)
    h = Slice (s, two, three)
    v = Slice (s, three, four)
    hv = Mul (h, v)
    to = Concat <axis = 0> (n, eight, hv)
    r = Reshape (c, to)
    y = Sigmoid (r)
}"""


def test_axes_that_the_exporter_only_named_may_become_numbers() -> None:
    """Simplified shapes tell onnxruntime more about an output than it knew of the original."""
    numbers: dict[str, Any] = {name: np.array([number]) for name, number in NUMBERS.items()}
    proto = model(DECODED, w=(8, 4, 1, 1), b=8, **numbers)
    made = quantized(proto, feeds(2, 4, 8, 8))
    assert [axis.dim_param for axis in made.graph.output[0].type.tensor_type.shape.dim] == ["N", "P", "Q"]


HEAD = """
agraph (float[N,4,8,8] x) => (float[N,3,64] y) {
    c = Conv (x, w)  d = Conv (c, v)
    r = Reshape (d, to)  t = Transpose <perm = [0,2,1]> (r)  g = Sigmoid (t)
    a, s = Split <axis = 2> (g, parts)
    z = Mul (a, a2)  q = Mul (z, z)  m = Mul (q, stride)
    j = Concat <axis = 2> (m, s)
    y = Transpose <perm = [0,2,1]> (j)
}"""


def test_scores_survive_beside_boxes() -> None:
    """Boxes in hundreds of pixels and scores below 1 are joined at the end: one scale would round scores to 0."""
    proto = model(
        HEAD,
        w=(4, 4, 1, 1),
        v=(3, 4, 1, 1),
        to=np.array([0, 3, 64]),
        parts=np.array([2, 1]),
        a2=np.float32(2),
        stride=np.float32(320),
    )
    made = quantized(proto, feeds(2, 4, 8, 8, count=4))
    feed = feeds(2, 4, 8, 8)[0]
    scores = run(proto, feed)["y"][:, 2]
    assert np.abs(run(made, feed)["y"][:, 2] - scores).max() < 0.1


def to_half(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float16."""
    graph = graphs.load(proto)
    made = graphs.to_proto(graph)
    for tensor in made.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
            )
    for value in (*made.graph.input, *made.graph.output, *made.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return made
