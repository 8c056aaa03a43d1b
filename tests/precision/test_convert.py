"""Whole models in half precision: typed throughout, few Casts, and the same answers in onnxruntime."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sbonnx.spec import Array
from tests.precision.converting import (
    assert_few_casts,
    casts,
    convert,
    made,
    normal,
    ops_by_type,
    types,
    whys,
)
from tests.support.models import model, run

LAYERNORM = """agraph (float[N,6,16] x) => (float[N,6,16] y) {
    t = Tanh (x)  l = Mul (t, wide)  m = ReduceMean <axes = [-1]> (l)
    d = Sub (l, m)  s = Pow (d, two)  v = ReduceMean <axes = [-1]> (s)
    e = Add (v, eps)  r = Sqrt (e)  n = Div (d, r)  g = Mul (n, gamma)  y = Add (g, beta) }"""


def layernorm(eps: float, opset: int = 17) -> onnx.ModelProto:
    return model(LAYERNORM, opset=opset, two=np.float32(2), eps=np.float32(eps), wide=np.float32(4), gamma=16, beta=16)


def close(proto: onnx.ModelProto, other: onnx.ModelProto, feed: dict[str, Array], room: float = 4e-3) -> None:
    """Every output, at both ends of optimisation, finite and as in float."""
    expected = run(proto, feed)
    for level in ("off", "all"):
        for name, value in run(other, feed, level=level).items():
            assert np.isfinite(value).all()
            scale = max(1.0, float(np.abs(expected[name]).max()))
            assert np.abs(value - expected[name]).max() <= room * scale, name


def test_a_small_epsilon_is_enlarged_where_nothing_shows_it() -> None:
    proto, feeds = layernorm(1e-12), normal(4, 6, 16)
    report = convert(proto, feeds)
    assert any("1e-12, which is 0 in fp16, is 6.1e-05 now" in note for note in report.notes), report.notes
    assert types(made(report))["r"] == "fp16"
    close(proto, made(report), feeds[0])
    flat = {"x": np.ones((1, 6, 16), np.float32)}  # no variance, as of padding: 0 / sqrt(eps), not 0 / 0
    assert np.isfinite(run(made(report), flat)["y"]).all()


def test_a_small_epsilon_keeps_its_division_in_float_where_it_counts() -> None:
    proto = layernorm(1e-12)
    feeds = [{"x": feed["x"] * np.float32(np.geomspace(1e-4, 1, 6))[:, None]} for feed in normal(4, 6, 16)]
    report = convert(proto, feeds)
    kinds = types(made(report))
    assert {kinds[name] for name in "mdsver"} == {"fp32"}
    assert kinds["t"] == kinds["g"] == "fp16"
    assert casts(made(report)) == {"fp32 -> fp16": 2, "fp16 -> fp32": 2}
    close(proto, made(report), feeds[0])
    flat = {"x": np.ones((1, 6, 16), np.float32)}
    assert np.isfinite(run(made(report), flat)["y"]).all()


def test_a_norm_at_an_input_stays_whole() -> None:
    """onnxruntime refuses a float16 one straight behind a Cast."""
    proto = model(LAYERNORM.replace("t = Tanh (x)  l = Mul (t, wide)", "l = Identity (x)"), two=np.float32(2),
                  eps=np.float32(1e-5), gamma=16, beta=16)  # fmt: skip
    feeds = normal(4, 6, 16)
    close(proto, made(convert(proto, feeds)), feeds[0])
    free = made(convert(proto, feeds, keep_io=False))
    assert not casts(free)
    close(proto, made(convert(proto, feeds, backend="tensorrt")), feeds[0])


def test_the_usual_epsilon_is_no_reason() -> None:
    report = convert(layernorm(1e-5), normal(4, 6, 16))
    assert ops_by_type(made(report))["Div"] == {"fp16"}
    assert casts(made(report)) == {"fp32 -> fp16": 1, "fp16 -> fp32": 1}
    assert not whys(report)


MASK = """agraph (float[N,2,6,8] q, float[N,2,8,6] k, int64[N,6] m) => (float[N,2,6,6] y) {
    s = MatMul (q, k)  f = Cast <to = 1> (m)  i = Sub (one, f)  h = Mul (i, huge)  u = Unsqueeze (h, axes)
    a = Add (s, u)  y = Softmax <axis = -1> (a) }"""


@pytest.mark.parametrize("huge", [-3.4028235e38, -1e9, -1e5, -1e4])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_masks_stay_masks(huge: float, kind: Literal["fp16", "bf16"]) -> None:
    proto = model(MASK, one=np.float32(1), huge=np.float32(huge), axes=np.array([1, 2], np.int64))
    rng = np.random.default_rng(0)
    feeds: list[dict[str, Any]] = [
        {
            "q": rng.standard_normal((2, 2, 6, 8)).astype(np.float32),
            "k": rng.standard_normal((2, 2, 8, 6)).astype(np.float32),
            "m": np.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]], np.int64),
        }
        for _ in range(3)
    ]
    report = convert(proto, feeds, kind)
    assert types(made(report))["a"] == kind, whys(report)
    changed = any("the mask" in note for note in report.notes)
    assert changed == (abs(huge) > (65504 if kind == "fp16" else 3.39e38))
    if kind == "fp16":
        close(proto, made(report), feeds[0])
        unseen = {**feeds[0], "m": np.zeros((2, 6), np.int64)}  # a row of nothing but padding
        assert np.isfinite(run(made(report), unseen)["y"]).all()


def test_a_huge_constant_that_is_no_mask_stays_float() -> None:
    proto = model(
        """agraph (float[N,4] x) => (float[N,4] y, float[N,4] z) {
            a = Mul (x, huge)  y = Softmax (a)  z = Mul (a, tiny) }""",
        huge=np.float32(-1e9), tiny=np.float32(1e-9),
    )  # fmt: skip
    feeds = [{"x": np.abs(feed["x"])} for feed in normal(4, 4)]
    report = convert(proto, feeds)
    assert types(made(report))["a"] == "fp32"
    close(proto, made(report), feeds[0])


def test_limits_past_the_range_are_clamped() -> None:
    proto = model(
        "agraph (float[N,4] x) => (float[N,4] y) { c = Clip (x, zero, top)  y = Max (c, low) }",
        zero=np.float32(0), top=np.float32(3.4e38), low=np.float32(-1e9),
    )  # fmt: skip
    feeds = normal(4, 4)
    report = convert(proto, feeds)
    assert ops_by_type(made(report))["Clip"] == {"fp16"}
    assert sum("its limit" in note for note in report.notes) == 2
    close(proto, made(report), feeds[0])


def test_resize_reads_its_scales_in_float() -> None:
    proto = model(
        """agraph (float[N,2,4,4] x) => (float[N,2,8,8] y) {
            r = Relu (x)  e = Resize <mode = "linear"> (r, , scales)  y = Tanh (e) }""",
        scales=np.array([1, 1, 2, 2], np.float32),
    )
    feeds = normal(2, 2, 4, 4)
    report = convert(proto, feeds)
    assert ops_by_type(made(report))["Resize"] == {"fp16"}
    assert [t.data_type for t in made(report).graph.initializer] == [TensorProto.FLOAT]
    close(proto, made(report), feeds[0])


def test_a_constant_of_both_types_is_written_twice() -> None:
    proto = model(
        "agraph (float[N,4] x) => (float[N,4] y) { l = Mul (x, big)  a = Add (l, w)  b = Tanh (a)  y = Add (b, w) }",
        big=np.float32(5e4), w=4,
    )  # fmt: skip
    feeds = normal(4, 4, scale=3)
    report = convert(proto, feeds)
    kinds = types(made(report))
    assert kinds["a"] == "fp32"
    assert kinds["b"] == "fp32" or kinds["y"] == "fp32"
    assert sorted(t.data_type for t in made(report).graph.initializer if t.dims == [4]) == [1, 10]
    close(proto, made(report), feeds[0])


def test_inputs_and_outputs_keep_type_and_name() -> None:
    """An output that is read inside; an input of a float op and a shape; one that passes integers."""
    proto = model(
        """agraph (float[N,4] x, int64[N,4] i) => (float[N,4] a, float[N,4] y, int64[M] s) {
            a = Relu (x)  s = Shape (x)  f = Cast <to = 1> (i)  b = Mul (a, f)  y = Sigmoid (b) }"""
    )
    feeds = [{**feed, "i": np.arange(16).reshape(4, 4)} for feed in normal(4, 4)]
    report = convert(proto, feeds)
    kinds = types(made(report))
    assert (kinds["x"], kinds["a"], kinds["y"], kinds["f"], kinds["b"]) == ("fp32", "fp32", "fp32", "fp16", "fp16")
    assert casts(made(report)) == {"fp32 -> fp16": 1, "fp16 -> fp32": 2, "other -> fp16": 1}
    assert_few_casts(made(report))
    close(proto, made(report), feeds[0])
    free = made(convert(proto, feeds, keep_io=False))
    kinds = types(free)
    assert (kinds["x"], kinds["a"], kinds["y"], kinds["s"]) == ("fp16", "fp16", "fp16", "other")
    assert casts(free) == {"other -> fp16": 1}
    assert [value.name for value in free.graph.output] == ["a", "y", "s"]
    found = run(free, {**feeds[0], "x": feeds[0]["x"].astype(np.float16)})
    assert found["y"] == pytest.approx(run(proto, feeds[0])["y"], abs=2e-3)


def test_whole_numbers_stay_whole() -> None:
    """Float16 has every whole number up to 2,048 and not 2,049."""
    text = """agraph (int64[N] i, float[N] x) => (float[N] y, int64[N] j) {
        f = Cast <to = 1> (i)  g = Add (f, x)  y = Tanh (g)  j = Cast <to = 7> (f) }"""
    for top, kind in ((2000, "fp16"), (3001, "fp32")):
        feeds: list[dict[str, Any]] = [{"i": np.arange(top - 8, top), "x": np.zeros(8, np.float32)}]
        report = convert(model(text), feeds)
        assert types(made(report))["f"] == kind
        assert (run(made(report), feeds[0])["j"] == feeds[0]["i"]).all()


def branching() -> onnx.ModelProto:
    """x -> relu -> If (p): relu * w | relu * 3e4 * 3e-5 -> sigmoid."""
    value = helper.make_tensor_value_info
    then = helper.make_graph(
        [helper.make_node("Mul", ["r", "w"], ["t1"]), helper.make_node("Tanh", ["t1"], ["t"])],
        "then", [], [value("t", TensorProto.FLOAT, ["N", 4])],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Mul", ["r", "big"], ["o1"]), helper.make_node("Mul", ["o1", "w"], ["o"])],
        "other", [], [value("o", TensorProto.FLOAT, ["N", 4])],
    )  # fmt: skip
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("If", ["p"], ["c"], then_branch=then, else_branch=other),
        helper.make_node("Sigmoid", ["c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, ["N", 4]), value("p", TensorProto.BOOL, [])],
        [value("y", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(np.arange(4, dtype=np.float32), "w"), numpy_helper.from_array(np.float32(5e4), "big")],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(proto)
    return proto


@pytest.mark.parametrize("picks", [(True,), (True, False)])
def test_branches_read_what_is_outside_in_their_type(picks: tuple[bool, ...]) -> None:
    proto = branching()
    feeds = [{**feed, "p": np.array(pick)} for feed in normal(4, 4) for pick in picks]
    report = convert(proto, feeds)
    kinds = types(made(report))
    assert kinds["r"] == kinds["t1"] == "fp16"
    assert kinds["o1"] == kinds["c"] == "fp32"
    assert any("no sample reached" in line for line in whys(report)) == (len(picks) == 1)
    assert_few_casts(made(report))
    for pick in (True, False):
        close(proto, made(report), {**feeds[0], "p": np.array(pick)})


def test_the_body_of_a_loop_stays_float() -> None:
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["s", "r"], ["s2"])],
        "body",
        [value("n", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("s", TensorProto.FLOAT, ["N", 4])],
        [value("on", TensorProto.BOOL, []), value("s2", TensorProto.FLOAT, ["N", 4])],
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Loop", ["trips", "yes", "r"], ["l"], body=body),
        helper.make_node("Tanh", ["l"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, ["N", 4])], [value("y", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(np.int64(3), "trips"), numpy_helper.from_array(np.array(True), "yes")],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = normal(4, 4)
    report = convert(proto, feeds)
    kinds = types(made(report))
    assert kinds["s2"] == kinds["l"] == "fp32"
    assert any("the body of a Loop" in line for line in whys(report))
    close(proto, made(report), feeds[0])


def test_arithmetic_on_shapes_stays_exact() -> None:
    """The size of a picture as float, times a scale, as integers again: 3,000 x 0.5, which float16 would round."""
    proto = model(
        """agraph (float[1,1,H,W] x) => (float[1,1,A,B] y) {
            s = Shape <start = 2> (x)  f = Cast <to = 1> (s)  h = Mul (f, half)  i = Cast <to = 7> (h)
            n = Concat <axis = 0> (ones, i)  r = Resize <mode = "nearest"> (x, , , n)  y = Tanh (r) }""",
        half=np.float32(0.5), ones=np.array([1, 1], np.int64),
    )  # fmt: skip
    feeds = normal(1, 1, 2, 4098, count=1)
    report = convert(proto, feeds, simplify=False)
    assert types(made(report))["h"] == "fp32"
    assert types(made(report))["r"] == "fp16"
    assert run(made(report), feeds[0])["y"].shape == (1, 1, 1, 2049)


@pytest.mark.parametrize("op", ["GridSample", "LSTM"])
def test_what_loses_by_it_stays_float(op: str) -> None:
    if op == "GridSample":
        text = (
            "agraph (float[N,1,8,8] x, float[N,4,4,2] g) => (float[N,1,4,4] y) { s = GridSample (x, g)  y = Tanh (s) }"
        )
        proto = model(text)
        feeds = [{**feed, "g": np.full((1, 4, 4, 2), 0.1, np.float32)} for feed in normal(1, 1, 8, 8)]
    else:
        text = """agraph (float[5,N,4] x) => (float[5,1,N,3] y) {
            h = LSTM <hidden_size = 3> (x, w, r)  y = Tanh (h) }"""
        proto = model(text, w=(1, 12, 4), r=(1, 12, 3))
        feeds = normal(5, 2, 4)
    report = convert(proto, feeds)
    assert ops_by_type(made(report))[op] <= {"fp32", "other"}
    assert ops_by_type(made(report))["Tanh"] == {"fp16"}
    close(proto, made(report), feeds[0])


def test_a_custom_operator_stays_float() -> None:
    proto = model("agraph (float[N,4] x) => (float[N,4] y) { a = Relu (x)  g = com.microsoft.Trilu (a)  y = Tanh (g) }"
                  .replace("com.microsoft.Trilu", "Neg"))  # fmt: skip
    proto.graph.node[1].op_type, proto.graph.node[1].domain = "Trilu", "com.microsoft"
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    feeds = normal(4, 4)
    report = convert(proto, feeds)
    assert any("is not an ONNX operator" in line for line in whys(report))
    assert any("type of 'g' is not known" in line for line in whys(report))
    assert casts(made(report)) == {"fp32 -> fp16": 1, "fp16 -> fp32": 1}
    close(proto, made(report), feeds[0])
