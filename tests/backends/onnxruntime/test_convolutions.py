"""Widened channels: the same integers, in onnxruntime's own execution of the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx import graph as graphs
from sbonnx.backends.onnxruntime.convolutions import align
from sbonnx.backends.onnxruntime.stems import widen_stems
from sbonnx.spec import Array
from tests.support.models import model, run


def quantized(text: str, *convs: tuple[str, tuple[int, ...]], bias: str = "codes", **more: Any) -> onnx.ModelProto:
    """A model whose convolutions have int8 weights ``w_NAME`` and biases ``b_NAME`` behind DequantizeLinear."""
    rng = np.random.default_rng(3)
    made: dict[str, Any] = {"s": np.float32(0.03), "z": np.uint8(117), **more}
    nodes = []
    for name, shape in convs:
        out = shape[0]
        made[f"w_{name}"] = rng.integers(-127, 128, shape).astype(np.int8)
        made[f"ws_{name}"] = rng.uniform(0.002, 0.02, out).astype(np.float32)
        made[f"wz_{name}"] = np.zeros(out, np.int8)
        nodes.append(f"wd_{name} = DequantizeLinear <axis = 0> (w_{name}, ws_{name}, wz_{name})")
        if bias == "codes":
            made[f"b_{name}"] = rng.integers(-900, 900, out).astype(np.int32)
            made[f"bs_{name}"] = (made["s"] * made[f"ws_{name}"]).astype(np.float32)
            made[f"bz_{name}"] = np.zeros(out, np.int32)
            nodes.append(f"bd_{name} = DequantizeLinear <axis = 0> (b_{name}, bs_{name}, bz_{name})")
        else:
            made[f"bd_{name}"] = rng.standard_normal(out).astype(np.float32)
    return model(text.replace("{", "{\n" + "\n".join(nodes) + "\n", 1), **made)


STEM = """agraph (float[N,C,32,32] x) => (float[N,O,P,P] y) {
    q = QuantizeLinear (x, s, z)
    d = DequantizeLinear (q, s, z)
    c = Conv <pads = [1,1,1,1]> (d, wd_a, bd_a)
    r = Relu (c)
    rq = QuantizeLinear (r, s, z)
    y = DequantizeLinear (rq, s, z)
}"""

MOBILE = """agraph (float[N,8,12,12] x) => (float[N,8,6,6] y) {
    q = QuantizeLinear (x, s, z)
    d = DequantizeLinear (q, s, z)
    c1 = Conv (d, wd_a, bd_a)
    r1 = Relu (c1)
    q1 = QuantizeLinear (r1, s, z)
    d1 = DequantizeLinear (q1, s, z)
    c2 = Conv <pads = [1,1,1,1], strides = [2,2], group = 24> (d1, wd_b, bd_b)
    q2 = QuantizeLinear (c2, s, z)
    d2 = DequantizeLinear (q2, s, z)
    c3 = Conv (d2, wd_c, bd_c)
    q3 = QuantizeLinear (c3, s, z)
    y = DequantizeLinear (q3, s, z)
}"""


def aligned(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    graph = graphs.load(proto, opset=1)
    done = [*align(graph), *widen_stems(graph)]
    wide = graphs.to_proto(graph)
    onnx.checker.check_model(wide, full_check=True)
    return wide, done


def images(*shape: int, seed: int = 0) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal(shape).astype(np.float32)}


@settings(max_examples=25, deadline=None)
@given(
    channels=st.integers(1, 9),
    out=st.integers(1, 9),
    kernel=st.sampled_from([1, 3, 5]),
    bias=st.sampled_from(["codes", "float"]),
)
def test_stems_give_the_same_integers(channels: int, out: int, kernel: int, bias: str) -> None:
    side = 32 + 2 - kernel + 1
    text = STEM.replace("C,32", f"{channels},32").replace("O,P,P", f"{out},{side},{side}")
    proto = quantized(text, ("a", (out, channels, kernel, kernel)), bias=bias)
    wide, done = aligned(proto)
    assert len(done) == (channels % 4 != 0)
    feed = images(2, channels, 32, 32)
    np.testing.assert_array_equal(run(proto, feed)["y"], run(wide, feed)["y"])


@pytest.mark.parametrize("bias", ["codes", "float"])
def test_depthwise_chains_are_widened_together(bias: str) -> None:
    proto = quantized(MOBILE, ("a", (24, 8, 1, 1)), ("b", (24, 1, 3, 3)), ("c", (8, 24, 1, 1)), bias=bias)
    wide, done = aligned(proto)
    assert len(done) == 1
    assert "24 channels widened to 32" in done[0]
    depthwise = [node for node in wide.graph.node if node.op_type == "Conv"][1]
    assert {a.name: a.i for a in depthwise.attribute}["group"] == 32
    for level in ("off", "all"):
        feed = images(2, 8, 12, 12)
        np.testing.assert_array_equal(run(proto, feed, level=level)["y"], run(wide, feed, level=level)["y"])


def test_a_tensor_that_something_else_reads_keeps_its_channels() -> None:
    text = MOBILE.replace("float[N,8,6,6] y)", "float[N,8,6,6] y, float[N,24,12,12] r1)")
    proto = quantized(text, ("a", (24, 8, 1, 1)), ("b", (24, 1, 3, 3)), ("c", (8, 24, 1, 1)))
    assert aligned(proto)[1] == []


def test_whole_multiples_large_kernels_and_small_images_stay() -> None:
    fine = quantized(STEM.replace("C,32", "4,32").replace("O,P,P", "5,32,32"), ("a", (5, 4, 3, 3)))
    large = quantized(STEM.replace("C,32", "3,32").replace("O,P,P", "5,28,28"), ("a", (5, 3, 7, 7)))
    small = quantized(STEM.replace("C,32,32", "3,8,8").replace("O,P,P", "5,8,8"), ("a", (5, 3, 3, 3)))
    assert [aligned(proto)[1] for proto in (fine, large, small)] == [[], [], []]


def test_a_weight_with_a_zero_point_stays() -> None:
    """The code 0 would not be 0.0."""
    proto = quantized(STEM.replace("C,32", "3,32").replace("O,P,P", "5,32,32"), ("a", (5, 3, 3, 3)))
    for tensor in proto.graph.initializer:
        if tensor.name == "wz_a":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full(5, 3, np.int8), "wz_a"))
    assert aligned(proto)[1] == []


def test_a_shared_weight_is_copied() -> None:
    text = """agraph (float[N,3,32,32] x, float[N,3,32,32] v) => (float[N,5,32,32] y, float[N,5,32,32] w) {
        q = QuantizeLinear (x, s, z)
        d = DequantizeLinear (q, s, z)
        c = Conv <pads = [1,1,1,1]> (d, wd_a, bd_a)
        cq = QuantizeLinear (c, s, z)
        y = DequantizeLinear (cq, s, z)
        w = Conv <pads = [1,1,1,1]> (v, wd_a, bd_a)
    }"""
    proto = quantized(text, ("a", (5, 3, 3, 3)))
    wide, done = aligned(proto)
    assert len(done) == 1
    feed = {**images(1, 3, 32, 32), "v": images(1, 3, 32, 32, seed=1)["x"]}
    for name, value in run(proto, feed).items():
        np.testing.assert_array_equal(run(wide, feed)[name], value)


FOLDED = """agraph (float[N,3,H,W] x) => (float[N,O,P,Q] y) {
    q = QuantizeLinear (x, s, z)
    d = DequantizeLinear (q, s, z)
    c = Conv <strides = [2,2], pads = [PADS]> (d, wd_a, bd_a)
    cq = QuantizeLinear (c, s, z)
    y = DequantizeLinear (cq, s, z)
}"""


@settings(max_examples=40, deadline=None)
@given(
    kernel=st.tuples(st.integers(6, 9), st.integers(6, 9)),
    pads=st.tuples(*[st.integers(0, 5)] * 4),
    sides=st.tuples(st.integers(30, 34), st.integers(30, 34)).map(lambda pair: (2 * pair[0], 2 * pair[1])),
)
def test_folded_taps_give_the_same_integers(
    kernel: tuple[int, int], pads: tuple[int, int, int, int], sides: tuple[int, int]
) -> None:
    out = [(sides[i] + pads[i] + pads[i + 2] - kernel[i]) // 2 + 1 for i in (0, 1)]
    text = FOLDED.replace("H,W", f"{sides[0]},{sides[1]}").replace("O,P,Q", f"5,{out[0]},{out[1]}")
    proto = quantized(text.replace("PADS", ",".join(map(str, pads))), ("a", (5, 3, *kernel)))
    wide, done = aligned(proto)
    feed = images(2, 3, *sides)
    there, here = (run(one, feed, level="all")["y"] for one in (proto, wide))
    np.testing.assert_array_equal(there, here)  # sums of integers, in any order
    apart = np.abs(run(proto, feed)["y"] - run(wide, feed)["y"])
    assert apart.max() <= 0.03 * 1.001  # floats in another order can tip a value to the next code
    assert (apart > 0).mean() < 0.01
    if max(pads) <= 3 and len(set(pads)) == 1:
        assert "SpaceToDepth" in done[0]
        assert "SpaceToDepth" in {node.op_type for node in wide.graph.node}


def test_odd_sides_and_other_strides_are_not_folded() -> None:
    odd = FOLDED.replace("H,W", "63,64").replace("O,P,Q", "5,32,32").replace("PADS", "3,3,3,3")
    single = FOLDED.replace("H,W", "64,64").replace("O,P,Q", "5,64,64").replace("PADS", "3,3,3,3").replace("2,2", "1,1")
    assert [aligned(quantized(text, ("a", (5, 3, 7, 7))))[1] for text in (odd, single)] == [[], []]
