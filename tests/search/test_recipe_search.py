"""The search for a recipe: what it keeps is no worse, what it found can be run again, what it cannot reach it says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.calib import held_out
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.engine import samples as calibration
from sbonnx.errors import DataError, RecipeError
from sbonnx.graph import load
from sbonnx.metrics import loss_kind
from sbonnx.pipeline import prepare
from sbonnx.recipe import load as load_recipe
from sbonnx.search import Score, open_trials, search
from sbonnx.search.actions import STEPS, Situation, steps_for
from sbonnx.search.recipe_search import PATIENCE, gain_db
from sbonnx.search.trial_scores import divide
from sbonnx.spec import Array
from sbonnx.stages.state import Request, read_recipe
from tests.support.models import residual, run
from tests.support.values import some

FEEDS = [{"x": x} for x in np.random.default_rng(0).standard_normal((16, 2, 3, 8, 8)).astype(np.float32)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    return tmp_path


def quantized(place: Path, name: str, **how: Any) -> sbonnx.Report:
    how = {"backend": "onnxruntime", "bits": "w4a8", "verify": False, **how}
    return sbonnx.quantize(place / "m.onnx", iter(FEEDS), output=place / name, **how)


@pytest.mark.slow
def test_what_it_finds_is_no_worse_and_can_be_run_again(place: Path) -> None:
    report = quantized(place, "auto.onnx", recipe="auto", rounding="gptq", save_recipe=place / "found.yaml")
    found = some(report.search)
    assert found.best.error <= some(found.plain).error
    assert found.held_out and found.judged_on == 4
    kept = [step for step in found.steps if step.kept]
    assert all(some(step.gain_db) > 0 for step in kept)
    assert any(not step.kept for step in found.steps)
    assert found.trials == len([step for step in found.steps if not step.why]) + 1
    again = sbonnx.quantize(
        place / "m.onnx", FEEDS, recipe=place / "found.yaml", output=place / "again.onnx", verify=False
    )
    assert (place / "again.onnx").read_bytes() == (place / "auto.onnx").read_bytes()
    assert again.search is None and again.settings == report.settings
    assert any("auto: " in note for note in report.notes)


def test_gain_of_a_step_that_breaks_the_outputs() -> None:
    whole, broken = Score(0.1, 0.0, 10.0, None), Score(math.inf, math.inf, -math.inf, None)
    assert gain_db(whole, broken) == -math.inf
    assert gain_db(broken, whole) == math.inf
    assert gain_db(broken, broken) == 0.0


def test_scores_are_those_of_the_file(place: Path) -> None:
    """The recipe of a trial run apart, on the same feeds: its file in onnxruntime, against float, on those held out."""
    recipe, rules = read_recipe("auto", "virtual", {"bits": "w4a8", "W.ROUNDING": "nearest", "held_out": 0})
    trials = open_trials(Request(residual(), recipe, rules, data=FEEDS))
    fit, held = list(trials.samples.fit), list(trials.samples.held)
    score = trials.score(recipe, "plain")
    sbonnx.quantize(residual(), fit, recipe=trials.trial(recipe), output=place / "q.onnx", verify=False)
    plain = np.stack([run(residual(), feed)["y"] for feed in held])
    made = np.stack([run(str(place / "q.onnx"), feed)["y"] for feed in held])
    error = float(((made - plain) ** 2).sum() / (plain**2).sum())
    assert score.error == pytest.approx(error, rel=1e-3)
    assert score.changed == pytest.approx(float((made.argmax(-1) != plain.argmax(-1)).mean()))
    assert np.mean(score.by_feed) == pytest.approx(error, rel=1e-3)
    assert len(fit) + len(held) == len(FEEDS) and trials.judge.kind == "top1"


def test_boxes_have_no_changed_classes() -> None:
    """The largest of four coordinates is no class."""
    proto = residual()
    proto.graph.output.append(onnx.helper.make_tensor_value_info("y2", onnx.TensorProto.FLOAT, None))
    proto.graph.node.append(onnx.helper.make_node("Neg", ["y"], ["y2"], name="neg"))
    recipe, rules = read_recipe(None, "virtual", {"W.ROUNDING": "nearest", "held_out": 0})
    score = open_trials(Request(proto, recipe, rules, data=FEEDS)).score(recipe, "plain")
    assert score.changed is None and score.sqnr_db > 10


def test_samples_that_verify_the_result_are_not_tried_on() -> None:
    recipe, rules = read_recipe("auto", "virtual", {})
    feeds = [{"x": x} for x in np.random.default_rng(0).standard_normal((16, 8, 3, 8, 8)).astype(np.float32)]
    samples = open_trials(Request(residual(), recipe, rules, data=feeds)).samples
    graph = load(residual())
    verified = held_out.divide(calibration.Samples.of(feeds, graph), recipe.verify.held_out).held
    assert verified is not None
    tried = {row.tobytes() for part in (samples.fit, samples.held) for feed in part for row in feed["x"]}
    assert tried and not tried & {row.tobytes() for feed in verified for row in feed["x"]}


@pytest.mark.slow
def test_what_was_decided_is_not_tried(place: Path) -> None:
    report = quantized(place, "q.onnx", recipe="auto", observer="mse", rounding="nearest", weight_scale="observer")
    tried = {key for step in some(report.search).steps for key in step.keys}
    assert tried and not tried & {"A.OBSERVER.TYPE", "W.ROUNDING.TYPE", "W.ROUNDING.SCALE"}
    assert report.settings["A"]["OBSERVER"]["TYPE"] == "mse"
    given = {"AUTO": True, "W": {"ROUNDING": {"TYPE": "nearest"}}, "BIAS_CORRECTION": "none"}
    other = quantized(place, "q.onnx", recipe=given, force=True)
    assert not {"W.ROUNDING.TYPE", "BIAS_CORRECTION"} & {key for s in some(other.search).steps for key in s.keys}


def test_a_step_that_makes_it_worse_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a judge that likes nothing but smoothed inputs."""
    recipe, rules = read_recipe("auto", "onnxruntime", {"bits": "w4a8", "W.ROUNDING": "nearest"})
    trials = open_trials(Request(residual(), recipe, rules, data=FEEDS))

    def score_of(judge: Any, prepared: Any, solution: Any) -> Score:
        error = 0.5 if prepared.recipe.equalize.smooth_quant is True else 1.0
        return Score(error, error, 0.0, None)

    monkeypatch.setattr("sbonnx.search.trials.score_of", score_of)
    found = search(trials, recipe, frozenset({"W.ROUNDING"}))
    assert [one.what for one in found.attempts if one.kept] == ["smoothed inputs (SmoothQuant)"]
    assert found.recipe.equalize.smooth_quant is True
    assert found.recipe.a.observer.type == recipe.a.observer.type


