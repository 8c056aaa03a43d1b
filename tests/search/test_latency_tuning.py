"""TUNE: what is kept is measured to be faster twice, loses nothing, and is a recipe that gives the same file again.

The file that is written was timed against the default and float, and is not slower than either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from sbonnx.search.latency_tuning import SAME, LatencySearch, TimedFile
from sbonnx.search.placements import PlacementRegions
from sbonnx.verify.paired_times import TimeRatio, time_ratio
from tests.support.models import model as model_of
from tests.support.models import residual
from tests.support.values import some

FEEDS = [{"x": x} for x in np.random.default_rng(0).standard_normal((4, 2, 3, 8, 8)).astype(np.float32)]
PLAIN = {"HEADS": "none", "EFFORT": "fast"}
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


def test_slower_than_float_is_decided_by_the_interval() -> None:
    clock, seconds = FakeTimer(), (1.14, 1.13, 1.2, 1.14, 1.16, 0.995, 1.14, 1.18)

    def ratio(decided: Callable[[TimeRatio], bool]) -> TimeRatio:
        return time_ratio(clock.model(1.0), clock.model(*seconds), decided, clock=clock)

    assert not ratio(latency_tuning._decided).above(1.0)
    assert ratio(latency_tuning._compared).above(1.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    return tmp_path / "m.onnx"


@dataclass
class FakeTimes:
    """Results of measurements.

    Attributes:
        faster: returns whether the trial of a name is faster.
        confirmed: whether the best file, made by its recipe, is faster than the default.
        over_float: of the default and of the best file.
        compared: files that were compared with the default.
    """

    faster: Callable[[str], bool] = lambda name: False
    confirmed: bool = True
    over_float: TimeRatio = FASTER
    compared: list[bytes] = field(default_factory=list)

    def ratio(self, reference: TimedFile | None, candidate: TimedFile, decided: Any = None) -> TimeRatio:
        """Stand in for `LatencySearch.ratio`."""
        if candidate.changes == (latency_tuning.FLOAT_MODEL,):
            return SAME
        if reference is None:
            return self.over_float
        if decided is latency_tuning._compared:
            self.compared.append(candidate.file.read_bytes())
            return FASTER if self.confirmed else SLOWER
        return FASTER if self.faster(candidate.changes[-1]) else SLOWER


def tuned(model: Path, monkeypatch: pytest.MonkeyPatch, times: FakeTimes, **how: Any) -> sbonnx.Report:
    """Quantize with TUNE, with these measurements."""
    monkeypatch.setattr(LatencySearch, "ratio", lambda search, *arguments: times.ratio(*arguments))
    output, recipe = model.with_name("tuned.onnx"), model.with_name("tuned.yaml")
    return sbonnx.quantize(
        model,
        FEEDS,
        output,
        recipe=PLAIN,
        tune="latency",
        save_recipe=recipe,
        verify=False,
        **how,
    )


def plain(model: Path) -> bytes:
    """Return the file without TUNE."""
    path = model.with_name("plain.onnx")
    sbonnx.quantize(model, FEEDS, path, recipe=PLAIN, verify=False)
    return path.read_bytes()


def is_conv_in_float(name: str) -> bool:
    """Return whether a trial leaves one convolution in float."""
    return name.startswith("Conv '") and name.endswith("in float")


def test_the_recipe_gives_the_same_file_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = FakeTimes(is_conv_in_float)
    report = tuned(model, monkeypatch, times)
    tuning = some(report.tuning)
    assert tuning.changes and all(is_conv_in_float(name) for name in tuning.changes)
    assert [text.partition("=")[0] for text in tuning.overrides] == ["FLOAT_NODES"]
    assert report.settings["FLOAT_NODES"] and report.settings["TUNE"]["GOAL"] == "none"
    again = sbonnx.quantize(
        model, FEEDS, model.with_name("again.onnx"), recipe=model.with_name("tuned.yaml"), verify=False
    )
    written = model.with_name("tuned.onnx").read_bytes()
    assert times.compared == [written] == [model.with_name("again.onnx").read_bytes()]
    assert again.tuning is None


def test_the_default_is_kept_if_nothing_is_faster(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = some(tuned(model, monkeypatch, FakeTimes()).tuning)
    assert tuning.trials and not tuning.overrides and tuning.text.startswith("the default is the fastest of")
    assert plain(model) == model.with_name("tuned.onnx").read_bytes()


def test_the_default_is_written_if_the_recipe_gives_no_faster_file(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = some(tuned(model, monkeypatch, FakeTimes(is_conv_in_float, confirmed=False)).tuning)
    assert any(trial.kept for trial in tuning.trials) and not tuning.overrides and tuning.ratio == 1.0
    assert tuning.text.endswith("made by its recipe alone: not faster") and "Conv" not in tuning.text
    assert plain(model) == model.with_name("tuned.onnx").read_bytes()


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_file_slower_than_float_is_float(model: Path, monkeypatch: pytest.MonkeyPatch, confirmed: bool) -> None:
    report = tuned(model, monkeypatch, FakeTimes(is_conv_in_float, confirmed=confirmed, over_float=SLOWER))
    assert not report.sites and not report.problems
    text = some(report.tuning).text
    assert text.startswith("the float model, simplified") and "Conv" not in text
    nodes = onnx.load(str(model.with_name("tuned.onnx"))).graph.node
    assert not [node for node in nodes if "Linear" in node.op_type]


@pytest.mark.parametrize("mode", ["static", "dynamic", "weight_only"])
def test_float_is_no_problem_if_nothing_can_be_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    path = tmp_path / "relu.onnx"
    onnx.save(model_of("g (float[2,3,8,8] x) => (float[2,3,8,8] y) { y = Relu (x) }"), str(path))
    report = tuned(path, monkeypatch, FakeTimes(), mode=mode)
    assert not report.problems and some(report.tuning).text.startswith("the float model, simplified")
    again = sbonnx.quantize(path, FEEDS, recipe=path.with_name("tuned.yaml"), verify=False)
    assert not again.problems


def test_other_modes_are_tried_before_placements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "products.onnx"
    text = "g (float[2,3,8,8] x) => (float[2,3,8,8] y) { a = MatMul (x, w1) b = Relu (a) y = MatMul (b, w2) }"
    onnx.save(model_of(text, w1=(8, 16384), w2=(16384, 8)), str(path))
    times = FakeTimes(lambda name: name.startswith(("dynamic", "all operators", "placements")))
    tuning = some(tuned(path, monkeypatch, times, kernel_costs="none").tuning)
    names = [trial.what for trial in tuning.trials]
    assert names[:2] == ["dynamic quantization", "weights alone"] and len(names) > 3
    assert "placements in place of dynamic quantization" in names
    assert "dynamic quantization" not in tuning.changes and tuning.changes


def test_a_faster_file_that_loses_accuracy_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = cycle([30.0, 40.0])  # after, before
    monkeypatch.setattr(latency_tuning, "worst_db", lambda comparison: next(values))
    report = tuned(model, monkeypatch, FakeTimes(lambda name: "Conv" in name))
    refused = [trial for trial in some(report.tuning).trials if "dB in place of" in trial.why]
    assert refused and not some(report.tuning).changes


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
