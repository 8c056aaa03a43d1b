"""Simplification over the whole graph: folding, branches that never run, duplicates."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.graph import load
from sbonnx.graph.query import all_nodes, constant, node_by_name
from sbonnx.patterns import SIMPLIFY, apply
from sbonnx.patterns.simplify import fold
from sbonnx.patterns.simplify.fold import FOLD
from tests.patterns.simplified import ints, ops, simplified
from tests.support.models import model
from tests.support.pattern_checks import assert_same_outputs, assert_sound, random_feeds

# -- folding


def test_a_constant_output_keeps_its_name() -> None:
    graph, _ = simplified("g (float[2] x) => (float[2] y, float[2] k) { y = Relu(x) k = Add(w, w) }", w=2)
    assert sorted(ops(graph)) == ["Identity", "Relu"]


def test_folding_in_a_branch_with_outer_constants() -> None:
    text = """g (float[2] x, bool c) => (float[2] y) { k = Mul(w, w)
        y = If (c) <
            then_branch = t () => (float[2] p) { m = Add(k, w) p = Mul(x, m) },
            else_branch = e () => (float[2] q) { q = Sub(k, w) }
        > }"""
    graph, _ = simplified(text, w=2)
    assert sorted(node.op for node in all_nodes(graph)) == ["Identity", "If", "Mul"]


def test_random_ops_are_never_folded() -> None:
    graph = load(
        model("g (float[2] x) => (float[2] y) { r = RandomNormal<shape=[2]>() z = Mul(r, k) y = Add(x, z) }", k=2)
    )
    assert not apply(graph, SIMPLIFY).fired
    assert ops(graph) == ["RandomNormal", "Mul", "Add"]


def test_quantized_weights_are_never_folded() -> None:
    text = """g (float[2,2] x) => (float[2,2] y) {
        w = DequantizeLinear(q, s, z) t = Transpose(w) y = MatMul(x, t) }"""
    graph, applied = simplified(text, q=np.ones((2, 2), np.int8), s=np.array(0.1, "f"), z=np.array(0, np.int8))
    assert ops(graph) == ["DequantizeLinear", "Transpose", "MatMul"]
    assert applied.fired == ()


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        ("k = ConstantOfShape(s)", {"s": ints(1 << 20)}),
        ("k = Expand(v, s)", {"v": np.ones(1, "f"), "s": ints(1 << 20)}),
        ("k = Tile(v, s)", {"v": np.ones(1, "f"), "s": ints(1 << 20)}),
        ("i = Range(a, s, b) k = Cast<to=1>(i)", {"a": np.array(0), "s": np.array(1 << 40), "b": np.array(1)}),
        ("r = Reshape(v, col) k = Add(v, r)", {"v": np.ones(1024, "f"), "col": ints(1024, 1)}),
    ],
)
def test_what_would_explode_is_refused(nodes: str, constants: dict[str, Any]) -> None:
    graph = load(
        model(f"g (float[1] x) => (float y) {{ {nodes} t = Add(x, k) y = ReduceSum<keepdims=0>(t) }}", **constants)
    )
    applied = apply(graph, [FOLD])
    assert [refusal.what for refusal in applied.refusals] == ["fold_constants"]
    assert "MiB" in applied.refusals[0].why
    assert constant(node_by_name(graph)["Add_0" if "Reshape" not in nodes else "Add_1"].inputs[1]) is None


def test_what_onnxruntime_cannot_run_is_refused_and_the_rest_folded() -> None:
    """float64 Resize in cubic mode has no kernel."""
    text = """g (double[1,1,2,2] x) => (double[1,1,2,2] y)
        { [no] r = Resize<mode="cubic">(w, , s) k = Add(w, w) m = Mul(r, k) y = Add(x, m) }"""
    graph = load(model(text, w=np.ones((1, 1, 2, 2)), s=np.array([1, 1, 0.5, 2], "f")))
    applied = apply(graph, [FOLD])
    assert {fired.node for fired in applied.fired} == {"Add_0"}
    assert [refusal.where for refusal in applied.refusals] == ["no"]
    assert applied.refusals[0].why.startswith("onnxruntime cannot run it: ")


def test_folding_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "BATCH_BYTES", 16)
    monkeypatch.setattr(fold, "SPILL_BYTES", 8)
    text = """g (float[4] x) => (float[4] y)
        { a = Add(u, u) b = Mul(v, v) c = Exp(b) d = Sub(u, c) e = Add(x, a) f = Add(e, c) y = Mul(f, d) }"""
    graph, _ = simplified(text, u=4, v=4)
    assert ops(graph) == ["Add", "Add", "Mul"]


def test_multiple_outputs_of_a_folded_node() -> None:
    text = "g (float[2] x) => (float[2] y, float[2] z) { a, b = Split(w) y = Add(x, a) z = Add(x, b) }"
    assert ops(simplified(text, w=4)[0]) == ["Add", "Add"]


def test_an_if_in_an_if_is_inlined() -> None:
    text = """g (float[2] x) => (float[2] y, float[2] z) { n = Not(no) a = Relu(x)
        y, z = If (n) <
            then_branch = t () => (float[2] p, float[2] q) {
                p = If (no) <
                    then_branch = tt () => (float[2] r) { r = Neg(a) },
                    else_branch = ee () => (float[2] s) { i = Exp(a) s = Abs(i) }
                >
                q = Identity(a)
            },
            else_branch = e () => (float[2] u, float[2] v) { u = Sin(a) v = Cos(a) }
        > }"""
    graph, _ = simplified(text, no=np.array(False))
    assert sorted(ops(graph)) == ["Abs", "Exp", "Relu"]


def test_branches_that_give_constants_or_one_tensor_twice() -> None:
    text = """g (float[2] x) => (float[2] y, float[2] z, float[2] k) {
        y, z, k = If (yes) <
            then_branch = t () => (float[2] p, float[2] p2, float[2] w2)
                { p = Neg(x) p2 = Identity(p) w2 = Identity(w) },
            else_branch = e () => (float[2] u, float[2] v, float[2] w3) { u = Sin(x) v = Cos(x) w3 = Exp(x) }
        > }"""
    graph, _ = simplified(text, yes=np.array([True]), w=2)
    assert sorted(ops(graph)) == ["Identity", "Identity", "Neg"]


# -- duplicates


def test_equal_constants_of_another_type_or_shape_stay_apart() -> None:
    text = (
        "g (float[2,2] x, double[2,2] d) => (float[2,2] y, double[2,2] z) { a = Add(x, u) y = Mul(a, v) z = Add(d, w) }"
    )
    _, applied = simplified(text, u=np.zeros(2, "f"), v=np.zeros((1, 2), "f"), w=np.zeros(1))
    assert not [fired for fired in applied.fired if fired.pattern == "merge_initializers"]


def test_an_initializer_that_the_file_lists_as_input_is_not_merged() -> None:
    before = model(
        "g (float[2] x) => (float[2] y) { a = Add(x, u) y = Mul(a, v) }", u=np.ones(2, "f"), v=np.ones(2, "f")
    )
    before.graph.input.append(onnx.helper.make_tensor_value_info("v", 1, [2]))
    graph = load(before)
    assert not apply(graph, SIMPLIFY).fired


def test_equal_weights_are_one_after_loading_from_a_file(tmp_path: Any) -> None:
    w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    before = model(
        "g (float[2,64] x) => (float[2,64] y) { a = MatMul(x, u) r = Relu(a) y = MatMul(r, v) }", u=w, v=w.copy()
    )
    onnx.save(before, tmp_path / "m.onnx")
    graph = load(tmp_path / "m.onnx")
    applied = apply(graph, SIMPLIFY)
    assert [(fired.pattern, fired.node) for fired in applied.fired] == [("merge_initializers", "v")]
    after = assert_sound(graph)
    assert [tensor.name for tensor in after.graph.initializer] == ["u"]
    assert_same_outputs(before, after, random_feeds(before))


def test_equal_nodes_are_merged_unless_they_are_outputs_or_qdq() -> None:
    text = """g (float[2] x) => (float[2] y, float[2] z) {
        a = Exp(x) b = Exp(x) c = Add(a, b) y = Neg(c) z = Neg(c) }"""
    assert sorted(ops(simplified(text)[0])) == ["Add", "Exp", "Neg", "Neg"]
    qdq = """g (float[2] x) => (float[2] y) { a = QuantizeLinear(x, s, z) b = QuantizeLinear(x, s, z)
        c = DequantizeLinear(a, s, z) d = DequantizeLinear(b, s, z) y = Add(c, d) }"""
    graph, _ = simplified(qdq, s=np.array(0.1, "f"), z=np.array(0, np.int8))
    assert len(graph.nodes) == 5
