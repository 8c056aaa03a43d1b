"""The quantized stream against a plain loop: for each site in order, the whole model run quantized up to there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sbonnx.calib.engine import observation as observe
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.quantized.stream import QuantizedInputs
from sbonnx.calib.quantized.stream_state import StreamResult
from sbonnx.graph import Graph, load
from sbonnx.pipeline import prepare
from sbonnx.planning.types import Plan, Solution
from sbonnx.spec import QParams, QuantSpec
from sbonnx.stages.state import read_recipe
from tests.calib.quantized.quantized_loop import (
    A4,
    FEEDS,
    MATRIX,
    W4,
    Feeds,
    floats_of,
    loop,
    pairs_of,
    residual_plan,
    site_at,
)
from tests.support.calibration import calibrate
from tests.support.models import model, residual
from tests.support.naive import plan_linear


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages run without optimisation, as `Forward` does: then the numbers are equal to the last bit."""
    monkeypatch.setattr(observe, "LayerRunner", _unoptimised)


def _unoptimised(graph: Graph, *, any_layout: Any, **options: Any) -> LayerRunner:
    return LayerRunner(graph, **options, optimisation="off")


def check(
    graph: Graph, plan: Plan, feeds: Feeds, asym: QuantizedInputs | None = None, *, rtol: float = 0, **switches: bool
) -> Solution:
    """The stream and the loop find the same; some range differs from float, or the test shows nothing."""
    found = calibrate(graph, plan, feeds, asym=asym or QuantizedInputs())
    expected = loop(graph, plan, feeds, **switches)
    plain = floats_of(graph, plan, feeds)
    assert found.bounds.keys() == expected.keys() == plain.keys()
    for key, bounds in expected.items():
        np.testing.assert_allclose(found.bounds[key].lo, bounds.lo, rtol=rtol, err_msg=key)
        np.testing.assert_allclose(found.bounds[key].hi, bounds.hi, rtol=rtol, err_msg=key)
    moved = [key for key, bounds in plain.items() if not np.array_equal(bounds.hi, found.bounds[key].hi)]
    assert moved
    return found


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("observer", ["minmax", "mse", "percentile", "moving_average"])
def test_equals_the_loop(observer: str, bias: bool) -> None:
    """A stem, a residual block whose skip reads the activation in float, a classifier; all at 4 bits."""
    graph = load(residual())
    check(graph, residual_plan(graph, observer, bias=bias), FEEDS)


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize(("weights", "activations"), [(True, False), (False, True)])
def test_one_side_alone(weights: bool, activations: bool) -> None:
    graph = load(residual())
    asym = QuantizedInputs(weights=weights, activations=activations)
    check(graph, residual_plan(graph, bias=True), FEEDS, asym, weights=weights, activations=activations)


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(QuantSpec(bits=4, signed=False, symmetric=False, axis=1), id="per channel"),
        pytest.param(QuantSpec(bits=3, narrow=True), id="narrow"),
        pytest.param(QuantSpec(bits=12, signed=False, symmetric=False), id="12 bits"),
        pytest.param(QuantSpec(bits=16), id="16 bits"),
        pytest.param(QuantSpec(), id="8 bits"),
    ],
)
def test_every_kind_of_code(spec: QuantSpec) -> None:
    graph = load(residual())
    check(graph, plan_linear(graph, activation=spec, weight=W4), FEEDS)


def test_optimised_stages_agree_to_the_last_bits() -> None:
    """Without the fixture: sums in another order."""
    graph = load(residual())
    plan = plan_linear(graph, weight=QuantSpec(axis=0))
    found, expected = calibrate(graph, plan, FEEDS, asym=QuantizedInputs()).bounds, loop(graph, plan, FEEDS)
    for key, bounds in expected.items():
        step = float(bounds.hi - bounds.lo) / 255
        np.testing.assert_allclose(found[key].hi, bounds.hi, atol=step)
        np.testing.assert_allclose(found[key].lo, bounds.lo, atol=step)


