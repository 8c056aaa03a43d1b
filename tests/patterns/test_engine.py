"""The engine alone, with patterns made for each test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.errors import ModelError
from sbonnx.graph import Graph, load
from sbonnx.graph.query import all_nodes, node_by_name
from sbonnx.patterns import Applied, Const, Edit, Match, Maybe, Op, Or, Pattern, Var, X, apply, fixed_point, match
from sbonnx.patterns.example_model import sample
from sbonnx.report.codes import Reason
from tests.support.models import model
from tests.support.pattern_checks import assert_same_outputs, assert_sound, random_feeds

Rewrite = Callable[[Match, Edit], None]


def pattern(tree: Op, rewrite: Rewrite, name: str = "mine", **more: Any) -> Pattern:
    """A pattern without examples, whose check may return a plain text."""
    check = more.get("check")
    if check is not None:
        more["check"] = lambda match: None if (why := check(match)) is None else Reason("tested", why)
    return Pattern(name, tree, rewrite, "for this test", onnx.ModelProto, onnx.ModelProto, **more)


def leave(match: Match, edit: Edit) -> None:
    raise AssertionError("must not be rewritten")


def to_abs(match: Match, edit: Edit) -> None:
    """x → Abs(x), named after the root."""
    edit.replace(match.root.outputs[0], edit.node("Abs", [match["x"]], name=match.root.name))


NEG_NEG_ABS = pattern(Op("Abs", Op("Neg", Var("x"))), to_abs)
"""Abs(Neg(x)) = Abs(x)."""


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def rewritten(text: str, *patterns: Pattern, **constants: Any) -> tuple[Graph, Applied]:
    """Apply patterns; outputs must stay equal in onnxruntime, and the graph sound."""
    before = model(text, **constants)
    graph = load(before)
    applied = apply(graph, patterns)
    assert_same_outputs(before, assert_sound(graph), random_feeds(before))
    return graph, applied


def test_fires_and_keeps_the_names_users_know() -> None:
    text = "g (float[2] x) => (float[2] y) { [first] a = Neg(x) [second] b = Abs(a) [last] y = Relu(b) }"
    graph, applied = rewritten(text, NEG_NEG_ABS)
    assert [(node.op, node.name) for node in graph.nodes] == [("Abs", "second"), ("Relu", "last")]
    assert graph.nodes[0].outputs[0].name == "b"
    assert [(fired.pattern, fired.node) for fired in applied.fired] == [("mine", "second")]
    assert applied.refusals == ()


def test_a_graph_output_keeps_name_and_type() -> None:
    graph, _ = rewritten("g (float[N,2] x) => (float[N,2] y) { a = Neg(x) y = Abs(a) }", NEG_NEG_ABS)
    assert ops(graph) == ["Abs"]
    assert graph.outputs[0].name == "y" and tuple(graph.outputs[0].shape) == ("N", 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("g (float[2] x) => (float[2] y, float[2] z) { a = Neg(x) y = Abs(a) [other] z = Relu(a) }", "read by 'other'"),
        ("g (float[2] x) => (float[2] y, float[2] a) { a = Neg(x) y = Abs(a) }", "'a' is an output"),
        (
            """g (float[2] x, bool c) => (float[2] y, float[2] z) { a = Neg(x) y = Abs(a)
            z = If (c) <
                then_branch = t () => (float[2] p) { p = Relu(a) }, else_branch = e () => (float[2] q) { q = Exp(x) }
            > }""",
            "'a' is read in a branch body",
        ),
        (
            """g (float[2] x, bool c) => (float[2] y) { a = Neg(x)
            y = If (c) <
                then_branch = t () => (float[2] p) { p = Abs(a) }, else_branch = e () => (float[2] q) { q = Exp(x) }
            > }""",
            "'a' is read in a branch body",
        ),
    ],
)
def test_a_tensor_that_others_need_is_refused_with_the_reason(text: str, why: str) -> None:
    refused = pattern(Op("Abs", Op("Neg", Var("x"))), leave)
    _, applied = rewritten(text, refused)
    assert applied.fired == ()
    (refusal,) = applied.refusals
    assert refusal.what == "mine" and why in refusal.why


def test_shared_lifts_the_single_reader_rule() -> None:
    shared = pattern(Op("Abs", Op("Neg", Var("x"), shared=True)), to_abs)
    text = "g (float[2] x) => (float[2] y, float[2] z) { a = Neg(x) y = Abs(a) z = Relu(a) }"
    graph, applied = rewritten(text, shared)
    assert len(applied.fired) == 1
    assert sorted(ops(graph)) == ["Abs", "Neg", "Relu"]


def test_readers_inside_the_match_are_no_second_readers() -> None:
    silu = pattern(Op("Mul", Var("x"), Op("Sigmoid", Var("x")), commutative=True), leave, check=lambda match: "seen")
    tree = Op("Mul", Op("Relu", X, name="r"), Op("Sigmoid", Op("Relu", X, name="r")), commutative=True)
    inner = pattern(tree, leave, "inner", check=lambda match: "seen")
    text = "g (float[2] x) => (float[2] y) { r = Relu(x) s = Sigmoid(r) [m] y = Mul(s, r) }"
    _, applied = rewritten(text, silu, inner)
    assert [(refusal.what, refusal.where, refusal.why) for refusal in applied.refusals] == [
        ("mine", "m", "seen"),
        ("inner", "m", "seen"),
    ]


def test_bodies_are_rewritten_too() -> None:
    text = """g (float[2] x, bool c) => (float[2] y) {
        y = If (c) <
            then_branch = t () => (float[2] p) { n = Neg(x) p = Abs(n) },
            else_branch = e () => (float[2] q) { m = Neg(x) k = Abs(m) q = Exp(k) }
        >
    }"""
    graph, applied = rewritten(text, NEG_NEG_ABS)
    assert len(applied.fired) == 2
    assert sorted(node.op for node in all_nodes(graph)) == ["Abs", "Abs", "Exp", "If"]


def test_a_reader_in_a_body_follows_the_replacement() -> None:
    text = """g (float[2] x, bool c) => (float[2] y) { n = Neg(x) a = Abs(n)
        y = If (c) <
            then_branch = t () => (float[2] p) { p = Relu(a) }, else_branch = e () => (float[2] q) { q = Exp(a) }
        > }"""
    graph, applied = rewritten(text, NEG_NEG_ABS)
    assert len(applied.fired) == 1 and ops(graph) == ["Abs", "If"]


def test_an_existing_tensor_takes_over_the_name_of_an_output() -> None:
    drop = pattern(Op("Identity", Var("x")), lambda match, edit: edit.replace(match.root.outputs[0], match["x"]))
    text = "g (float[2] x) => (float[2] y, float[2] z) { a = Relu(x) y = Identity(a) z = Exp(a) }"
    graph, _ = rewritten(text, drop)
    assert sorted(ops(graph)) == ["Exp", "Relu"]


def test_commutative_inputs_match_in_any_order() -> None:
    tree = Op("Add", Op("Neg", X, name="n"), Const("c"), commutative=True)
    found = pattern(tree, leave, check=lambda match: f"{match['n'].name} {float(match.array('c')[0])}")
    for text in ("Add(a, k)", "Add(k, a)"):
        _, applied = rewritten(
            f"g (float[2] x) => (float[2] y) {{ [n] a = Neg(x) y = {text} }}", found, k=np.ones(2, "f")
        )
        assert applied.refusals[0].why == "n 1.0"


def test_a_commutative_match_that_may_be_rewritten_is_preferred() -> None:
    """Both inputs are Neg; the first is read by others, the second is not."""
    tree = Op("Add", Op("Neg", X, name="n"), X, commutative=True)
    found = pattern(tree, leave, check=lambda match: str(match["n"].name))
    text = """g (float[2] x) => (float[2] y, float[2] z)
        { [shared] a = Neg(x) [own] b = Neg(x) y = Add(a, b) z = Relu(a) }"""
    _, applied = rewritten(text, found)
    assert applied.refusals[0].why == "own"


def test_optional_inputs() -> None:
    tree = Op("Clip", Var("x"), Maybe(Const("low")), Maybe(Const("high")))

    def say(match: Match) -> str:
        return f"{'low' in match} {'high' in match} {match['x'].name}"

    for call, seen in (("Clip(x)", "False False"), ("Clip(x, k)", "True False"), ("Clip(x, , k)", "False True")):
        _, applied = rewritten(
            f"g (float[2] x) => (float[2] y) {{ y = {call} }}", pattern(tree, leave, check=say), k=np.array(0, "f")
        )
        assert applied.refusals[0].why == f"{seen} x"


def test_an_input_that_is_not_listed_is_no_match() -> None:
    short = pattern(Op("Conv", X, X), leave, check=lambda match: "seen")
    text = "g (float[1,1,3,3] x) => (float[1,1,3,3] y) { y = Conv(x, w, b) }"
    _, applied = rewritten(text, short, w=(1, 1, 1, 1), b=1)
    assert applied == Applied()


def test_constants_with_predicates() -> None:
    halves = pattern(Op("Mul", X, Const("c", where=lambda c: bool((c == 0.5).all()))), leave, check=lambda m: "half")
    text = "g (float[2] x) => (float[2] y) { [one] a = Mul(x, h) [two] b = Mul(a, t) [three] y = Mul(b, b) }"
    _, applied = rewritten(text, halves, h=np.full(2, 0.5, "f"), t=np.full(2, 2, "f"))
    assert [refusal.where for refusal in applied.refusals] == ["one"]


def test_attributes_have_the_defaults_of_the_schema() -> None:
    last = pattern(Op("Softmax", X, attrs={"axis": -1}), leave, check=lambda match: "last axis")
    big = pattern(Op("Softmax", X, attrs={"axis": lambda axis: axis >= 0}), leave, "big", check=lambda match: "counted")
    text = """g (float[2,3] x) => (float[2,3] y)
        { [a] a = Softmax(x) [b] b = Softmax<axis=-1>(a) [c] y = Softmax<axis=1>(b) }"""
    _, applied = rewritten(text, last, big)
    assert [(refusal.what, refusal.where) for refusal in applied.refusals] == [
        ("mine", "a"),
        ("mine", "b"),
        ("big", "c"),
    ]


def test_or_takes_the_first_that_fits() -> None:
    tree = Op("Exp", Or(Op("Neg", X, name="neg"), Op("Abs", X, name="abs"), Var("other")))

    def say(match: Match) -> str:
        return next(name for name in ("neg", "abs", "other") if name in match)

    for op, seen in (("Neg", "neg"), ("Abs", "abs"), ("Relu", "other")):
        text = f"g (float[2] x) => (float[2] y) {{ a = {op}(x) y = Exp(a) }}"
        _, applied = rewritten(text, pattern(tree, leave, check=say))
        assert applied.refusals[0].why == seen


def test_later_outputs_in_use_are_refused() -> None:
    top = pattern(Op("Relu", Op("TopK", X, X)), leave)
    text = "g (float[4] x) => (float[2] y, int64[2] i) { [t] v, i = TopK(x, k) y = Relu(v) }"
    _, applied = rewritten(text, top, k=np.array([2], np.int64))
    assert "output 'i' of 't' is used" in applied.refusals[0].why


def test_shared_weights_are_visible() -> None:
    def check(match: Match) -> str | None:
        readers = match.readers(match["w"])
        return f"shared by {len(readers)}" if len(readers) > 1 else None

    matmul = pattern(Op("MatMul", X, Const("w")), leave, check=check)
    text = """g (float[2,2] x, bool c) => (float[2,2] y) { a = MatMul(x, w)
        y = If (c) <
            then_branch = t () => (float[2,2] p) { p = MatMul(a, w) },
            else_branch = e () => (float[2,2] q) { q = Exp(a) }
        > }"""
    _, applied = rewritten(text, matmul, w=(2, 2))
    assert {refusal.why for refusal in applied.refusals} == {"shared by 2"}


def test_refusals_are_those_of_the_graph_as_it_is() -> None:
    """The first round refuses because of a second reader; another pattern takes that reader away."""
    drop = pattern(
        Op("Exp", Op("Log", Op("Neg", X, name="n", shared=True))),
        lambda match, edit: edit.replace(match.root.outputs[0], edit.node("Relu", [match.root.inputs[0]], name="r")),
        "drop",
    )
    lone = pattern(Op("Abs", Op("Neg", Var("x"))), to_abs, "lone")
    text = """g (float[2] x) => (float[2] y, float[2] z)
        { a = Neg(x) y = Abs(a) b = Relu(x) c = Neg(b) [k] k = Neg(a) d = Relu(k) [u] z = Mul(d, b) }"""
    graph, applied = rewritten(text, lone, drop)
    assert applied.fired == () and [refusal.where for refusal in applied.refusals] == [
        node_by_name(graph)["Abs_0"].name
    ]
    forget = pattern(
        Op("Relu", Op("Neg", Op("Neg", Var("x"), shared=True))),
        lambda match, edit: edit.replace(match.root.outputs[0], edit.node("Relu", [match["x"]], name="Relu")),
        "forget",
    )
    graph, applied = rewritten(text, lone, forget)
    assert {fired.pattern for fired in applied.fired} == {"lone", "forget"}
    assert applied.refusals == ()


def test_new_names_do_not_collide() -> None:
    """Another node bears the wished name: the new one is numbered."""
    taken = pattern(
        Op("Abs", Op("Neg", Var("x"))),
        lambda match, edit: edit.replace(match.root.outputs[0], edit.node("Abs", [match["x"]], name="last")),
    )
    text = "g (float[2] x) => (float[2] y) { [first] a = Neg(x) [second] b = Abs(a) [last] y = Relu(b) }"
    graph, _ = rewritten(text, taken)
    assert [node.name for node in graph.nodes] == ["last_1", "last"]


def test_a_pattern_that_never_settles_is_an_error_naming_it() -> None:
    swap = pattern(
        Op(("Add", "Sub"), Var("a"), Var("b")),
        lambda match, edit: edit.replace(
            match.root.outputs[0], edit.node("Add", [match["b"], match["a"]], name=match.root.name)
        ),
        "swap",
    )
    graph = load(sample("g (float[2] x, float[2] z) => (float[2] y) { [sum] y = Add(x, z) }"))
    with pytest.raises(ModelError, match=r"pattern 'swap' still fires at node 'sum'.*never settles"):
        apply(graph, [swap])


def test_two_patterns_that_undo_each_other_are_an_error() -> None:
    def turn(op: str) -> Rewrite:
        return lambda match, edit: edit.replace(
            match.root.outputs[0], edit.node(op, [match["x"]], name=match.root.name)
        )

    there, back = pattern(Op("Abs", Var("x")), turn("Neg"), "there"), pattern(Op("Neg", Var("x")), turn("Abs"), "back")
    with pytest.raises(ModelError, match=r"'there'|'back'"):
        apply(load(sample("g (float[2] x) => (float[2] y) { y = Abs(x) }")), [there, back])


def chain(pairs: int) -> onnx.ModelProto:
    nodes = []
    for number in range(pairs):
        nodes.append(onnx.helper.make_node("Neg", [f"t{2 * number}"], [f"t{2 * number + 1}"], name=f"neg{number}"))
        nodes.append(onnx.helper.make_node("Abs", [f"t{2 * number + 1}"], [f"t{2 * number + 2}"], name=f"abs{number}"))
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [2]) for name in ("t0", f"t{2 * pairs}"))
    return onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "g", [x], [y]), opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )


def test_visits_grow_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    def visits(pairs: int) -> int:
        seen = 0
        whole = match.find

        def counted(*arguments: Any) -> Any:
            nonlocal seen
            seen += 1
            return whole(*arguments)

        monkeypatch.setattr(fixed_point, "find", counted)
        graph = load(chain(pairs))
        assert len(apply(graph, [NEG_NEG_ABS]).fired) == pairs
        monkeypatch.setattr(fixed_point, "find", whole)
        return seen

    assert visits(1000) <= 10 * visits(100) * 1.05


@pytest.mark.slow
def test_a_chain_collapses_in_one_go() -> None:
    """Each rewrite makes the next possible; order and links stay right through a thousand of them."""
    collapse = pattern(Op("Abs", Op("Abs", Var("x"))), to_abs)
    graph = load(chain(1000))
    assert len(apply(graph, [NEG_NEG_ABS, collapse]).fired) == 1999
    assert ops(graph) == ["Abs"]
    assert_sound(graph)


@pytest.mark.slow
def test_many_readers_of_one_tensor_stay_cheap() -> None:
    """2,000 nodes read one tensor and one constant."""
    nodes = [onnx.helper.make_node("Identity", ["x"], ["a"], name="root")]
    nodes += [onnx.helper.make_node("Add", ["a", "c"], [f"b{n}"], name=f"add{n}") for n in range(2000)]
    nodes.append(onnx.helper.make_node("Sum", [f"b{n}" for n in range(2000)], ["y"], name="sum"))
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [2]) for name in "xy")
    made = onnx.helper.make_graph(nodes, "g", [x], [y], [onnx.numpy_helper.from_array(np.ones(2, "f"), "c")])
    graph = load(onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8))
    to_sub = pattern(
        Op("Add", Var("x"), Const("c")),
        lambda match, edit: edit.replace(
            match.root.outputs[0],
            edit.node("Sub", [match["x"], edit.constant("minus", -match.array("c"))], name=match.root.name),
        ),
    )
    assert len(apply(graph, [to_sub]).fired) == 2000
    assert_sound(graph)
