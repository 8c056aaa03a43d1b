"""Errors of quantized activations against a forward pass that fake-quantizes in numpy between onnxruntime sessions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.calib.quantized.forward import Forward
from sbonnx.graph import Graph, load
from sbonnx.graph.query import tensors_by_name
from sbonnx.metrics import ratio_db
from sbonnx.planning.types import Plan, Solution
from sbonnx.profiling import errors
from sbonnx.spec import QuantSpec
from tests.calib.engine.branching import nested
from tests.support.calibration import calibrate
from tests.support.models import model, residual
from tests.support.naive import plan_linear

RNG = np.random.default_rng(5)
X = RNG.standard_normal((6, 3, 8, 8)).astype(np.float32)
FEEDS = [{"x": X[:2]}, {"x": X[2:]}]
BRANCH_FEEDS = [
    {"x": RNG.standard_normal((1, 4)).astype(np.float32), "a": np.array(a), "b": np.array(b)}
    for a, b in [(True, True), (True, False), (False, True)]
]
HALF = RNG.standard_normal((3, 4)).astype(np.float16)


def half() -> onnx.ModelProto:
    """Two products in half precision."""
    text = "agraph (float16[N,4] x) => (float16[N,4] y) { h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }"
    proto = model(text, opset=19, w=HALF[:1].T @ HALF[1:2], v=(HALF.T @ HALF).astype(np.float16))
    for number, node in enumerate(proto.graph.node):
        node.name = f"n{number}"
    return proto


def expected(graph: Graph, plan: Plan, solution: Solution, feeds: list[Any]) -> list[tuple[str, float, float]]:
    """Tensor, isolated and accumulated error of each activation site of the main graph."""
    sites = [site for site in plan.of_role("activation") if not site.scope]
    names = [site.tensor for site in sites]
    energies = np.zeros((3, len(sites)))
    with (
        Forward(graph, plan, solution, w_quant=False, a_quant=False, tensors=names) as floats,
        Forward(graph, plan, solution, tensors=names) as quantized,
    ):
        for feed in feeds:
            reference, found = floats(feed), quantized(feed)
            for place, site in enumerate(sites):
                x = reference[site.tensor]
                alone = solution.qparams[site.key].fake_quant(x).astype(x.dtype).astype(np.float64) - x
                gathered = found[site.tensor].astype(np.float64) - x
                signal = x.astype(np.float64)
                energies[:, place] += [(signal**2).sum(), (alone**2).sum(), (gathered**2).sum()]
    return [
        (site.tensor, ratio_db(signal, alone), ratio_db(signal, gathered))
        for site, (signal, alone, gathered) in zip(sites, energies.T, strict=True)
    ]


def check(graph: Graph, plan: Plan, solution: Solution, feeds: list[Any]) -> None:
    """The rows of `errors` are those of `expected`, but for the order of sums."""
    rows = errors(graph, plan, solution, feeds)
    assert len(rows) > 1
    for row, (tensor, alone_db, sqnr_db) in zip(rows, expected(graph, plan, solution, feeds), strict=True):
        assert row.tensor == tensor
        assert (row.alone_db, row.sqnr_db) == pytest.approx((alone_db, sqnr_db), rel=1e-12)


@pytest.mark.parametrize(
    ("activation", "weight"),
    [
        pytest.param(QuantSpec(signed=False, symmetric=False), QuantSpec(axis=0), id="w8a8"),
        pytest.param(QuantSpec(bits=16, signed=False, symmetric=False), QuantSpec(axis=0), id="w8a16"),
        pytest.param(QuantSpec(bits=3), QuantSpec(bits=4, axis=0), id="w4a3"),
        pytest.param(QuantSpec(axis=1), QuantSpec(bits=4, axis=0), id="a scale a channel"),
    ],
)
def test_rows_equal_the_forward_pass(activation: QuantSpec, weight: QuantSpec) -> None:
    graph = load(residual(opset=21))
    plan = plan_linear(graph, activation=activation, weight=weight, bias=activation.axis is None)
    sites = tuple(site for site in plan.sites if site.spec.axis is None or len(_shape(graph, site.tensor)) == 4)
    plan = replace(plan, sites=sites)
    check(graph, plan, calibrate(graph, plan, FEEDS), FEEDS)


def _shape(graph: Graph, tensor: str) -> Any:
    return tensors_by_name(graph)[tensor].shape


def test_quantized_branches_and_an_outer_tensor() -> None:
    graph = load(nested())
    plan = plan_linear(graph)
    check(graph, plan, calibrate(graph, plan, BRANCH_FEEDS), BRANCH_FEEDS)


def test_half_precision() -> None:
    graph = load(half())
    plan = plan_linear(graph)
    feeds = [{"x": HALF}]
    check(graph, plan, calibrate(graph, plan, feeds), feeds)


def test_corrected_biases() -> None:
    graph = load(residual())
    plan = plan_linear(graph)
    solution = calibrate(graph, plan, FEEDS)
    biases = {
        tensor.name: np.asarray(tensor.values + 0.25)
        for node in graph.nodes
        for tensor in node.inputs[2:]
        if node.op == "Conv"
    }
    corrected = replace(solution, constants=biases)
    check(graph, plan, corrected, FEEDS)
    assert errors(graph, plan, corrected, FEEDS) != errors(graph, plan, solution, FEEDS)


def test_quantized_inputs_alone_and_nothing() -> None:
    graph = load(residual())
    plan = plan_linear(graph)
    solution = calibrate(graph, plan, FEEDS)
    (row,) = errors(graph, replace(plan, sites=plan.sites[:1]), solution, FEEDS)
    assert (row.tensor, row.sqnr_db) == ("x", np.inf)
    assert errors(graph, Plan(()), Solution({}, {}, {}), FEEDS) == ()