CONCAT = """
agraph (float[N,4] x, float[N,4] z) => (float[N,4] y) {
    a = MatMul (x, wa)
    b = MatMul (z, wb)
    ra = Relu (a)
    rb = Tanh (b)
    c = Concat <axis = -1> (ra, rb)
    d = MatMul (c, wc)
    y = MatMul (d, wd)
}"""


@pytest.mark.usefixtures("plainly")
def test_a_group_around_a_concat() -> None:
    """Two inputs and the output of Concat share a scale, which its readers need before the output was measured."""
    graph = load(model(CONCAT, wa=(4, 4), wb=(4, 4), wc=(8, 4), wd=(4, 4)))
    concat = next(node.name for node in graph.nodes if node.op == "Concat")
    plan = plan_linear(graph, activation=A4, weight=MATRIX)
    sites = [replace(site, group="g") if site.key == "c" else site for site in plan.sites]
    around = [site_at("ra", "ra", [(concat, 0)], group="g"), site_at("rb", "rb", [(concat, 1)], group="g")]
    at = next(i for i, site in enumerate(sites) if site.key == "c")
    found = check(graph, replace(plan, sites=(*sites[:at], *around, *sites[at:])), pairs_of())
    assert found.qparams["ra"].scale == found.qparams["rb"].scale == found.qparams["c"].scale


@pytest.mark.usefixtures("plainly")
def test_some_readers_read_it_plain_and_some_share_a_weight() -> None:
    """One weight behind two MatMuls; a tensor with two sites of different widths and a float reader."""
    text = """
    agraph (float[N,4] x) => (float[N,4] y) {
        a = MatMul (x, w)
        r = Tanh (a)
        b = MatMul (r, w)
        c = Mul (r, b)
        d = MatMul (c, v)
        e = Sub (d, r)
        y = MatMul (e, v)
    }"""
    graph = load(model(text, w=(4, 4), v=(4, 4)))
    sub = next(node.name for node in graph.nodes if node.op == "Sub")
    plan = plan_linear(graph, activation=A4, weight=MATRIX)
    eight = site_at("r/8", "r", [(sub, 1)], spec=QuantSpec(bits=8, signed=False, symmetric=False))
    check(graph, replace(plan, sites=(*plan.sites, eight)), [{"x": feed["x"]} for feed in pairs_of()])


BRANCHES = """
agraph (float[N,4] x, bool up) => (float[N,4] y) {
    a = MatMul (x, wa)
    m = If (up) <
        then_branch = first () => (float[N,4] t) {
            p = MatMul (a, wt)
            t = MatMul (p, wt)
        },
        else_branch = second () => (float[N,4] e) { e = MatMul (a, we) }
    >
    r = Relu (m)
    y = MatMul (r, wb)
}"""


@pytest.mark.usefixtures("plainly")
def test_branches_run_quantized_with_their_float_ranges() -> None:
    """The branches read a tensor of the main graph quantized; behind the If the range is measured anew."""
    proto = model(BRANCHES, wa=(4, 4), wt=(4, 4), we=(4, 4), wb=(4, 4))
    graph = load(proto)
    plan = plan_linear(graph, activation=A4, weight=MATRIX)
    feeds = [{"x": feed["x"], "up": np.array(i % 3 > 0)} for i, feed in enumerate(pairs_of(9))]
    found = check(graph, plan, feeds)
    inner = [site for site in plan.of_role("activation") if site.scope]
    assert [site.tensor for site in inner] == ["p"]
    np.testing.assert_array_equal(found.bounds["p"].hi, floats_of(graph, plan, feeds)["p"].hi)


