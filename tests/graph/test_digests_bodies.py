"""Digests inside If and Loop: what says when, how often and on what a body runs counts."""

from __future__ import annotations

import time

import numpy as np

from sbonnx.graph import Graph, Node, Variable, load
from sbonnx.graph.digests import tensor_digests
from tests.graph.digesting import IF, LOOP, changed, of, set_weight
from tests.support.models import model


def test_a_branch_depends_on_its_condition_and_on_itself() -> None:
    proto = model(IF, k1=(4,), k2=(4,))
    assert changed(proto, set_weight("k1", np.ones(4, np.float32))) == {"k1", "m", "t", "y"}
    assert changed(proto, set_weight("k2", np.ones(4, np.float32))) == {"k2", "q", "e", "y"}

    def negate(graph: Graph) -> None:
        node = next(one for one in graph.nodes if one.op == "If")
        other = Variable("negated", np.bool_, ())
        graph.nodes.append(Node("Not", "negate", {}, [node.inputs[0]], [other]))
        node.inputs[0] = other

    assert changed(proto, negate) == {"m", "t", "q", "e", "y"}, "the branches run on other samples"


def test_a_branch_is_not_what_always_runs_nor_the_other_branch() -> None:
    text = """agraph (float[N,4] x, bool c) => (float[N,4] y, float[N,4] z) {
        z = Sigmoid (x)
        y = If (c) < then_branch = a () => (float[N,4] t) { t = Sigmoid (x) },
                     else_branch = b () => (float[N,4] e) { e = Sigmoid (x) } >
    }"""
    found = of(model(text))
    assert len({found["z"], found["t"], found["e"]}) == 3


def test_a_loop_counts_as_a_whole() -> None:
    proto = model(LOOP, k=(4,))
    inside = {"i", "c", "s", "c2", "d", "s2"}
    assert inside <= of(proto).keys()
    assert changed(proto, set_weight("k", np.ones(4, np.float32))) == {"k", "y", *inside}
    text = LOOP.replace("d = Mul (s, k)", "d = Mul (k, s)")
    assert of(model(text, k=(4,)))["y"] != of(proto)["y"], "the parameters are told apart"


def test_parameters_of_loops_in_loops_are_told_apart() -> None:
    text = """agraph (float[4] x, int64 n, bool go) => (float[4] y) {
        y = Loop (n, go, x) < body = outer (int64 i, bool c, float[4] s) => (bool c2, float[4] s2) {
            c2 = Identity (c)
            s2 = Loop (n, go, s) < body = inner (int64 j, bool d, float[4] u) => (bool d2, float[4] u2) {
                d2 = Identity (d)  u2 = Sub (u, WHICH)
            } >
        } >
    }"""
    own, enclosing = (of(model(text.replace("WHICH", name))) for name in ("u", "s"))
    assert own["y"] != enclosing["y"] and own["u"] != own["s"]


def test_bodies_in_bodies_take_linear_time() -> None:
    """Twenty deep; a walk that looks into each body twice would look a million times."""
    inner = "r20 = Relu (x)"
    for depth in range(19, -1, -1):
        inner = (
            f"r{depth} = If (c) < then_branch = a{depth} () => (float[4] r{depth + 1}) {{ {inner} }}, "
            f"else_branch = b{depth} () => (float[4] e{depth}) {{ e{depth} = Tanh (x) }} >"
        )
    graph = load(model(f"agraph (float[4] x, bool c) => (float[4] r0) {{ {inner} }}"))
    start = time.perf_counter()
    assert len(set(tensor_digests(graph).values())) >= 42
    assert time.perf_counter() - start < 2