@pytest.mark.slow
def test_the_search_ends_after_steps_without_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a judge to whom all recipes are equal."""
    recipe, rules = read_recipe("auto", "onnxruntime", {"bits": "w4a8"})
    trials = open_trials(Request(residual(), recipe, rules, data=FEEDS))

    monkeypatch.setattr("sbonnx.search.trials.score_of", lambda *_: Score(1.0, 1.0, 0.0, None))
    found = search(trials, recipe, frozenset())
    assert len(found.attempts) == PATIENCE < len(steps_for(Situation.of(recipe, load(residual())), frozenset()))
    assert not [one for one in found.attempts if one.kept]


@pytest.mark.slow
def test_more_bits_where_they_are_needed(place: Path) -> None:
    plain = {"observer": "mse", "weight_scale": "observer", "rounding": "nearest", "smooth_quant": False}
    report = quantized(place, "q.onnx", recipe="auto", min_sqnr=34, **{"MIXED.LOSS": "relative"}, **plain)
    mixed = some(some(report.search).mixed)
    assert mixed.met and some(report.search).best.sqnr_db >= 34
    assert some(some(report.search).plain).sqnr_db < 34
    bits = set(mixed.weights.values())
    assert max(bits, key=lambda one: one or 32) != 4
    assert not report.problems


@pytest.mark.slow
def test_what_cannot_be_reached_is_said(place: Path) -> None:
    keys = {"MIXED.WEIGHTS": [4], "MIXED.ACTIVATIONS": [8, 16], "MIXED.LOSS": "relative", "asym": False}
    report = quantized(place, "q.onnx", recipe="auto", max_loss=1e-5, rounding="nearest", observer="mse", **keys)
    assert not report.ok
    assert "was asked for on the feeds held out, and is not reached" in report.problems[0]
    assert not some(some(report.search).mixed).met


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "widths"), [("20%", {4}), ("5%", {4, 8, 16, 0}), ("0.1%", {8, 16, 0})])
def test_a_limit_only_raises_bits(limit: str, widths: set[int], place: Path) -> None:
    """From the widths asked for, which stay if they are good enough; with MINIMIZE, fewer bits are tried as well."""
    keys: dict[str, Any] = {"bits": "w4a8", "rounding": "nearest", "MIXED.LOSS": "relative", "backend": "virtual"}
    report = quantized(place, "q.onnx", max_loss=limit, **keys)
    found = {site.bits for site in report.sites if site.role == "weight"}
    assert found <= widths and (some(report.search).mixed is None) == (found == {4})
    assert some(report.search).best.loss <= float(limit.rstrip("%")) / 100
    fewest = quantized(place, "q.onnx", max_loss="20%", minimize="bits", force=True, **keys)
    assert min(site.bits for site in fewest.sites if site.role == "weight") < 4


def test_a_metric_of_the_user(place: Path) -> None:
    seen = []

    def metric(made: Mapping[str, Array], plain: Mapping[str, Array]) -> float:
        seen.append(set(made) | set(plain))
        return float(np.abs(made["y"] - plain["y"]).max() / np.abs(plain["y"]).max())

    keys = {"MIXED.WEIGHTS": [4, 8], "W.ROUNDING": "nearest", "minimize": "bits"}
    report = quantized(place, "q.onnx", max_loss="2%", metric=metric, backend="virtual", **keys)
    assert seen and all(names == {"y"} for names in seen)
    assert some(report.search).loss == "metric"
    assert some(report.search).best.loss <= 0.02 or not report.ok
    with pytest.raises(RecipeError, match="give max_loss as well"):
        quantized(place, "q.onnx", metric=metric, force=True)
    with pytest.raises(DataError, match="not a finite number"):
        quantized(place, "q.onnx", max_loss="2%", metric=lambda made, plain: float("nan"), force=True)


def test_auto_is_refused_where_no_trial_can_run() -> None:
    recipe, rules = read_recipe("auto", "onnxruntime", {})
    prepared = prepare(residual(), recipe, rules)
    assert any(one.what == "search" and one.where == "AUTO" for one in prepared.refusals)
    plain, _ = read_recipe(None, "onnxruntime", {})
    assert not plain.auto.enable and load_recipe(recipe, overrides={"AUTO": False}) == plain
    with pytest.raises(RecipeError, match="cannot be simulated"):
        read_recipe("auto", "onnxruntime", {"mode": "dynamic"})


def test_data_are_needed() -> None:
    with pytest.raises(DataError, match="give calibration data"):
        sbonnx.quantize(residual(), None, recipe="auto", mode="weight_only")


def test_feeds_are_divided() -> None:
    graph = load(residual())
    parts = divide(datasets.read(FEEDS, graph), graph, 0.25, 6)
    assert (len(parts.fit), len(parts.held), parts.divided) == (6, 4, True)
    fit, held = ([feed["x"] for feed in part] for part in (parts.fit, parts.held))
    assert not any(np.array_equal(one, other) for one in fit for other in held)
    one = divide(datasets.read([{"x": np.concatenate([feed["x"] for feed in FEEDS])}], graph), graph, 0.25, 100)
    assert (len(one.fit), len(one.held), one.divided) == (24, 8, True)
    few = divide(datasets.read(FEEDS[:2], graph), graph, 0.25, 100)
    assert few.divided and len(few.fit) == 3
    none = divide(datasets.read(FEEDS, graph), graph, 0.0, 100)
    assert not none.divided and len(none.held) == 16


def test_steps_fit_the_situation() -> None:
    graph = load(residual())

    def names(**keys: Any) -> set[str]:
        recipe, _ = read_recipe(None, "onnxruntime", keys)
        return {step.name for step in steps_for(Situation.of(recipe, graph), frozenset())}

    assert "adaround" in names(bits="w4a8") and "adaround" not in names(bits="w8a8")
    assert "gptq for all layers" in names(bits="w8a8") and "tuned batch norms" not in names(bits="w8a8")
    assert "cross-layer equalization" in names(w_qscheme="per-tensor-symmetric")
    assert "cross-layer equalization" not in names()
    assert not {name for name in names(mode="weight_only") if name.startswith("ranges of activations")}
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert loss_kind("auto", graph) == "top1" and loss_kind("relative", graph) == "relative"


@pytest.mark.parametrize(("before", "after", "better"), [(1.0, 0.9, True), (1.0, 0.99, False), (1.0, 1.1, False)])
def test_a_gain_is_more_than_chance(before: float, after: float, better: bool) -> None:
    noise = np.tile([0.05, -0.05], 8)

    def score(error: float, by_feed: Any) -> Score:
        return Score(error, 0.0, 0.0, None, tuple(by_feed))

    assert score(after, after + noise).beats(score(before, before + noise), 0.02) is better
    lucky = np.concatenate([[before - 16 * (before - after)], np.full(15, before)])
    assert not score(after, lucky).beats(score(before, np.full(16, before)), 0.02)
