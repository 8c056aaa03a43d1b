"""Segments: together they compute what the whole computes, and each is a model of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.segments import bytes_of, cut, needed
from sbonnx.graph import Graph, load
from sbonnx.spec import Array
from tests.support.models import model, residual

OBSERVED = ["x", "r", "r1", "c2", "f"]
X = np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32)


def graph() -> Graph:
    return load(residual())


@pytest.mark.parametrize("granularity", ["whole", "layer", "budget"])
def test_pieces_compute_what_the_whole_computes(granularity: Any) -> None:
    g = graph()
    sizes = bytes_of(g, {"N": 1})
    segments = cut(g, OBSERVED, granularity, kept=["y"], sizes=sizes, budget=5000)
    known: dict[str, Array] = {"x": X}
    for segment in segments:
        assert set(segment.reads) <= known.keys()
        with LayerRunner(segment.model(g), optimisation="off") as run:
            known.update(run.run(known, segment.outputs))
    assert sorted(name for segment in segments for name in segment.observed) == sorted(OBSERVED)
    (whole,) = cut(g, [*OBSERVED, "y"], "whole")
    with LayerRunner(whole.model(g), optimisation="off") as run:
        for name, value in run.run({"x": X}, whole.outputs).items():
            np.testing.assert_array_equal(known[name], value)


def test_whole_graph_is_one_segment_without_unused_nodes() -> None:
    g = graph()
    (segment,) = cut(g, ["x", "r1"], "whole")
    assert segment.inputs == ("x",)
    assert segment.outputs == ("r1",)
    assert segment.observed == ("x", "r1")
    assert segment.nodes == ("stem", "stem_relu", "conv1", "relu1")


def test_a_layer_is_a_linear_op_with_its_tail() -> None:
    g = graph()
    segments = cut(g, OBSERVED, "layer", kept=["y"])
    assert [segment.nodes for segment in segments] == [
        ("stem", "stem_relu"),
        ("conv1", "relu1"),
        ("conv2", "add", "relu2", "gap", "flat"),
        ("fc",),
    ]
    assert segments[0].outputs == ("r",)
    assert segments[2].inputs == ("r1", "r")


def test_budget_cuts_where_little_crosses() -> None:
    g = graph()
    sizes = bytes_of(g, {"N": 4})
    big = 4 * 8 * 8 * 8 * 4
    assert sizes["r"] == big
    segments = cut(g, ["s", "r", "c1", "r1", "c2", "a", "r2"], "budget", sizes=sizes, budget=3 * big)
    assert len(segments) == 3
    for segment in segments:
        assert sum(sizes[name] for name in segment.observed) <= 3 * big
    assert len(cut(g, ["s", "r"], "budget", sizes=sizes, budget=10 * big)) == 1
    assert len(cut(g, ["s", "r", "c1"], "budget", sizes=sizes, budget=0)) == 3


@pytest.mark.parametrize("granularity", ["layer", "budget"])
def test_no_cut_through_a_tensor_of_unknown_type(granularity: Any) -> None:
    """onnx does not know the types that a foreign op gives."""
    text = """
    agraph (float[N,4] x) => (float[N,4] y) {
        a = MatMul (x, w)
        g = Gelu (a)
        b = MatMul (g, w)
        y = MatMul (b, w)
    }"""
    proto = model(text, opset=20, w=(4, 4))
    proto.graph.node[1].domain = "com.microsoft"
    proto.opset_import.add(domain="com.microsoft", version=1)
    proto.graph.value_info.clear()
    g = load(proto)
    segments = cut(g, ["x", "a", "g", "b"], granularity, kept=["y"], budget=0, sizes={"a": 1, "g": 1, "b": 1})
    known: dict[str, Array] = {"x": np.ones((1, 4), np.float32)}
    for segment in segments:
        with LayerRunner(segment.model(g)) as run:
            known.update(run.run(known, segment.outputs))
    assert {"a", "g", "b", "y"} <= known.keys()


def test_nothing_to_run() -> None:
    (segment,) = cut(graph(), ["x"], "whole")
    assert (segment.outputs, segment.observed, segment.reads) == ((), ("x",), ("x",))


def test_an_if_takes_what_its_branches_read() -> None:
    text = """
    agraph (float[N,4] x, bool c) => (float[N,4] y) {
        r = Relu (x)
        m = MatMul (x, w)
        y = If (c) <
            then_branch = yes () => (float[N,4] t) { t = Neg (r) },
            else_branch = no () => (float[N,4] e) { e = Add (m, r) }
        >
    }"""
    g = load(model(text, w=(4, 4)))
    assert [node.op for node in needed(g, ["y"])] == ["Relu", "MatMul", "If"]
    segments = cut(g, ["y"], "layer")
    assert segments[0].outputs == ("r",)
    assert set(segments[1].inputs) == {"x", "c", "r"}
