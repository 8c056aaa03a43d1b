"""FORMAT: qoperator, against the Q/DQ file that it was made from, run as it is."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sbonnx
from sbonnx import graph as graphs
from sbonnx.errors import RecipeError
from sbonnx.export import Converted
from sbonnx.export.conversion import changes_no_code
from sbonnx.export.qoperator import convert
from sbonnx.graph import Constant, Node, Variable
from sbonnx.spec import Array, QParams, QuantSpec
from tests.support.models import model, residual, run
from tests.support.writing import both_forms, ops, sqnr

RNG = np.random.default_rng(0)
LEVELS = ("off", "all")


def feeds(*shape: int, count: int = 4) -> list[dict[str, Array]]:
    return [{"x": RNG.standard_normal(shape).astype(np.float32)} for _ in range(count)]


def quantum(pairs: onnx.ModelProto) -> float:
    """The largest scale of any activation in a file: what one code more or less can change, at a tensor."""
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in pairs.graph.initializer}
    return max(float(stored[node.input[1]].max()) for node in pairs.graph.node if node.op_type == "QuantizeLinear")


def agree(proto: onnx.ModelProto, data: list[dict[str, Array]], **overrides: Any) -> tuple[Any, Any]:
    """Op counts of the integer file and its refusals, after both files gave the same within one quantum."""
    pairs, integers, refusals = both_forms(proto, data, **overrides)
    step = quantum(pairs)
    for feed in data:
        expected = run(pairs, feed)
        for level in LEVELS:
            for name, value in run(integers, feed, level=level).items():
                assert np.abs(value - expected[name]).max() <= step * 1.001, (name, level)
    return ops(integers), refusals


def test_a_residual_network_leaves_pairs_at_its_ends_only() -> None:
    found, refusals = agree(residual(), feeds(2, 3, 8, 8))
    assert not refusals
    assert (found["QLinearConv"], found["QLinearAdd"], found["QLinearGlobalAveragePool"], found["QGemm"]) == (
        3,
        1,
        1,
        1,
    )
    assert found["QuantizeLinear"] == 1 and not found["DequantizeLinear"] and not found["Relu"]


def pair(tensor: str, numbers: str = "") -> str:
    """Q and DQ around a tensor ``t``: its codes are ``t_q``, its dequantized values ``t_d``."""
    scale = f"{numbers or tensor}_s, {numbers or tensor}_z"
    return f"{tensor}_q = QuantizeLinear ({tensor}, {scale})  {tensor}_d = DequantizeLinear ({tensor}_q, {scale})"


NUMBERS: dict[str, tuple[float, int]] = {"x": (0.03, 120), "c": (0.05, 110), "r": (0.04, 0), "s": (1 / 255, 0)}
NUMBERS |= {"u": (0.05, 110), "t": (0.06, 100), "y": (0.1, 128)}
WEIGHT = np.asarray(RNG.integers(-127, 128, (8, 3, 3, 3)), np.int8)
LAST = np.asarray(RNG.integers(-127, 128, (4, 8, 1, 1)), np.int8)
CONSTANTS: dict[str, Array] = {
    "w": WEIGHT,
    "w_s": RNG.uniform(0.002, 0.006, 8).astype(np.float32),
    "w_z": np.zeros(8, np.int8),
    "v": LAST,
    "v_s": np.array(0.004, np.float32),
    "v_z": np.array(0, np.int8),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "four": np.array([0, 2, 4, 8, 8]),
    "back": np.array([0, 8, 8, 8]),
    "halves": np.array([4, 4]),
    "double": np.array([1, 1, 2, 2], np.float32),
    "six": np.array(6, np.float32),
}
for _name, (_scale, _zero) in NUMBERS.items():
    CONSTANTS |= {f"{_name}_s": np.array(_scale, np.float32), f"{_name}_z": np.array(_zero, np.uint8)}

BEFORE = f"{pair('x')} w_d = DequantizeLinear <axis = 0> (w, w_s, w_z)  c = Conv <pads = [1,1,1,1]> (x_d, w_d)"
AFTER = "v_d = DequantizeLinear (v, v_s, v_z)  y = Conv (t_d, v_d)"
BETWEEN = {
    "relu": (f"t = Relu (c) {pair('t', 'r')}", "QLinearConv"),
    "clip": (f"t = Clip (c, , six) {pair('t')}", "Clip"),
    "maxpool": (f"{pair('c')} t = MaxPool <kernel_shape = [2,2]> (c_d) {pair('t', 'c')}", "MaxPool"),
    "maxpool two scales": (f"{pair('c')} t = MaxPool <kernel_shape = [2,2]> (c_d) {pair('t')}", "MaxPool"),
    "average": (f"{pair('c')} t = AveragePool <kernel_shape = [2,2]> (c_d) {pair('t')}", "QLinearAveragePool"),
    "global": (f"{pair('c')} t = GlobalAveragePool (c_d) {pair('t')}", "QLinearGlobalAveragePool"),
    "sigmoid": (f"{pair('c')} t = Sigmoid (c_d) {pair('t', 's')}", "QLinearSigmoid"),
    "leaky": (f"{pair('c')} t = LeakyRelu <alpha = 0.1> (c_d) {pair('t')}", "QLinearLeakyRelu"),
    "softmax": (f"{pair('c')} t = Softmax <axis = 3> (c_d) {pair('t', 's')}", "QLinearSoftmax"),
    "silu": (f"{pair('c')} s = Sigmoid (c_d) {pair('s')} t = Mul (c_d, s_d) {pair('t')}", "QLinearMul"),
    "residual": (
        f"{pair('c')} s = Sigmoid (c_d) {pair('s')} a = Add (s_d, c_d) t = Relu (a) {pair('t', 'r')}",
        "QLinearAdd",
    ),
    "concat": (
        f"{pair('c')} s = Sigmoid (c_d) {pair('s')} t = Concat <axis = 2> (c_d, s_d) {pair('t')}",
        "QLinearConcat",
    ),
    "one scale": (f"{pair('c')} t = Concat <axis = 2> (c_d, c_d) {pair('t', 'c')}", "Concat"),
    "shuffle": (
        f"{pair('c')} s = Reshape (c_d, four)  u = Transpose <perm = [0,2,1,3,4]> (s)"
        f" t = Reshape (u, back) {pair('t', 'c')}",
        "Transpose",
    ),
    "split": (
        f"{pair('c')} s, u = Split <axis = 1> (c_d, halves)  t = Concat <axis = 1> (u, s) {pair('t', 'c')}",
        "Split",
    ),
    "pad": (f"{pair('c')} t = Pad (c_d, pads) {pair('t', 'c')}", "Pad"),
    "reflect": (f'{pair("c")} t = Pad <mode = "reflect"> (c_d, pads) {pair("t", "c")}', "Pad"),
    "resize": (f"{pair('c')} t = Resize (c_d, , double) {pair('t', 'c')}", "Resize"),
    "relu on codes": (f"{pair('c', 'r')} t = Relu (c_d) {pair('t', 'r')}", "QLinearConv"),
}
TIED = {"average": 0.06}
"""Share of the outputs that may be a code off where it is larger: the mean of four codes often lies half way between
two, which float and integer kernels round differently."""

LEFT = {"clip": 3, "maxpool two scales": 2}
"""DequantizeLinear nodes that must stay, where more than the last one has to."""


def hand_made(body: str, outputs: str = "float[2,4,H,W] y_d", **more: Any) -> onnx.ModelProto:
    """A Q/DQ model with numbers set by hand."""
    used: set[str] = set(re.findall(r"\w+", body))
    weights: dict[str, Any] = {name: value for name, value in CONSTANTS.items() if name in used}
    return model(f"agraph (float[2,3,8,8] x) => ({outputs}) {{ {body} }}", **weights, **more)


def converted(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Converted]:
    """The model in integer ops."""
    graph = graphs.load(proto)
    done = convert(graph)
    made = graphs.to_proto(graph)
    onnx.checker.check_model(made, full_check=True)
    return made, done


@pytest.mark.parametrize("name", BETWEEN)
def test_between_two_convolutions(name: str) -> None:
    """Within one code of the Q/DQ model at the last tensor, at every level."""
    text, op = BETWEEN[name]
    proto = hand_made(f"{BEFORE} {text} {AFTER} {pair('y')}")
    made, done = converted(proto)
    found = ops(made)
    assert found[op] >= 1, (found, done.refusals)
    assert found["QLinearConv"] == 2 - (name == "clip")
    assert found["DequantizeLinear"] == LEFT.get(name, 1)
    assert bool(done.refusals) == (name == "clip")
    feed = {"x": np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)}
    expected = run(proto, feed)["y_d"]
    for level in LEVELS:
        difference = np.abs(run(made, feed, level=level)["y_d"] - expected) / NUMBERS["y"][0]
        assert difference.max() <= 1.001 and (difference > 0.5).mean() < TIED.get(name, 0.02)


def test_numbers_that_readers_disagree_on_keep_the_pairs() -> None:
    body = f"{BEFORE} {pair('c')} u_q = QuantizeLinear (c, t_s, t_z)  u_d = DequantizeLinear (u_q, t_s, t_z)"
    proto = hand_made(f"{body} y_d = Add (c_d, u_d)", "float[2,8,8,8] y_d")
    made, done = converted(proto)
    assert not ops(made)["QLinearConv"]
    assert [refusal.why for refusal in done.refusals] == [
        "its readers quantize it by different scales",
        "its output leaves the graph in float",
    ]


def test_a_reader_in_float_keeps_the_pairs() -> None:
    proto = hand_made(f"{BEFORE} {pair('c')} y_d = Add (c_d, c)", "float[2,8,8,8] y_d")
    made, done = converted(proto)
    assert not ops(made)["QLinearConv"]
    assert any("read in float by 'Add_0'" in refusal.why for refusal in done.refusals)


@pytest.mark.parametrize("product", ["MatMul (x, w)", "Gemm (x, w, b)", "Gemm <transB = 1> (x, u, b)"])
def test_a_product_that_ends_in_float(product: str) -> None:
    weights: dict[str, Any] = {"w": (16, 8)} if "w" in product else {"u": (8, 16)}
    weights |= {"b": 8} if "b" in product else {}
    proto = model(f"agraph (float[4,16] x) => (float[4,8] y) {{ y = {product} }}", **weights)
    found, refusals = agree(proto, feeds(4, 16))
    assert not refusals and not found["DequantizeLinear"]
    assert found["QGemm" if "Gemm" in product else "MatMulInteger"] == 1


def test_a_bias_in_an_add_behind_becomes_a_constant() -> None:
    proto = model("agraph (float[2,6,16] x) => (float[2,6,8] y) { m = MatMul (x, w)  y = Add (m, b) }", w=(16, 8), b=8)
    found, _ = agree(proto, feeds(2, 6, 16))
    assert not found["DequantizeLinear"] and found["Add"] == 1


def test_a_relu_that_its_zero_point_does_not_do_stays() -> None:
    proto = hand_made(f"{BEFORE} t = Relu (c) {pair('t')} {AFTER} {pair('y')}")
    made, done = converted(proto)
    assert ops(made)["Relu"] == 1
    assert any("has an effect that its zero point does not have" in refusal.why for refusal in done.refusals)


def test_what_has_no_integer_form_is_named() -> None:
    made, done = converted(hand_made(f"{BEFORE} {pair('c')} t = Tanh (c_d) {pair('t')} {AFTER} {pair('y')}"))
    assert ops(made)["Tanh"] == 1 and ops(made)["QLinearConv"] == 2
    assert [(row.what, row.where, row.why) for row in done.refusals] == [
        ("write as an integer op", "Tanh_0", "Tanh has none")
    ]


def test_a_bias_that_does_not_fit_int32_is_refused() -> None:
    body = f"{BEFORE.replace('(x_d, w_d)', '(x_d, w_d, b)')} {pair('c')} y_d = Identity (c_d)"
    for value, fits in ((1e3, True), (1e9, False)):
        proto = hand_made(body, "float[2,8,8,8] y_d", b=np.full(8, value, np.float32))
        made, done = converted(proto)
        assert ops(made)["QLinearConv"] == int(fits)
        assert [refusal.where for refusal in done.refusals] == ([] if fits else ["Conv_0"])


def test_channels_with_zero_points_of_their_own_are_refused() -> None:
    """onnxruntime's QLinearConv wants one for all."""
    proto = hand_made(f"{BEFORE} {pair('c')} y_d = Identity (c_d)", "float[2,8,8,8] y_d")
    for tensor in proto.graph.initializer:
        if tensor.name == "w_z":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.arange(8, dtype=np.int8), "w_z"))
    made, done = converted(proto)
    assert not ops(made)["QLinearConv"]
    assert any("one zero point for all channels" in refusal.why for refusal in done.refusals)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    scale=st.floats(1e-3, 2.0),
    zero=st.integers(-128, 127),
    low=st.floats(-4, 1) | st.just(-np.inf),
    high=st.floats(1, 8) | st.just(np.inf),
    seed=st.integers(0, 99),
)
def test_a_clip_is_dropped_exactly_where_no_value_can_tell(
    scale: float, zero: int, low: float, high: float, seed: int
) -> None:
    bounds = [Constant(name, np.array(value, np.float32)) for name, value in (("low", low), ("high", high))]
    node = Node("Clip", "clip", {}, [Variable("x"), *bounds], [Variable("y")])
    step, point = np.asarray(np.float32(scale)), np.asarray(np.int8(zero))
    numbers = QParams(step, point, QuantSpec(symmetric=False))
    x = np.concatenate([np.linspace(-600, 600, 4001), np.random.default_rng(seed).standard_normal(500) * 9])
    x = x.astype(np.float32)
    clipped = np.clip(x, np.float32(low), np.float32(high))
    same = bool((numbers.quantize(x) == numbers.quantize(clipped)).all())
    assert changes_no_code(node, step, point) == same


def test_only_onnxruntime_has_it() -> None:
    wishes: list[dict[str, Any]] = [{"backend": "tensorrt"}, {"backend": "virtual"}, {"weights": "qdq"}]
    for wish in wishes:
        with pytest.raises(RecipeError, match="must be"):
            sbonnx.quantize(residual(), feeds(2, 3, 8, 8), format="qoperator", **wish)


def test_the_front_door_says_what_became_of_it() -> None:
    report = sbonnx.quantize(residual(), feeds(2, 3, 8, 8), format="qoperator")
    assert report.ok, report.problems
    assert any("3 QLinearConv" in note for note in report.notes)
    assert report.quantized is not None and ops(report.quantized)["QLinearConv"] == 3
    with sbonnx.QuantModel(residual(), backend="onnxruntime", format="qoperator") as quantized:
        quantized.prepare_calibration()
        for feed in (data := feeds(2, 3, 8, 8)):
            quantized(feed)
        quantized.calc_qparams()
        quantized.set_quant(w_quant=True, a_quant=True)
        assert sqnr(quantized(data[0])["y"], run(residual(), data[0])["y"]) > 20
