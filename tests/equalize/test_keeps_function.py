"""Whatever scales are chosen, onnxruntime computes the same; and the table of rules knows what each op does."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx import graph as graphs
from sbonnx.equalize.channel_scales import apply
from sbonnx.equalize.rules import RULES
from sbonnx.equalize.scale_trace import Clips, trace
from sbonnx.spec import Array
from tests.support.models import model, run

RELATIVE = 1e-5

CONV = "c = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w, b)"
LAST = "y = Conv <kernel_shape = [1,1]> (r, v)"
W: dict[str, Any] = {"w": (4, 3, 3, 3), "b": 4, "v": (5, 4, 1, 1)}
IMAGE = "agraph (float[2,3,6,6] x) => (float[2,5,H,W] y)"
ROWS = "agraph (float[2,7,8] x) => (float[2,7,6] y)"

CHAINS: dict[str, tuple[str, dict[str, Any], int]] = {
    "relu": (f"{IMAGE} {{ {CONV} r = Relu(c) {LAST} }}", W, 4),
    "leaky": (f"{IMAGE} {{ {CONV} r = LeakyRelu <alpha = 0.1> (c) {LAST} }}", W, 4),
    "prelu": (f"{IMAGE} {{ {CONV} r = PRelu(c, s) {LAST} }}", {**W, "s": (4, 1, 1)}, 4),
    "relu6": (
        f"{IMAGE} {{ {CONV} r = Clip(c, lo, hi) {LAST} }}",
        {**W, "lo": np.float32(0), "hi": np.float32(1.5)},
        4,
    ),
    "pools": (
        f"{IMAGE} {{ {CONV} m = MaxPool <kernel_shape = [2,2]> (c) "
        f"r = AveragePool <kernel_shape = [2,2], pads = [1,1,1,1]> (m) {LAST} }}",
        W,
        4,
    ),
    "pad": (f"{IMAGE} {{ {CONV} r = Pad(c, p) {LAST} }}", {**W, "p": np.array([0, 0, 1, 1, 0, 0, 1, 1])}, 4),
    "two readers": (
        f"{IMAGE} {{ {CONV} r = Relu(c) d = Conv(r, v) e = Conv(r, u) y = Add(d, e) }}",
        {**W, "u": (5, 4, 1, 1)},
        4,
    ),
    "residual": (
        f"{IMAGE} {{ {CONV} d = Conv(x, u) a = Add(c, d) r = Relu(a) e = Conv(r, k) f = Add(r, e) y = Conv(f, v) }}",
        {**W, "u": (4, 3, 1, 1), "k": (4, 4, 1, 1)},
        4,
    ),
    "concat": (
        f"{IMAGE} {{ {CONV} d = Conv(x, u) r = Concat <axis = 1> (c, d) {LAST} }}",
        {"w": (4, 3, 3, 3), "b": 4, "u": (2, 3, 1, 1), "v": (5, 6, 1, 1)},
        6,
    ),
    "depthwise": (
        f"{IMAGE} {{ {CONV} p = Relu(c) d = Conv <group = 4, kernel_shape = [3,3]> (p, k, b) r = Relu(d) {LAST} }}",
        {**W, "k": (4, 1, 3, 3)},
        8,
    ),
    "groups": (
        f"{IMAGE} {{ {CONV} d = Conv <group = 2> (c, k) r = Relu(d) {LAST} }}",
        {**W, "k": (6, 2, 1, 1), "v": (5, 6, 1, 1)},
        10,
    ),
    "transposed": (
        f"{IMAGE} {{ {CONV} d = ConvTranspose <group = 2, strides = [2,2]> (c, k, t) r = Relu(d) {LAST} }}",
        {**W, "k": (4, 3, 2, 2), "t": 6, "v": (5, 6, 1, 1)},
        10,
    ),
    "shuffle": (
        f"{IMAGE} {{ {CONV} g = Reshape(c, s5) t = Transpose <perm = [0,2,1,3,4]> (g) r = Reshape(t, s4) {LAST} }}",
        {**W, "s5": np.array([2, 2, 2, 6, 6]), "s4": np.array([2, 4, 6, 6])},
        4,
    ),
    "split and slice": (
        f"{IMAGE} {{ {CONV} d, e = Split <axis = 1> (c) f = Slice(e, i, j, k) r = Concat <axis = 1> (f, d) {LAST} }}",
        {**W, "i": np.array([1]), "j": np.array([2]), "k": np.array([1]), "v": (5, 3, 1, 1)},
        4,
    ),
    "gate": (
        f"{IMAGE} {{ {CONV} q = Conv(x, u) g = Sigmoid(q) r = Mul(c, g) {LAST} }}",
        {**W, "u": (4, 3, 1, 1)},
        4,
    ),
    "flatten": (
        "agraph (float[2,3,6,6] x) => (float[2,5] y) { " + CONV + " r = Relu(c) m = GlobalAveragePool(r) "
        "f = Flatten(m) h = Gemm <transB = 1, alpha = 0.5> (f, v, z) k = Relu(h) y = Gemm <beta = 2.0> (k, q, z) }",
        {"w": (4, 3, 3, 3), "b": 4, "v": (5, 4), "z": 5, "q": (5, 5)},
        9,
    ),
    "norm": (
        f"{ROWS} {{ n = LayerNormalization <axis = -1> (x, g, s) m = MatMul(n, w) a = Add(m, b) y = MatMul(a, v) }}",
        {"g": 8, "s": 8, "w": (8, 5), "b": 5, "v": (5, 6)},
        13,
    ),
    "attention values": (
        f"{ROWS} {{ m = MatMul(x, w) a = Add(b, m) h = Reshape(a, s) t = Transpose <perm = [0,2,1,3]> (h) "
        "k = MatMul(x, w2) l = Reshape(k, s) q = Transpose <perm = [0,2,3,1]> (l) "
        "o = Transpose <perm = [0,2,1,3]> (l) e = MatMul(o, q) p = Softmax(e) f = MatMul(p, t) "
        "u = Transpose <perm = [0,2,1,3]> (f) r = Reshape(u, z) y = MatMul(r, v) }",
        {
            "w": (8, 8),
            "w2": (8, 8),
            "b": 8,
            "v": (8, 6),
            "s": np.array([0, 0, 2, 4]),
            "z": np.array([0, 0, 8]),
        },
        8,
    ),
}
"""By name: a graph, its constants, and how many of its channels can be scaled."""


def scaled(proto: onnx.ModelProto, seed: int, clips: Clips = "channels") -> tuple[Array, onnx.ModelProto]:
    """Free scales, all from 1/8 to 8, and the model with them."""
    graph = graphs.load(proto)
    traced = trace(graph, RULES, clips)
    drawn = 2.0 ** np.random.default_rng(seed).uniform(-3, 3, len(traced.groups.fixed))
    scales = np.where(traced.groups.fixed, 1.0, drawn)
    assert apply(graph, traced, scales, clips=clips) is None
    return scales[~traced.groups.fixed], graphs.to_proto(graph)


def inputs(proto: onnx.ModelProto, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    return {proto.graph.input[0].name: rng.standard_normal(shape).astype(np.float32)}


@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_any_scales_keep_the_function(name: str, seed: int) -> None:
    text, constants, free = CHAINS[name]
    proto = model(text, seed=seed, **constants)
    scales, made = scaled(proto, seed)
    assert len(scales) == free, "channels that can be scaled"
    feeds = inputs(proto, seed)
    before, after = run(proto, feeds)["y"], run(made, feeds)["y"]
    np.testing.assert_allclose(after, before, rtol=0, atol=RELATIVE * np.abs(before).max())


PINNED = {
    "sigmoid": f"{IMAGE} {{ {CONV} r = Sigmoid(c) {LAST} }}",
    "output": "agraph (float[2,3,6,6] x) => (float[2,5,H,W] y, float[2,4,6,6] c) { " + CONV + f" r = Relu(c) {LAST} }}",
    "beside an input": "agraph (float[2,3,6,6] x, float[2,4,6,6] z) => (float[2,5,6,6] y) { "
    + CONV
    + f" r = Add(c, z) {LAST} }}",
    "shared weight": f"{IMAGE} {{ {CONV} p = Conv(c, k) r = Conv(p, k) {LAST} }}",
    "a number added": f"{IMAGE} {{ {CONV} r = Add(c, one) {LAST} }}",
    "a maximum": f"{IMAGE} {{ {CONV} q = ReduceMax <keepdims = 1, axes = [1]> (c) r = Sub(c, q) {LAST} }}",
}


@pytest.mark.parametrize("name", PINNED)
def test_what_cannot_be_scaled_is_left(name: str) -> None:
    wants = {**W, "k": (4, 4, 1, 1), "one": np.float32(1)}
    used = {key: value for key, value in wants.items() if f" {key}" in PINNED[name] or f", {key}" in PINNED[name]}
    graph = graphs.load(model(PINNED[name], **used))
    traced = trace(graph, RULES)
    last = next(weight for weight in traced.weights if len(weight.outputs) == 5)
    assert traced.groups.fixed[traced.groups.of[last.inputs]].all()
    assert traced.groups.reason(last.inputs) or last.why


def test_a_clip_is_kept_given_bounds_or_opened() -> None:
    text, constants, _ = CHAINS["relu6"]
    proto = model(text, **constants)
    feeds = inputs(proto, 0)
    before = run(proto, feeds)["y"]
    kept, same = scaled(proto, 0, "keep")
    assert not len(kept)
    np.testing.assert_array_equal(run(same, feeds)["y"], before)
    _, opened = scaled(proto, 0, "relu")
    assert sorted(node.op_type for node in opened.graph.node) == ["Conv", "Conv", "Relu"]
    relu = model(CHAINS["relu"][0], **W)
    np.testing.assert_allclose(run(opened, feeds)["y"], run(relu, feeds)["y"], atol=1e-4)


def test_a_bias_that_two_layers_share_is_copied() -> None:
    text = f"{IMAGE} {{ {CONV} p = Relu(c) d = Conv(p, k, b) r = Relu(d) {LAST} }}"
    proto = model(text, **W, k=(4, 4, 1, 1))
    _, made = scaled(proto, 3)
    feeds = inputs(proto, 3)
    np.testing.assert_allclose(run(made, feeds)["y"], run(proto, feeds)["y"], rtol=1e-4, atol=1e-4)


def test_what_would_overflow_is_refused() -> None:
    graph = graphs.load(model(CHAINS["relu"][0], **{**W, "v": np.full((5, 4, 1, 1), 1e38, np.float32)}))
    traced = trace(graph, RULES)
    why = apply(graph, traced, np.where(traced.groups.fixed, 1.0, 1e3))
    assert why is not None and "finite" in why