@pytest.mark.usefixtures("plainly")
def test_fixed_ranges_and_sites_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range fixed by hand is what readers see; a branch that never runs stays float and refused."""
    graph = load(model(BRANCHES, wa=(4, 4), wt=(4, 4), we=(4, 4), wb=(4, 4)))
    plan = plan_linear(graph, activation=A4, weight=MATRIX)
    fixed = [replace(site, fixed=(-1.0, 1.0)) if site.key == "a" else site for site in plan.sites]
    feeds = [{"x": feed["x"], "up": np.array(False)} for feed in pairs_of()]
    for alone in (True, False):
        found = check(graph, replace(plan, sites=tuple(fixed), weights_alone=alone), feeds)
        assert found.bounds["a"].hi == 1
        assert "p" not in found.bounds
        assert [refusal.where for refusal in found.refusals][:1] == ["p"]


@pytest.mark.usefixtures("plainly")
def test_half_precision() -> None:
    """But for the last bit: onnxruntime leaves out the rounding to half between two casts."""
    text = """
    agraph (float16[N,4] x) => (float16[N,4] y) {
        a = MatMul (x, w)
        b = MatMul (a, w)
        y = MatMul (b, w)
    }"""
    graph = load(model(text, w=np.random.default_rng(0).standard_normal((4, 4)).astype(np.float16)))
    feeds = [{"x": feed["x"].astype(np.float16)} for feed in pairs_of()]
    for spec in (A4, QuantSpec(bits=8, signed=False, symmetric=False)):
        check(graph, plan_linear(graph, activation=spec, weight=MATRIX), feeds, rtol=2**-10)


@pytest.mark.usefixtures("plainly")
def test_values_that_are_no_tensors_are_computed_by_each_stage() -> None:
    """A sequence cannot be the input of a stage: both stages that read it make it."""
    text = """
    agraph (float[N,4] x) => (float[N,2] y) {
        a = MatMul (x, w)
        s = SplitToSequence <axis = 1> (a, two)
        p = SequenceAt (s, first)
        b = MatMul (p, v)
        q = SequenceAt (s, second)
        c = Add (b, q)
        y = MatMul (c, v)
    }"""
    numbers: dict[str, Any] = {"two": np.array([2, 2]), "first": np.array(0), "second": np.array(1)}
    graph = load(model(text, w=(4, 4), v=(2, 2), **numbers))
    check(graph, plan_linear(graph, activation=A4, weight=MATRIX), [{"x": feed["x"]} for feed in pairs_of()])


@pytest.mark.usefixtures("plainly")
def test_lengths_that_vary() -> None:
    text = """
    agraph (float[N,T,4] x) => (float[N,T,4] y) {
        a = MatMul (x, w)
        r = Tanh (a)
        b = MatMul (r, w)
        y = MatMul (b, w)
    }"""
    graph = load(model(text, w=(4, 4)))
    rng = np.random.default_rng(5)
    feeds = [{"x": rng.standard_normal((1, length, 4)).astype(np.float32)} for length in (3, 7, 3, 1)]
    check(graph, plan_linear(graph, activation=A4, weight=MATRIX), feeds)


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_plans_of_the_backends(backend: str) -> None:
    """Pairs behind adds and pools, groups, 8 bits."""
    prepared = prepare(residual(), *read_recipe(None, backend, {}))
    found = check(prepared.graph, prepared.plan, FEEDS)
    assert len(found.bounds) >= {"onnxruntime": 4, "tensorrt": 2}[backend]


def test_only_channels_with_another_scale_are_rounded_again() -> None:
    """Scales raised for int32 biases since: the other channels keep the codes that later layers were fitted to."""
    site = site_at("w", "w", [], spec=QuantSpec(axis=0))
    weight = np.array([[0.4, -0.4], [1e-9, 0.0]], np.float32)
    codes = np.array([[41, -39], [7, 0]], np.int8)
    scale = np.array([0.01, 1e-10], np.float32)
    raised = QParams(np.array([0.01, 1e-5], np.float32), np.zeros(2, np.int8), site.spec)
    known = StreamResult({}, {site.key: codes}, {site.key: scale}).solve(None)
    np.testing.assert_array_equal(known(site, weight, raised), [[41, -39], [0, 0]])
    same = QParams(scale, np.zeros(2, np.int8), site.spec)
    assert known(site, weight, same) is codes
