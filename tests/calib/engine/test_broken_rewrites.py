"""Graphs that onnxruntime's own fusions break are run without these fusions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from sbonnx import graph as graphs
from sbonnx.backends.onnxruntime.graph_transformers import REWRITES
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.errors import DataError
from sbonnx.graph.extract import extract
from sbonnx.spec import Array
from tests.support.models import model, run

RMS = """agraph (float[SHAPE] x) => (float[A,B,C] y) {
    p = Pow (x, two)
    v = ReduceMean <axes = [-1]> (p)
    e = Add (v, eps)
    s = Sqrt (e)
    n = Div (x, s)
    z = Mul (n, gamma)
    y = Relu (z)
}"""


def widened(shape: str, *gamma: int) -> onnx.ModelProto:
    """A normalization whose scale is wider than its input: onnxruntime's fused operator does not run it."""
    return model(RMS.replace("SHAPE", shape), two=np.float32(2), eps=np.float32(1e-5), gamma=gamma)


def feeds(*shape: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}


@pytest.mark.parametrize("layout", [(), ("y",)])
def test_a_fusion_that_fails_on_a_feed_is_left_out(layout: tuple[str, ...]) -> None:
    proto = widened("N,6,D", 32)
    graph = graphs.load(proto)
    with LayerRunner(graph, any_layout=layout) as session:
        found = session(feeds(2, 6, 1))["y"]
        bound = session.bind(["y"]).run(feeds(1, 6, 1))[0].copy()
    np.testing.assert_allclose(found, run(proto, feeds(2, 6, 1))["y"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bound, run(proto, feeds(1, 6, 1))["y"], rtol=1e-5, atol=1e-6)
    assert graph.info.broken_rewrites == ["SimplifiedLayerNormFusion"]
    with LayerRunner(extract(graph, ["x"], ["y"])) as piece:
        assert piece.disabled == ("SimplifiedLayerNormFusion",)


def test_bound_runs_go_on_without_the_fusion() -> None:
    proto = widened("N,6,D", 32)
    with LayerRunner(graphs.load(proto)) as session:
        bound = session.bind(["y"])
        for batch in (1, 3, 3):
            found = bound.run(feeds(batch, 6, 1))[0]
            np.testing.assert_allclose(found, run(proto, feeds(batch, 6, 1))["y"], rtol=1e-5, atol=1e-6)


def test_a_graph_that_a_fusion_makes_invalid_is_opened_without_it() -> None:
    text = RMS.replace("SHAPE", "32").replace("A,B,C", "A,B")
    proto = model(text, two=np.float32(2), eps=np.float32(1e-5), gamma=(6, 32))
    with LayerRunner(graphs.load(proto)) as session:
        found = session(feeds(32))["y"]
    np.testing.assert_allclose(found, run(proto, feeds(32))["y"], rtol=1e-5, atol=1e-6)


def test_feeds_that_no_form_of_the_model_runs_are_refused() -> None:
    proto = model("agraph (float[N,D] x) => (float[N,4] y) { y = MatMul (x, w) }", w=(8, 4))
    graph = graphs.load(proto)
    with LayerRunner(graph) as session, pytest.raises(DataError, match="cannot run"):
        session(feeds(2, 7))
    assert graph.info.broken_rewrites == []


def test_transposes_stay_where_they_are_without_the_rewrites(tmp_path: Path) -> None:
    """Two graph transformers of onnxruntime move transposes; the one of the provider has another name."""
    text = """agraph (float[2,8,5] x) => (float[2,8,5] y) {
        t = Transpose <perm = [0, 2, 1]> (x)
        s = Sigmoid (t)
        y = Transpose <perm = [0, 2, 1]> (s)
    }"""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    providers = ["CPUExecutionProvider"]
    content = model(text).SerializeToString()
    onnxruntime.InferenceSession(content, options, providers, disabled_optimizers=list(REWRITES))
    loaded = [node.op_type for node in onnx.load(tmp_path / "loaded.onnx").graph.node]
    assert loaded == ["Transpose", "Sigmoid", "Transpose"]
