"""A changed recipe in simulation: what a run with it gives, without the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sbonnx import pipeline, recipe
from sbonnx.heads.losses import RegionTrials
from sbonnx.search.advice import comparison_of_simulated, worst_db
from sbonnx.stages.changed_recipe import simulated
from sbonnx.stages.state import PipelineState, Request, read_recipe
from tests.profile.test_causes import images, network
from tests.support.values import some

PROTO = network(gain=20.0)


def finished(*changes: str, backend: str = "onnxruntime") -> PipelineState:
    settings, rules = read_recipe(None, backend, ("HEADS=none", *changes))
    return pipeline.quantize(Request(PROTO, settings, rules, data=images(outlier=40.0)))


@pytest.fixture(scope="module")
def state() -> PipelineState:
    """The run that is changed; TensorRT's rules, so that the tensors of a Concat share a scale."""
    return finished(backend="tensorrt")


@pytest.mark.parametrize(
    "change",
    [
        "SAMPLES=8",
        'A.SPECIFIC=[{"tensor:x": {"OBSERVER": {"TYPE": "minmax"}}}]',
        'OWN_SCALES=["tensor:a"]',
        'EXCLUDE=["node:first"]',
    ],
)
def test_the_simulation_predicts_the_run(state: PipelineState, change: str) -> None:
    graph, judged = state.prepared.graph, list(some(state.data).judged)
    trials = RegionTrials(graph, [tensor.name for tensor in graph.outputs], judged, "cpu")
    networks = simulated(state, recipe.load(state.prepared.recipe, overrides=[change]))
    predicted = [trials.error(trials.run(network)).sqnr_db for network in networks]
    assert max(predicted) == pytest.approx(some(finished(change, backend="tensorrt").report.sqnr_db), abs=0.6)


@pytest.mark.parametrize("change", ["W.QSCHEME=per-tensor-symmetric", "MODE=weight_only"])
def test_other_weights_take_a_run(state: PipelineState, change: str) -> None:
    assert not list(simulated(state, recipe.load(state.prepared.recipe, overrides=[change])))


def test_half_precision_takes_a_run(state: PipelineState) -> None:
    half: Any = replace(state, prepared=replace(state.prepared, plan=replace(state.prepared.plan, float_type="fp16")))
    assert not list(simulated(half, state.prepared.recipe))


def test_the_file_of_a_simulated_change_is_compared_with_float() -> None:
    """16 bits for an activation need another opset than the graph has."""
    before = finished()
    changed = recipe.load(before.prepared.recipe, overrides=['A.SPECIFIC=[{"tensor:x": {"QUANTIZER": {"BIT": 16}}}]'])
    network = next(iter(simulated(before, changed)))
    assert before.prepared.graph.opset < 21
    graph, judged = before.prepared.graph, list(some(before.data).judged)
    trials = RegionTrials(graph, [tensor.name for tensor in graph.outputs], judged, "cpu")
    comparison = some(comparison_of_simulated(before, changed, network))
    simulated_db = trials.error(trials.run(network)).sqnr_db
    assert worst_db(comparison) == pytest.approx(simulated_db, abs=0.5)  # kernels of CPUs round sums otherwise
