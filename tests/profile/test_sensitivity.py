"""Sensitivities against calibrations of their own at each width, and against files with one layer quantized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sbonnx.errors import RecipeError
from sbonnx.graph import load
from sbonnx.planning.types import Plan, Site, Solution
from sbonnx.profiling import Candidate, WalkOptions, sensitivity
from sbonnx.spec import Array, QParams, QuantSpec
from tests.calib.engine.branching import nested
from tests.calib.quantized.test_forward import with_qdq
from tests.profile.test_layer_losses import BRANCH_FEEDS, FEEDS, ROLES, only, shown, squared
from tests.support.calibration import calibrate
from tests.support.models import model, residual, run
from tests.support.naive import plan_linear

CANDIDATES = [Candidate(4, 8), Candidate(8, 8), Candidate(None, 8), Candidate(4, None), Candidate(8, 16)]


def at(graph: Any, candidate: Candidate, feeds: Any = FEEDS) -> tuple[Plan, Solution]:
    """Plan and solution of the whole network at a candidate; what is float there has no sites."""
    weight = QuantSpec(bits=candidate.weight or 8, axis=0)
    activation = QuantSpec(bits=candidate.activation or 8, signed=False, symmetric=False)
    plan = plan_linear(graph, activation=activation, weight=weight)
    gone = {role for role, bits in (("weight", candidate.weight), ("activation", candidate.activation)) if bits is None}
    plan = replace(plan, sites=tuple(site for site in plan.sites if site.role not in gone))
    return plan, calibrate(graph, plan, feeds)


@pytest.fixture(scope="module")
def eight() -> tuple[Any, Any, Plan, Solution]:
    proto = residual(opset=21)
    graph = load(proto)
    return (proto, graph, *at(graph, Candidate(8, 8)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("given", [False, True], ids=["derived", "solved"])
def test_each_layer_at_each_width(given: bool, eight: tuple[Any, Any, Plan, Solution]) -> None:
    """At the layer and at the output: onnxruntime on a file in which that layer alone is quantized, at that width."""
    proto, graph, plan, solution = eight
    solved = {one: at(graph, one) for one in CANDIDATES}
    found = sensitivity(
        graph, plan, solution, CANDIDATES, FEEDS, checker="mse", network=True, solved=solved if given else None
    )
    assert [(row.layer, row.candidate) for row in found.rows] == [
        (layer, one) for layer in ("stem", "conv1", "conv2", "fc") for one in CANDIDATES
    ]
    tensors = {node.name: node.output[0] for node in proto.graph.node}
    for row in found.rows:
        part, numbers = solved[row.candidate]
        made = with_qdq(proto, only(part, row.layer, ROLES["alone"]), numbers)
        for tensor, value in ((tensors[row.layer], row.error), ("y", row.network)):
            plain = shown(proto, tensor)
            expected = squared(
                [run(shown(made, tensor), feed)[tensor] for feed in FEEDS], [run(plain, feed)[tensor] for feed in FEEDS]
            )
            assert value == pytest.approx(expected, rel=2e-3), (row.layer, row.candidate)
    assert not found.refusals


def test_more_bits_lose_less(eight: tuple[Any, Any, Plan, Solution]) -> None:
    _, graph, plan, solution = eight
    widths = [Candidate(bits, None) for bits in (2, 3, 4, 6, 8, 16)]
    rows = sensitivity(graph, plan, solution, widths, FEEDS).rows
    for layer in ("stem", "conv1", "conv2", "fc"):
        mine = [row.loss for row in rows if row.layer == layer]
        assert mine == sorted(mine, reverse=True)
        assert all(row.network is None and row.network_loss is None for row in rows)
        assert 5 < 20 * np.log10(mine[2] / mine[3]) < 20, "two bits are 12 dB"


def test_what_a_width_costs(eight: tuple[Any, Any, Plan, Solution]) -> None:
    """Multiplications by hand: pixels times weights for a convolution, rows times weights for a product."""
    _, graph, plan, solution = eight
    rows = sensitivity(graph, plan, solution, [Candidate(4, 8), Candidate(None, None)], FEEDS).rows
    batch = 2.0  # images a feed, on average
    pixels = {"stem": 64 * 8 * 27, "conv1": 64 * 8 * 72, "conv2": 64 * 8 * 72, "fc": 10 * 8}
    weights = {"stem": 8 * 27, "conv1": 8 * 72, "conv2": 8 * 72, "fc": 80}
    for row in rows:
        assert row.multiplies == batch * pixels[row.layer]
        assert row.weights == weights[row.layer]
        bits = (4, 8) if row.candidate.weight else (32, 32)
        assert row.bit_operations == row.multiplies * bits[0] * bits[1]
        assert row.weight_bits == row.weights * bits[0]
        assert len(row.sites) == 2
        assert row.candidate.weight or row.error == np.inf, "nothing is lost in float"
        assert row.to_dict()["candidate"] in ("w4a8", "wfaf")


def test_multiplications_of_a_transposed_convolution() -> None:
    text = """
    agraph (float[N,3,4,4] x) => (float[N,6,8,8] y) {
        y = ConvTranspose <kernel_shape = [2,2], strides = [2,2], group = 3> (x, w)
    }"""
    proto = model(text, w=(3, 2, 2, 2))
    proto.graph.node[0].name = "up"
    graph = load(proto)
    feeds = [{"x": np.ones((2, 3, 4, 4), np.float32)}]
    plan = plan_linear(graph, weight=QuantSpec())
    (row,) = sensitivity(graph, plan, calibrate(graph, plan, feeds), [Candidate(8, 8)], feeds).rows
    assert row.multiplies == 2 * 3 * 16 * 2 * 4, "each input value meets each weight of its channel"


def test_a_rounding_of_the_caller(eight: tuple[Any, Any, Plan, Solution]) -> None:
    """It gets the site at the candidate's width; at the width of the plan the solution's codes stand."""
    _, graph, plan, solution = eight
    asked = []

    def down(site: Site, weight: Array, qparams: QParams) -> Array:
        asked.append(site.spec.bits)
        return np.floor(qparams.quantize(weight) * 0.9).astype(qparams.spec.dtype)

    widths = [Candidate(4, None), Candidate(8, None)]
    plain = sensitivity(graph, plan, solution, widths, FEEDS, checker="mse").rows
    worse = sensitivity(graph, plan, solution, widths, FEEDS, checker="mse", solve=down).rows
    assert asked == [4] * 4
    for one, other in zip(plain, worse, strict=True):
        assert other.error > 1.1 * one.error if one.candidate.weight == 4 else other.error == one.error


def test_layers_in_branches_have_no_figure_at_the_outputs() -> None:
    proto = nested()
    graph = load(proto)
    plan, solution = at(graph, Candidate(8, 8), BRANCH_FEEDS)
    found = sensitivity(graph, plan, solution, [Candidate(4, 8)], BRANCH_FEEDS, network=True)
    known = {row.layer: row.network for row in found.rows}
    assert sum(value is None for value in known.values()) == 4
    assert {refusal.where for refusal in found.refusals} == {name for name, value in known.items() if value is None}


def test_feeds_are_walked_once_and_may_be_limited(eight: tuple[Any, Any, Plan, Solution]) -> None:
    _, graph, plan, solution = eight
    whole = sensitivity(
        graph, plan, solution, [Candidate(4, 8)], iter(FEEDS), network=True, options=WalkOptions(threads=2)
    )
    again = sensitivity(
        graph, plan, solution, [Candidate(4, 8)], FEEDS, network=True, options=WalkOptions(memory=64, threads=1)
    )
    assert whole == again
    first = sensitivity(graph, plan, solution, [Candidate(4, 8)], FEEDS, options=WalkOptions(limit=1)).rows
    alone = sensitivity(graph, plan, solution, [Candidate(4, 8)], FEEDS[:1]).rows
    assert first == alone


@pytest.mark.parametrize("bits", [1, 17])
def test_widths_that_no_code_has(bits: int) -> None:
    with pytest.raises(RecipeError, match=f"there are no codes of {bits} bits: use 2 to 16"):
        Candidate(bits, 8)
