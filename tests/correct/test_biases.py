"""Biases of linear nodes: what is found is what onnxruntime adds, and giving some changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx import graph as graphs
from sbonnx.correct import bias_of, biases_of, give_biases
from sbonnx.graph import Graph
from sbonnx.graph.query import constant, node_by_name
from sbonnx.spec import Array
from tests.patterns.layers import LAYERS, Layer
from tests.support.models import model, run


def layer_model(layer: Layer) -> onnx.ModelProto:
    dims = ",".join("abcdef"[: layer.rank])
    return model(f"g (float[{layer.dims(layer.x)}] x) => (float[{dims}] y) {{ y = {layer.call()} }}", **layer.weights())


def outputs(graph: Graph, feeds: dict[str, Array]) -> Array:
    return run(graphs.to_proto(graph), feeds)["y"]


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "matmul"])
def test_a_bias_is_given_that_changes_nothing_and_is_then_added_output_by_output(name: str) -> None:
    layer = LAYERS[name]
    proto = layer_model(layer)
    x = {"x": np.random.default_rng(1).standard_normal(layer.x).astype(np.float32)}
    graph = graphs.load(proto)
    give_biases(graph)
    before = run(proto, x)["y"]
    np.testing.assert_allclose(outputs(graph, x), before, rtol=1e-5, atol=1e-5)
    (node,) = graph.nodes
    bias = bias_of(graph, node)
    if name in ("gemm_full_bias", "gemm_row_bias"):
        assert bias is None  # it differs from row to row
        return
    assert bias is not None
    added = np.arange(1, layer.outputs + 1, dtype=np.float32)
    values = constant(bias)
    assert values is not None
    bias.values = values + added.reshape(values.shape)
    along = added.reshape([1, -1, *(1 for _ in before.shape[2:])])
    np.testing.assert_allclose(outputs(graph, x), before + along, rtol=1e-5, atol=1e-5)
    assert give_biases(graph) == ()


def test_the_add_after_a_matmul_holds_its_bias() -> None:
    for add in ("Add(m, b)", "Add(b, m)"):
        text = f"g (float[2,5,4] x) => (float[2,5,3] y) {{ m = MatMul(x, w)  y = {add} }}"
        graph = graphs.load(model(text, w=(4, 3), b=(1, 3)))
        assert [tensor.name for tensor in biases_of(graph).values()] == ["b"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("g (float[2,4] x) => (float[2,3] y, float[2,3] m) { m = MatMul(x, w)  y = Add(m, b) }", "an output"),
        ("g (float[2,4] x) => (float[2,3] y) { m = MatMul(x, w)  a = Add(m, b)  y = Mul(a, m) }", "read twice"),
        ("g (float[2,4] x) => (float[2,3] y) { m = MatMul(x, w)  a = Add(m, b)  y = Mul(a, b) }", "shared"),
        ("g (float[2,4] x, float[3] b1) => (float[2,3] y) { m = MatMul(x, w)  y = Add(m, b1) }", "computed"),
        ("g (float[2,4] x) => (float[2,3] y) { m = MatMul(x, w)  y = Add(m, one) }", "one for all"),
        ("g (float[2,4] x) => (float[2,3] y) { y = Gemm<beta=0.5>(x, w, b) }", "scaled"),
        ("g (float[2,4] x) => (float[2,3] y) { y = Relu(x) }", "not linear"),
    ],
)
def test_what_is_no_bias_of_its_own(text: str, why: str) -> None:
    text = text.replace("float[2,3] y) { y = Relu", "float[2,4] y) { y = Relu")
    shapes: dict[str, Any] = {"w": (4, 3), "b": (3,), "one": (1,)}
    used = {name: shape for name, shape in shapes.items() if f" {name}" in text}
    graph = graphs.load(model(text, **used))
    assert biases_of(graph) == {}, why
    assert all(bias_of(graph, node) is None for node in graph.nodes)


def test_a_shared_bias_is_copied_for_each() -> None:
    text = """g (float[1,2,5,5] x) => (float[1,3,3,3] y, float[1,3,3,3] z) {
        y = Conv(x, w, b)
        z = Conv(x, v, b)
    }"""
    graph = graphs.load(model(text, w=(3, 2, 3, 3), v=(3, 2, 3, 3), b=(3,)))
    assert biases_of(graph) == {}
    assert len(give_biases(graph)) == 1  # the other one keeps the old one, which is its own now
    assert len({id(tensor) for tensor in biases_of(graph).values()}) == 2


def test_a_computed_weight_or_bias_is_left_alone() -> None:
    text = """g (float[1,2,5,5] x, float[3,2,3,3] w) => (float[1,3,3,3] y, float[1,3,3,3] z) {
        y = Conv(x, w)
        c = Relu(b)
        z = Conv(x, v, c)
    }"""
    graph = graphs.load(model(text, v=(3, 2, 3, 3), b=(3,)))
    assert give_biases(graph) == ()


def test_branches_are_given_biases_as_well() -> None:
    text = """g (bool c, float[1,2,5,5] x) => (float[1,3,3,3] y) {
        y = If (c) <then_branch = t () => (float[1,3,3,3] a) { a = Conv(x, w) },
                    else_branch = e () => (float[1,3,3,3] d) { d = Conv(x, v) }>
    }"""
    graph = graphs.load(model(text, w=(3, 2, 3, 3), v=(3, 2, 3, 3)))
    assert len(give_biases(graph)) == 2
    assert len(biases_of(graph)) == 2
    assert set(biases_of(graph)) <= set(node_by_name(graph))
