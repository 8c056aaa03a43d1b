"""Widths that were chosen, against all choices one by one, plans of their recipes, and files."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.errors import RecipeError
from sbonnx.pipeline import prepare
from sbonnx.planning import Plan
from sbonnx.recipe import Recipe
from sbonnx.recipe import load as load_recipe
from sbonnx.recipe.node_patterns import matcher, pattern_of
from sbonnx.search import SensitivitySurvey, Trials, choose, open_trials, survey
from sbonnx.search.bit_costs import costs_of
from sbonnx.search.bit_groups import ACTIVATION, WEIGHT, with_choices
from sbonnx.search.bit_search import for_loss
from sbonnx.search.recipe_search import goal_of
from sbonnx.stages.state import Request, read_recipe
from tests.support.models import residual
from tests.support.values import some

FEEDS = [{"x": x} for x in np.random.default_rng(0).standard_normal((24, 2, 3, 8, 8)).astype(np.float32)]
LAYERS = ("stem", "conv1", "conv2", "fc")
SIZES = {"stem": 216, "conv1": 576, "conv2": 576, "fc": 80}
QUICK: dict[str, Any] = {"W.ROUNDING": "nearest", "MIXED.FEEDS": 4}


def trials_of(keys: dict[str, Any], *, backend: str = "virtual") -> tuple[Trials, Recipe]:
    recipe, rules = read_recipe(None, backend, {**QUICK, "held_out": 0, **keys})
    return open_trials(Request(residual(), recipe, rules, data=FEEDS)), recipe


def weight_bits(plan: Plan) -> dict[str, int]:
    """Bits of the weight of each node; the nodes without one are float."""
    return {reader.node: site.spec.bits for site in plan.of_role("weight") for reader in site.readers}


def plan_of(recipe: Recipe, trials: Trials) -> Plan:
    return prepare(residual(), recipe, trials.rules).plan


def best_of_all(here: SensitivitySurvey, limit: float) -> float:
    """The least sum of losses of all choices of weights whose bits are within a limit."""
    layers = [layer for group in here.groups for layer in group.layers]
    found = []
    for widths in product(*(layer.losses for layer in layers)):
        bits = sum(SIZES[layer.names[0]] * (width or 32) for layer, width in zip(layers, widths, strict=True))
        if bits <= limit * sum(SIZES.values()):
            found.append(sum(layer.losses[width] for layer, width in zip(layers, widths, strict=True)))
    return min(found)


@cache
def survey_of_weights() -> SensitivitySurvey:
    """Losses of the weights at 2, 4 and 8 bits, which depend on no budget."""
    return survey(*trials_of({"average_bits": 4, "MIXED.WEIGHTS": [2, 4, 8]}))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("budget", [2.5, 4, 5.7])
@pytest.mark.parametrize("solver", ["exact", "greedy"])
def test_bits_on_average(budget: float, solver: str) -> None:
    keys: dict[str, Any] = {"average_bits": budget, "MIXED.SOLVER": solver, "MIXED.WEIGHTS": [2, 4, 8]}
    trials, recipe = trials_of(keys)
    found = choose(trials, recipe)
    plan = weight_bits(plan_of(found.recipe, trials))
    assert plan.keys() == SIZES.keys()
    average = sum(SIZES[name] * bits for name, bits in plan.items()) / sum(SIZES.values())
    assert average <= budget
    assert found.figures[found.tried.index(found.best)] == pytest.approx(average)
    assert found.best.score.error == min(one.score.error for one in found.tried)
    least = best_of_all(survey_of_weights(), budget)
    first = found.tried[0].predicted
    assert first is not None
    assert first == pytest.approx(least) if solver == "exact" else first >= least * (1 - 1e-9)


def test_losses_are_those_of_the_layer_alone() -> None:
    """Against the network in which that weight alone is quantized, on the same feeds."""
    trials, recipe = trials_of({"average_bits": 4, "MIXED.WEIGHTS": [3, 8], "MIXED.FEEDS": 100})
    here = survey(trials, recipe)
    losses = {layer.names[0]: layer.losses for group in here.groups for layer in group.layers}
    for name in LAYERS:
        others = {"op:*": {"QUANTIZER": {"DISABLE": True}}}
        mine = {name: {"QUANTIZER": {"BIT": 3}, "ROUNDING": {"TYPE": "nearest", "SCALE": "search"}}}
        alone = load_recipe({"BACKEND": "virtual", "W": {"SPECIFIC": [mine, others]}, "A": {"SPECIFIC": [others]}})
        alone = load_recipe(alone, overrides={"CALIBRATION.MOMENTS.INPUTS": "float"})
        assert losses[name][3] == pytest.approx(trials.score(alone, name).error, rel=0.02), name


@pytest.mark.slow
def test_what_the_recipe_fixes_stays_and_counts() -> None:
    trials, recipe = trials_of({"average_bits": 5, "FIRST_BITS": "w8a8", "W.SPECIFIC": [{"fc": ["QUANTIZER.BIT", 6]}]})
    here = survey(trials, recipe)
    assert {name: bits for name, (_, bits, _) in here.kept.items()} == {"stem": 8, "fc": 6}
    found = choose(trials, recipe)
    plan = weight_bits(plan_of(found.recipe, trials))
    assert (plan["stem"], plan["fc"]) == (8, 6)
    assert sum(SIZES[name] * bits for name, bits in plan.items()) <= 5 * sum(SIZES.values())


def test_activations_too() -> None:
    """Readers of one tensor have one width, which is what the plan then has."""
    keys: dict[str, Any] = {
        "MIXED.BUDGET.BIT_OPERATIONS": 1.3,
        "MIXED.ACTIVATIONS": [4, 8, 16],
        "MIXED.WEIGHTS": [4, 8],
    }
    trials, recipe = trials_of(keys)
    found = choose(trials, recipe)
    chosen = {name: bits for side, names, bits in found.best.choices if side == ACTIVATION for name in names}
    assert len(set(chosen.values())) > 1
    sites = plan_of(found.recipe, trials).of_role("activation")
    assert {site.tensor: site.spec.bits for site in sites} == chosen


def test_operations_are_counted() -> None:
    """By hand: multiplications of each layer on a feed of two images, times the bits of both factors."""
    trials, recipe = trials_of({"MIXED.BUDGET.BIT_OPERATIONS": 0.75, "MIXED.WEIGHTS": [4, 8]})
    here = survey(trials, recipe)
    macs = {"stem": 2 * 64 * 216, "conv1": 2 * 64 * 576, "conv2": 2 * 64 * 576, "fc": 2 * 80}
    assert {layer.name: layer.multiplies for layer in here.layers} == macs
    costs = costs_of("bit_operations", here.base.graph, here.layers, here.kept, here.recipe, trials.rules)
    assert costs.limit(0.75) == 0.75 * sum(macs.values()) * 64
    plan = weight_bits(plan_of(choose(trials, recipe).recipe, trials))
    assert sum(macs[name] * bits * 8 for name, bits in plan.items()) <= 0.75 * sum(macs.values()) * 64


def test_the_size_is_that_of_the_file(tmp_path: Path) -> None:
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    keys: dict[str, Any] = {**QUICK, "MIXED.BUDGET.SIZE": 1.2, "MIXED.WEIGHTS": [4, 8, "float"]}
    report = sbonnx.quantize(
        tmp_path / "m.onnx", FEEDS, backend="virtual", output=tmp_path / "q.onnx", verify=False, **keys
    )
    ratio = (tmp_path / "q.onnx").stat().st_size / (tmp_path / "m.onnx").stat().st_size
    assert ratio <= 1.2
    assert some(some(report.search).mixed).unit == "size"


def test_times_are_those_of_the_kernels() -> None:
    trials, recipe = trials_of({"MIXED.BUDGET.LATENCY": 0.9, "MIXED.WEIGHTS": [8, "float"]}, backend="onnxruntime")
    here = survey(trials, recipe)
    costs = costs_of("latency", here.base.graph, here.layers, here.kept, here.recipe, trials.rules)
    for layer in here.layers:
        assert costs.of(layer, 8, 8) == costs.of(layer, 4, 8) != costs.of(layer, 0, 8) == costs.of(layer, 8, 16)
    assert costs.figure(sum(costs.of(layer, 0, 8) for layer in here.layers)) == pytest.approx(1)


@pytest.mark.slow
def test_a_loss_that_must_be_kept() -> None:
    keys = {"MIXED.LOSS": "relative", "minimize": "bits"}
    trials, recipe = trials_of({"max_loss": "5%", "MIXED.WEIGHTS": [2, 4, 8], **keys})
    found = for_loss(trials, survey(trials, recipe), goal_of(recipe, trials))
    assert found.met and found.best.score.loss <= 0.05
    cheaper = [one for one in found.tried if one.cost < found.best.cost]
    assert all(one.score.loss > 0.05 for one in cheaper)
    again, recipe = trials_of({"max_loss": 1e-6, "MIXED.WEIGHTS": [2, 4], **keys})
    lost = for_loss(again, survey(again, recipe), goal_of(recipe, again))
    assert not lost.met and len(lost.tried) == 1 and "not reached" in lost.notes[0]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too little": ({"average_bits": 1.5}, "the cheapest choice takes 2"),
    "nothing to choose": ({"average_bits": 4, "MIXED.WEIGHTS": [4]}, "nothing to choose"),
    "no such times": ({"MIXED.BUDGET.LATENCY": 0.5}, "no times are known for the backend virtual"),
    "fp8": ({"bits": "fp8", "average_bits": 4}, "widths of integers"),
    "two budgets": ({"average_bits": 4, "MIXED.BUDGET.SIZE": 0.2}, "2 goals, BUDGET.BITS, BUDGET.SIZE"),
    "a budget and a loss": ({"average_bits": 4, "max_loss": 0.05}, "2 goals, BUDGET.BITS, MAX_LOSS"),
    "no share": ({"max_loss": "50"}, "must be a share"),
    "half a percent or a half": ({"max_loss": "0.5"}, "write 0.5% or 50%"),
    "a number, half a percent or a half": ({"max_loss": 0.5}, "write 0.5% or 50%"),
    "narrower widths": (
        {"bits": "w4a8", "max_loss": "1%", "MIXED.WEIGHTS": [2, 4]},
        "MAX_LOSS alone only gives layers more bits",
    ),
    "fewest bits of no loss": ({"minimize": "bits"}, "set MIXED.MAX_LOSS"),
    "no width": ({"MIXED.WEIGHTS": [1]}, "must be 0 .float. or a whole number of bits"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be(case: str) -> None:
    keys, message = WRONG[case]
    with pytest.raises(RecipeError, match=message):
        trials, recipe = trials_of(keys)
        choose(trials, recipe)


def test_widths_that_the_backend_does_not_take() -> None:
    trials, recipe = trials_of({"average_bits": 4, "MIXED.WEIGHTS": [4, 12]}, backend="onnxruntime")
    with pytest.raises(RecipeError, match="must be 2 to 8 for the backend onnxruntime"):
        choose(trials, recipe)


@pytest.mark.parametrize("name", ["conv[1]", "a*b", "plain", "x:y", "q?"])
def test_patterns_mean_one_name(name: str) -> None:
    assert matcher(pattern_of(name, "node")).hits_node(name, "Conv")
    assert matcher(pattern_of(name, "tensor")).hits_tensor(name)
    for other in ("conv1", "ab", "a1b", "plainer", "qq", "y"):
        assert not matcher(pattern_of(name, "node")).hits_node(other, "Conv")
        assert not matcher(pattern_of(name, "tensor")).hits_tensor(other)


def test_entries_come_before_those_of_the_recipe() -> None:
    recipe = load_recipe({"W": {"SPECIFIC": [{"fc": ["QUANTIZER.BIT", 6]}]}})
    keys = with_choices(recipe, [(WEIGHT, ("stem",), 2), (WEIGHT, ("conv1",), 8), (ACTIVATION, ("x",), 16)])
    found = load_recipe(keys)
    assert [list(entry) for entry in keys["W"]["SPECIFIC"]] == [["node:stem"], ["fc"]]  # 8 bits are those of all
    stem = found.settings("w", node="stem", op="Conv", tensor="ws")
    assert (stem.bits, stem.rounding_scale) == (2, "search")
    assert found.settings("a", node="stem", op="Conv", tensor="x").bits == 16
