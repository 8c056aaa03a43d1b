"""Branches are observed as models of their own, on the samples that picked them."""

from __future__ import annotations

import numpy as np
import pytest

from sbonnx.calib.engine.schedule import branches, plan_branches
from sbonnx.graph import load
from sbonnx.spec import Array
from tests.calib.engine.branching import nested, weights
from tests.support.calibration import calibrate
from tests.support.models import model
from tests.support.naive import plan_linear

RNG = np.random.default_rng(5)
FEEDS = [
    {"x": RNG.standard_normal((2, 4)).astype(np.float32) * (i + 1), "a": np.array(a), "b": np.array(b)}
    for i, (a, b) in enumerate([(True, True), (True, False), (False, True), (False, False), (True, True)])
]


def expected(feeds: list[dict[str, Array]]) -> dict[str, list[Array]]:
    """What every MatMul of `nested` reads, in numpy."""
    w = weights(nested())
    seen: dict[str, list[Array]] = {name: [] for name in ("r", "m", "v", "p1", "k")}
    for feed in feeds:
        r = np.maximum(feed["x"], 0)
        m = r @ w["w0"]
        seen["r"].append(r)
        if feed["a"]:
            p1 = np.tanh(m @ w["w1"])
            seen["m"].append(m)
            seen["v" if feed["b"] else "p1"].append(p1 + r if feed["b"] else p1)
        else:
            seen["k"].append(1 / (1 + np.exp(-m)))
    return seen


def test_paths_and_nesting() -> None:
    found = list(branches(load(nested())))
    assert [(b.scope.count("_branch"), b.picks) for b in found] == [(1, True), (2, True), (2, False), (1, False)]
    assert [b.condition for b in found] == ["a", "b", "b", "a"]
    assert found[1].outer == found[0].scope


def test_what_a_branch_reads_is_asked_of_the_scopes_around() -> None:
    graph = load(nested())
    outer, inner, _, _ = branches(graph)
    made = plan_branches(graph, {inner.scope: ["v"]})
    assert [segment.scope for segment in made.segments] == [outer.scope, inner.scope]
    assert made.segments[0].outputs == ("p1",)
    assert made.segments[1].conditions == (("a", True), ("b", True))
    assert set(made.kept) == {"a", "b", "m", "r"}


@pytest.mark.parametrize("granularity", ["whole", "layer", "budget"])
def test_ranges_of_the_samples_that_ran(granularity: str) -> None:
    graph = load(nested())
    solution = calibrate(graph, plan_linear(graph), FEEDS, granularity=granularity, memory=64)
    assert solution.refusals == ()
    for name, values in expected(FEEDS).items():
        lo = min(value.min() for value in values)
        hi = max(value.max() for value in values)
        if name == "m":  # read by a branch only: the outer run observes it on every sample
            m = np.concatenate([np.maximum(feed["x"], 0) @ weights(nested())["w0"] for feed in FEEDS])
            lo, hi = m.min(), m.max()
        np.testing.assert_allclose(solution.bounds[name].lo, lo, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(solution.bounds[name].hi, hi, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("picked", "refused"), [([0, 4], {"k"}), ([2, 3], {"p1", "v"}), ([1], {"v", "k"})])
def test_a_branch_that_never_ran_is_refused(picked: list[int], refused: set[str]) -> None:
    graph = load(nested())
    solution = calibrate(graph, plan_linear(graph), [FEEDS[i] for i in picked])
    assert {refusal.where for refusal in solution.refusals} == refused
    assert all("its branch never ran on the calibration data" in str(refusal) for refusal in solution.refusals)
    assert solution.bounds.keys() == {"r", "m", "v", "p1", "k"} - refused


def test_a_constant_condition_never_picks() -> None:
    text = """
    agraph (float[N,4] x) => (float[N,4] y) {
        y = If (never) <
            then_branch = yes () => (float[N,4] t) { k = Relu (x)
                t = MatMul (k, w) },
            else_branch = no () => (float[N,4] e) { h = Neg (x)
                e = MatMul (h, w) }
        >
    }"""
    graph = load(model(text, w=(4, 4), never=np.array(False)))
    solution = calibrate(graph, plan_linear(graph), [{"x": np.ones((1, 4), np.float32)}])
    (refusal,) = solution.refusals
    assert refusal.where == "k"
    assert "a constant that never picks its branch" in refusal.why
    assert solution.bounds["h"].lo == -1


def test_a_branch_that_reads_a_tensor_of_unknown_type_is_refused() -> None:
    text = """
    agraph (float[N,4] x, bool c) => (float[N,4] y) {
        g = Trilu (x)
        y = If (c) <
            then_branch = yes () => (float[N,4] t) { k = Relu (g)
                t = MatMul (k, w) },
            else_branch = no () => (float[N,4] e) { h = Neg (x)
                e = MatMul (h, w) }
        >
    }"""
    proto = model(text, opset=20, w=(4, 4))
    proto.graph.node[0].domain = "com.microsoft"
    proto.opset_import.add(domain="com.microsoft", version=1)
    graph = load(proto)
    feeds = [{"x": np.ones((1, 4), np.float32), "c": np.array(c)} for c in (True, False)]
    solution = calibrate(graph, plan_linear(graph), feeds)
    (refusal,) = solution.refusals
    assert refusal.where == "k"
    assert "its branch cannot run apart: the element type of 'g' is not known" in refusal.why
    assert solution.bounds["h"].lo == -1


def test_inside_a_loop_is_refused() -> None:
    text = """
    agraph (float[2,4] x, int64 n, bool c) => (float[2,4] y) {
        y = Loop (n, c, x) <
            body = step (int64 i, bool c1, float[2,4] s) => (bool c2, float[2,4] s2) {
                c2 = Identity (c1)
                h = Relu (s)
                s2 = MatMul (h, w)
            }
        >
    }"""
    graph = load(model(text, w=(4, 4)))
    feeds = {"x": np.ones((2, 4), np.float32), "n": np.array(2), "c": np.array(True)}
    solution = calibrate(graph, plan_linear(graph), [feeds])
    (refusal,) = solution.refusals
    assert refusal.where == "h"
    assert "Loop" in refusal.why
