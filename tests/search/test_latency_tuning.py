"""TUNE: what is kept is measured to be faster twice, loses nothing, and is a recipe that gives the same file again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.errors import RecipeError
from sbonnx.graph import load
from sbonnx.search import latency_tuning
from sbonnx.search.latency_tuning import LatencySearch
from sbonnx.search.placements import PlacementRegions
from sbonnx.verify.paired_times import TimeRatio, time_ratio
from tests.support.models import residual
from tests.support.values import some

FEEDS = [{"x": x} for x in np.random.default_rng(0).standard_normal((4, 2, 3, 8, 8)).astype(np.float32)]
FASTER, SLOWER = TimeRatio(0.8, (0.79, 0.81), 8), TimeRatio(1.2, (1.1, 1.3), 8)


class FakeTimer:
    """Clock that only models advance: by a fixed number of seconds, or by those of a list in turn."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def model(self, *seconds: float) -> Callable[[], None]:
        """Return a function that takes this long."""
        durations: Iterator[float] = cycle(seconds)

        def run() -> None:
            self.now += next(durations)

        return run


def test_rounds_end_when_the_interval_decides() -> None:
    clock = FakeTimer()

    def ratio(*seconds: float) -> TimeRatio:
        return time_ratio(clock.model(1.0), clock.model(*seconds), latency_tuning._decided, clock=clock)

    assert ratio(0.9).value == pytest.approx(0.9) and ratio(0.9).rounds == 8 and ratio(0.9).below(0.99)
    assert ratio(1.0).rounds == 8 and ratio(1.0).above(0.99)
    noisy = ratio(0.5, 1.4, 0.6, 1.3, 0.7, 1.25, 0.8)
    assert noisy.rounds >= latency_tuning.FEW_ROUNDS and not noisy.below(0.99)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    return tmp_path / "m.onnx"


def tuned(model: Path, monkeypatch: pytest.MonkeyPatch, faster: Callable[[str], bool], **how: Any) -> sbonnx.Report:
    """Quantize with TUNE, where `faster` says which trials are measured to be faster."""

    def ratio(search: LatencySearch, reference: Any, candidate: Any) -> TimeRatio:
        if reference is None:  # over float
            return SLOWER if faster("float") else FASTER
        return FASTER if faster(candidate.name) else SLOWER

    monkeypatch.setattr(LatencySearch, "ratio", ratio)
    output, recipe = model.with_name("tuned.onnx"), model.with_name("tuned.yaml")
    return sbonnx.quantize(
        model,
        FEEDS,
        output,
        recipe={"HEADS": "none", "EFFORT": "fast"},
        tune="latency",
        save_recipe=recipe,
        verify=False,
        **how,
    )


def test_the_recipe_gives_the_same_file_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tuned(model, monkeypatch, lambda name: name.startswith("Conv '") and name.endswith("in float"))
    tuning = some(report.tuning)
    assert tuning.kept and all(trial.what.startswith("Conv '") for trial in tuning.kept)
    assert [text.partition("=")[0] for text in tuning.overrides] == ["FLOAT_NODES"]
    assert report.settings["FLOAT_NODES"] and report.settings["TUNE"]["GOAL"] == "none"
    again = sbonnx.quantize(
        model, FEEDS, model.with_name("again.onnx"), recipe=model.with_name("tuned.yaml"), verify=False
    )
    assert model.with_name("again.onnx").read_bytes() == model.with_name("tuned.onnx").read_bytes()
    assert again.tuning is None


def test_the_default_is_kept_if_nothing_is_faster(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tuned(model, monkeypatch, lambda name: False)
    sbonnx.quantize(
        model, FEEDS, model.with_name("plain.onnx"), recipe={"HEADS": "none", "EFFORT": "fast"}, verify=False
    )
    assert some(report.tuning).trials and not some(report.tuning).overrides
    assert model.with_name("plain.onnx").read_bytes() == model.with_name("tuned.onnx").read_bytes()


def test_a_file_slower_than_float_is_float(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tuned(model, monkeypatch, lambda name: name == "float")
    assert not report.sites and not report.problems
    nodes = onnx.load(str(model.with_name("tuned.onnx"))).graph.node
    assert not [node for node in nodes if "Linear" in node.op_type]


def test_a_faster_file_that_loses_accuracy_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = cycle([30.0, 40.0])  # after, before
    monkeypatch.setattr(latency_tuning, "worst_db", lambda comparison: next(values))
    report = tuned(model, monkeypatch, lambda name: "Conv" in name)
    refused = [trial for trial in some(report.tuning).trials if "dB in place of" in trial.why]
    assert refused and not some(report.tuning).kept


def test_a_node_of_another_model_is_an_error(model: Path) -> None:
    with pytest.raises(RecipeError, match=r"float_nodes=.*'nowhere', which is no node of the simplified graph"):
        sbonnx.quantize(model, FEEDS, float_nodes=["nowhere"], verify=False)
    with pytest.raises(RecipeError, match=r"must be none with the backend qnn: .* for onnxruntime and openvino"):
        sbonnx.quantize(model, FEEDS, backend="qnn", tune="latency")


def test_regions_change_what_they_say(model: Path) -> None:
    graph = load(model)
    able = frozenset(node.name for node in graph.nodes if node.op in ("Conv", "Add", "Gemm"))
    first = min(able)
    for region in PlacementRegions(graph, able).around(able - {first}):
        assert region.applied(frozenset({first})) != frozenset({first}), region.name
        assert region.floats | region.integers <= able, region.name
