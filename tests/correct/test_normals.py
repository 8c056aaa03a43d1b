"""What batch norms say of tensors is what onnxruntime measures, whatever was folded since."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sbonnx import graph as graphs
from sbonnx.correct import own_statistics, record_normals
from sbonnx.graph.query import readers
from sbonnx.pipeline import prepare
from sbonnx.stages.state import read_recipe
from tests.patterns.layers import LAYERS, batchnorm
from tests.support.models import model, run
from tests.support.normed import images, inner, zoo

X = images(40)


@pytest.mark.parametrize("tensor", ["n1", "s2", "n3", "n4", "n5", "n6"])
def test_mean_and_spread_of_the_tensors_that_are_left(tensor: str) -> None:
    """Negative gammas, a Mul behind one, groups, ConvTranspose, Gemm, and one that could not be folded."""
    proto = zoo(X)
    prepared = prepare(proto, *read_recipe(None, "virtual", {"bits": "w8a8"}))
    normal = prepared.graph.info.normals[tensor]
    values = inner(proto, X, tensor)
    axes = tuple(axis for axis in range(values.ndim) if axis != 1)
    np.testing.assert_allclose(normal.mean, values.mean(axis=axes), atol=1e-4)
    np.testing.assert_allclose(normal.std, values.std(axis=axes), rtol=1e-3)
    assert (normal.epsilon >= 0).all()
    assert tensor in {each.name for node in prepared.graph.nodes for each in node.outputs}


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("gemm_full_bias", "gemm_row_bias")])
def test_every_layer_that_a_batch_norm_is_folded_into_gives_the_tensor(name: str) -> None:
    layer = LAYERS[name]
    dims = ",".join("abcdef"[: layer.rank])
    text = f"""g (float[{layer.dims(layer.x)}] x) => (float[{dims}] y) {{
        c = {layer.call()}
        n = BatchNormalization(c, gamma, beta, mean, variance)
        y = Relu(n)
    }}"""
    proto = model(text, **layer.weights(), **batchnorm(layer.outputs))
    prepared = prepare(proto, *read_recipe(None, "virtual", {"bits": "w8a8"}))
    assert list(prepared.graph.info.normals) == ["n"]
    assert "n" in {each.name for node in prepared.graph.nodes for each in node.outputs if node.op == layer.op} or (
        layer.op == "MatMul"
    )


def test_scaling_a_tensor_scales_what_is_said_of_it() -> None:
    graph = graphs.load(zoo(X))
    assert record_normals(graph) == 6
    normal = graph.info.normals["n1"]
    turned = normal.through(-2.0, np.ones(8))
    np.testing.assert_allclose(turned.mean, 1 - 2 * normal.mean)
    np.testing.assert_allclose(turned.std, 2 * normal.std)
    np.testing.assert_allclose(turned.epsilon, 4 * normal.epsilon)
    copied = graphs.copy(graph)
    copied.info.normals.clear()
    assert len(graph.info.normals) == 7  # the Mul behind the second as well


def test_numbers_that_are_computed_say_nothing() -> None:
    text = """g (float[2,4,3] x, float[4] m) => (float[2,4,3] y, float[2,4,3] z) {
        y = BatchNormalization(x, g, t, m, v)
        z = BatchNormalization<training_mode = 0>(x, g, t, t, v)
    }"""
    graph = graphs.load(model(text, g=np.ones(4, np.float32), t=4, v=np.ones(4, np.float32)))
    assert record_normals(graph) == 1
    assert list(graph.info.normals) == ["z"]


def test_statistics_of_its_own_change_nothing() -> None:
    ones: dict[str, Any] = {name: np.ones(4, np.float32) for name in ("g", "v")}
    text = """g (float[2,4,3] x) => (float[2,4,3] y) {
        r = BatchNormalization(x, g, t, t, v)
        y = BatchNormalization(r, g, t, t, v)
    }"""
    proto = model(text, **ones, t=4)
    graph = graphs.load(proto)
    assert len(own_statistics(graph)) == 2
    assert all(len(readers(node.inputs[place])) == 1 for node in graph.nodes for place in (3, 4))
    assert own_statistics(graph) == ()
    x = {"x": np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)}
    np.testing.assert_array_equal(run(graphs.to_proto(graph), x)["y"], run(proto, x)["y"])
