"""Analytic bias correction: expected inputs against grids of quantiles, whole graphs against onnxruntime."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sbonnx
from sbonnx import graph as graphs
from sbonnx.correct import record_normals
from sbonnx.correct.analytic import clipped, rectified, spreads
from sbonnx.spec import Array
from tests.support.models import model, run

RNG = np.random.default_rng(11)

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "conv": ("Conv", {"w": (5, 4, 3, 3)}),
    "conv with bias": ("Conv", {"w": (5, 4, 3, 3), "b": 5}),
    "grouped": ("Conv <group = 2>", {"w": (6, 2, 3, 3)}),
    "depthwise": ("Conv <group = 4>", {"w": (8, 1, 3, 3)}),
    "transposed": ("ConvTranspose <strides = [2,2]>", {"w": (4, 5, 2, 2)}),
    "transposed, grouped": ("ConvTranspose <group = 2, strides = [2,2]>", {"w": (4, 3, 2, 2), "b": 6}),
}


def quantized(text: str, weights: dict[str, Any], feeds: list[dict[str, Any]] | None, **more: Any) -> Any:
    proto = model(text, **weights)
    wishes: dict[str, Any] = {"bits": "w3a0", "W.ROUNDING.TYPE": "nearest", "BIAS_CORRECTION": "analytic"}
    wishes |= {"SCHEDULE.FUSE_BN": False, **more}
    report = sbonnx.quantize(proto, feeds, backend="virtual", verify=False, **wishes)
    assert report.quantized is not None
    return proto, report


def numbers(channels: int = 4) -> dict[str, Any]:
    return {end: RNG.uniform(0.5, 1.5, channels).astype(np.float32) for end in "gtmv"}


@pytest.mark.parametrize("name", LAYERS)
def test_an_input_at_its_mean_gives_the_float_output(name: str) -> None:
    """A batch norm in front, fed its mean everywhere, gives beta everywhere: what the correction reckons with."""
    call, weights = LAYERS[name]
    stats = numbers()
    operands = "n, w, b" if "b" in weights else "n, w"
    text = f"""g (float[N,4,5,5] x) => (float[N,c,h,u] y) {{
        n = BatchNormalization (x, g, t, m, v)
        y = {call} ({operands})
    }}"""
    x = {"x": np.broadcast_to(stats["m"].reshape(1, 4, 1, 1), (2, 4, 5, 5)).copy()}
    errors = []
    for way in ("none", "analytic"):
        proto, report = quantized(text, {**weights, **stats}, [x], BIAS_CORRECTION=way)
        errors.append(float(np.abs(run(report.quantized, x)["y"] - run(proto, x)["y"]).max()))
    if name.startswith("transposed"):  # each output is reached by one element of the kernel: right on average
        found, reference = run(report.quantized, x)["y"], run(proto, x)["y"]
        axes = (0, 2, 3)
        np.testing.assert_allclose(found.mean(axis=axes), reference.mean(axis=axes), rtol=1e-4, atol=1e-4)
    else:
        assert errors[1] < 1e-4 < 1e-2 < errors[0], errors


def test_a_linear_layer_behind_a_rectified_pool() -> None:
    """No data at all: weight_only, on a network whose inputs are what its batch norm says."""
    stats = numbers(8)
    text = """g (float[N,8,6,6] x) => (float[N,5] y) {
        n = BatchNormalization (x, g, t, m, v)
        r = Relu (n)
        p = GlobalAveragePool (r)
        f = Flatten (p)
        y = Gemm <transB = 1> (f, w)
    }"""
    noise = RNG.standard_normal((400, 8, 6, 6)).astype(np.float32)
    x = {"x": (noise * np.sqrt(stats["v"]).reshape(1, 8, 1, 1) + stats["m"].reshape(1, 8, 1, 1)).astype(np.float32)}
    means = []
    for way in ("none", "analytic"):
        proto, report = quantized(text, {"w": (5, 8), **stats}, None, MODE="weight_only", BIAS_CORRECTION=way)
        means.append(np.abs((run(report.quantized, x)["y"] - run(proto, x)["y"]).mean(axis=0)).max())
    assert means[1] < 0.1 * means[0], means
    assert any("1 biases were corrected" in note for note in report.notes)


def test_what_is_not_known_is_named() -> None:
    text = "g (float[N,4,5,5] x) => (float[N,c,h,u] y) { y = Conv (x, w) }"
    _, report = quantized(text, {"w": (5, 4, 3, 3)}, [{"x": np.arange(100, dtype=np.float32).reshape(1, 4, 5, 5)}])
    (said,) = [refusal for refusal in report.refusals if refusal.what == "correct bias"]
    assert said.why == "no batch norm determines the mean of its input"


GRAPH_RNG = np.random.default_rng(7)
POINTS = np.linspace(-8.5, 8.5, 40_001)
WEIGHTS = np.exp(-0.5 * POINTS**2) / np.exp(-0.5 * POINTS**2).sum()
"""The standard normal on a fine grid."""


@settings(max_examples=50, deadline=None)
@given(
    st.floats(-5, 5),
    st.one_of(st.just(0.0), st.floats(0.01, 5)),
    st.one_of(st.just(-np.inf), st.floats(-6, 3)),
    st.one_of(st.just(np.inf), st.floats(3, 6)),
)
def test_clipped_normal(mean: float, std: float, low: float, high: float) -> None:
    values = np.clip(mean + std * POINTS, low, high)
    expected = float(values @ WEIGHTS)
    spread = float(np.sqrt(np.maximum((values - expected) ** 2 @ WEIGHTS, 0)))
    found = clipped(np.array([mean]), np.array([std]), low, high)
    np.testing.assert_allclose(found[0], expected, atol=1e-4)
    np.testing.assert_allclose(found[1], spread, atol=2e-3)


def test_far_from_the_edge_nothing_or_everything_is_left() -> None:
    first, second = rectified(np.array([50.0, -50.0, 3.0, -3.0]), np.array([1.0, 1.0, 0.0, 0.0]))
    np.testing.assert_allclose(first, [50, 0, 3, 0], atol=1e-12)
    np.testing.assert_allclose(second, [2501, 0, 9, 0], atol=1e-9)


FOLLOWED = {
    "relu": "y = Relu(n)",
    "clip": "y = Clip(n, low, high)",
    "leaky": "y = LeakyRelu<alpha=0.3>(n)",
    "prelu": "y = PRelu(n, slope)",
    "twice": "r = Relu(n)  s = Mul(r, k)  y = Sub(s, r)",
    "sum": "a = Add(n, o)  y = Relu(a)",
    "constant": "a = Div(n, k)  e = Sub(one, a)  y = Relu(e)",
    "concat": "r = Relu(o)  y = Concat<axis=1>(n, r)",
    "pool": "r = Relu(n)  p = GlobalAveragePool(r)  f = Flatten(p)  y = Gemm<transB=1>(f, w, b)",
    "flat": "r = Relu(n)  y = Reshape(r, whole)",
    "slice": "r = Relu(n)  s = Slice(r, zero, four, two)  y = Pad(s, pads)",
    "conv": "r = Relu(n)  y = Conv<group=2>(r, wc, bc)",
    "transpose": "r = Relu(n)  y = ConvTranspose<strides=[2,2]>(r, wt)",
}
CONSTANTS: dict[str, Array] = {
    "low": np.float32(-0.2),
    "high": np.float32(0.9),
    "slope": GRAPH_RNG.uniform(-0.5, 0.5, (4, 1, 1)).astype(np.float32),
    "k": GRAPH_RNG.uniform(0.5, 1.5, (4, 1, 1)).astype(np.float32),
    "one": np.float32(1.0),
    "w": GRAPH_RNG.standard_normal((5, 4)).astype(np.float32),
    "b": GRAPH_RNG.standard_normal(5).astype(np.float32),
    "whole": np.array([0, -1]),
    "zero": np.array([0]),
    "four": np.array([4]),
    "two": np.array([2]),
    "pads": np.array([0, 1, 0, 0, 0, 2, 0, 0]),
    "wc": GRAPH_RNG.standard_normal((4, 2, 3, 3)).astype(np.float32),
    "bc": GRAPH_RNG.standard_normal(4).astype(np.float32),
    "wt": GRAPH_RNG.standard_normal((4, 3, 2, 2)).astype(np.float32),
}
"""A kernel as large as its strides: every output of the ConvTranspose is reached once."""


@pytest.mark.parametrize("name", FOLLOWED)
def test_means_are_those_of_normal_data(name: str) -> None:
    """Data of the spread that the batch norms reckon with, two independent tensors of it."""
    body = FOLLOWED[name]
    used: dict[str, Any] = {key: value for key, value in CONSTANTS.items() if re.search(rf"[(, ]{key}[,)]", body)}
    numbers: dict[str, Any] = {end: GRAPH_RNG.uniform(0.5, 1.5, 4).astype(np.float32) for end in "gtmv"}
    dims = "c" if name in ("pool", "flat") else "c,h,u"
    text = f"""g (float[N,4,6,6] x, float[N,4,6,6] z) => (float[M,{dims}] y) {{
        n = BatchNormalization(x, g, t, m, v)
        o = BatchNormalization(z, g, m, m, v)
        {body}
    }}"""
    proto = model(text, **numbers, **used)
    graph = graphs.load(proto)
    record_normals(graph)
    if name == "slice":
        assert "y" in spreads(graph)
    found = spreads(graph)["y"].mean
    along = (1, 4, 1, 1)
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for tensor in "xz":
        noise = rng.standard_normal((4000, 4, 6, 6)).astype(np.float32)
        feeds[tensor] = numbers["m"].reshape(along) + noise * np.sqrt(numbers["v"].reshape(along))
    measured = run(proto, feeds)["y"]
    exact = np.moveaxis(measured, 1, 0).reshape(measured.shape[1], -1).mean(axis=1, dtype=np.float64)
    np.testing.assert_allclose(found, exact, atol=0.01 + 0.03 * np.abs(exact).max())


@pytest.mark.parametrize(
    "body",
    [
        "y = MaxPool<kernel_shape=[2,2]>(n)",  # the mean of a maximum depends on how neighbours hang together
        "y = Mul(n, n)",
        "y = Relu(x)",
        "y = Slice(n, zero, two, one_axis)",
        "y = Conv<pads=[1,1,1,1]>(x, wc)",
    ],
)
def test_what_batch_norms_do_not_tell_is_not_guessed(body: str) -> None:
    numbers: dict[str, Any] = {end: GRAPH_RNG.uniform(0.5, 1.5, 4).astype(np.float32) for end in "gtmv"}
    constants: dict[str, Any] = {
        "zero": np.array([0]),
        "two": np.array([2]),
        "one_axis": np.array([1]),
        "wc": (4, 4, 3, 3),
    }
    used = {key: value for key, value in constants.items() if f" {key}" in body}
    text = f"""g (float[N,4,6,6] x) => (float[d0,d1,d2,d3] y, float[N,4,6,6] n) {{
        n = BatchNormalization(x, g, t, m, v)
        {body}
    }}"""
    graph = graphs.load(model(text, **numbers, **used))
    record_normals(graph)
    assert set(spreads(graph)) == {"n"}
