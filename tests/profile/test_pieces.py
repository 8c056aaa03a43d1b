"""How a graph becomes steps: what runs together, what is left out, what cannot wait."""

from __future__ import annotations

from typing import Any

import numpy as np

from sbonnx.graph import load
from sbonnx.graph.query import all_nodes
from sbonnx.planning.types import Plan, Reader, Site
from sbonnx.profiling import losses
from sbonnx.profiling.pieces import steps_of
from sbonnx.spec import QuantSpec
from tests.calib.engine.branching import nested
from tests.calib.quantized.test_forward import with_qdq
from tests.profile.test_layer_losses import squared
from tests.support.calibration import calibrate
from tests.support.models import model, residual, run
from tests.support.naive import plan_linear

PARTS: dict[str, Any] = {"two": np.array(2), "first": np.array(0), "second": np.array(1)}
X = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)


def test_one_step_a_layer_and_one_for_nodes_between() -> None:
    steps = steps_of(load(residual()), ["stem", "conv1", "fc"], ["y"])
    assert [step.nodes for step in steps] == [
        ("stem",),
        ("stem_relu",),
        ("conv1",),
        ("relu1", "conv2", "add", "relu2", "gap", "flat"),
        ("fc",),
    ]
    assert [step.layer for step in steps] == ["stem", "", "conv1", "", "fc"]
    assert steps[3].inputs == ("c1", "r")
    assert steps[3].outputs == ("f",)


def test_what_leads_nowhere_is_left_out() -> None:
    assert [step.nodes for step in steps_of(load(residual()), ["conv1"])] == [("stem", "stem_relu"), ("conv1",)]


def test_branches_lie_flat() -> None:
    """Conditions gather inwards; a choice stands behind each If whose branches hold layers."""
    graph = load(nested())
    names = {node.outputs[0].name: node.name for node in all_nodes(graph)}
    inner = [names["u"]]
    steps = steps_of(graph, [*inner, names["m"]], ["y"])
    layers = [(step.layer, step.conditions) for step in steps if step.layer]
    assert layers == [(names["m"], ()), (inner[0], (("a", True), ("b", True)))]
    choices = [(tuple(step.choice), step.conditions) for step in steps if step.choice]
    assert choices == [(("q",), (("a", True),)), (("y",), ())]


def test_a_sequence_is_made_again_for_each_reader() -> None:
    """It cannot be the input of a session: both layers that come after it take their part of it."""
    text = """
    agraph (float[N,4] x) => (float[N,2] y) {
        r = Relu (x)
        s = SplitToSequence <axis = 1> (r, two)
        a = SequenceAt (s, first)
        p = MatMul (a, w0)
        b = SequenceAt (s, second)
        t = Add (p, b)
        y = MatMul (t, w1)
    }"""
    proto = model(text, w0=(2, 2), w1=(2, 2), **PARTS)
    for number, node in enumerate(proto.graph.node):
        node.name = f"n{number}"
    graph = load(proto)
    plan = plan_linear(graph, weight=QuantSpec())
    solution = calibrate(graph, plan, [{"x": X}])
    found = losses(graph, plan, solution, [{"x": X}], checker="mse")
    expected = squared([run(with_qdq(proto, plan, solution), {"x": X})["y"]], [run(proto, {"x": X})["y"]])
    assert len(found.layers) == 2
    assert found.outputs["y"] == found.layers[-1].gathered
    assert abs(found.outputs["y"] - expected) < 1e-3 * expected


def test_branches_that_read_a_sequence_run_whole() -> None:
    """A sequence cannot be the input of a session: the layers inside are named."""
    text = """
    agraph (float[N,4] x, bool c) => (float[N,2] y) {
        s = SplitToSequence <axis = 1> (x, two)
        y = If (c) <
            then_branch = yes () => (float[N,2] t) { k = SequenceAt (s, first)
                t = MatMul (k, w) },
            else_branch = no () => (float[N,2] e) { h = SequenceAt (s, second)
                e = MatMul (h, w) }
        >
    }"""
    proto = model(text, w=(2, 2), **PARTS)
    graph = load(proto)
    feeds = [{"x": X, "c": np.array(value)} for value in (True, False)]
    plan = plan_linear(graph, weight=QuantSpec())
    found = losses(graph, plan, calibrate(graph, plan, feeds), feeds)
    assert not found.layers
    assert len(found.notes) == 2
    assert all(
        "was not measured: it gives, or its branch reads, a tensor of unknown type" in note for note in found.notes
    )


def test_several_outputs_are_measured_together() -> None:
    """A Split of a quantized tensor: the error of both halves, one number."""
    text = """
    agraph (float[N,4] x) => (float[N,2] a, float[N,2] b) {
        a, b = Split <axis = 1, num_outputs = 2> (x)
    }"""
    proto = model(text, opset=18)
    proto.graph.node[0].name = "halves"
    graph = load(proto)
    spec = QuantSpec(bits=4)
    plan = Plan((Site("x", "x", "activation", spec, (Reader("halves", 0),), "test", "x"),))
    solution = calibrate(graph, plan, [{"x": X}])
    (row,) = losses(graph, plan, solution, [{"x": X}], checker="mse").layers
    assert row.alone is not None
    assert abs(row.alone - squared([solution.qparams["x"].fake_quant(X)], [X])) < 1e-9


def test_half_precision() -> None:
    """Each tensor keeps its type through the walk."""
    text = "agraph (float16[N,4] x) => (float16[N,4] y) { r = Relu (x) y = MatMul (r, w) }"
    proto = model(text, w=np.random.default_rng(0).standard_normal((4, 4)).astype(np.float16))
    for node, name in zip(proto.graph.node, ("relu", "product"), strict=True):
        node.name = name
    graph = load(proto)
    feeds = [{"x": X.astype(np.float16)}]
    plan = plan_linear(graph, weight=QuantSpec())
    solution = calibrate(graph, plan, feeds)
    (row,) = losses(graph, plan, solution, feeds).layers
    assert row.alone is not None
    assert 20 < row.alone < 60
