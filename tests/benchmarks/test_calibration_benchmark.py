"""The benchmark of calibration: its arithmetic, and that both sides look at the same values."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks import observers
from benchmarks.calibration_child import spawn
from benchmarks.calibration_profile import Watch
from benchmarks.calibration_runs import FIGURES, Effort, apart, measure
from benchmarks.calibration_subjects import Samples, Subject, save_feeds
from benchmarks.calibration_table import Cell, Target, alternate, difference, ratio, rows

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
small (float[N, 3, 8, 8] image) => (float[N, 4, 8, 8] y)
<float[4, 3, 3, 3] w, float[4, 4, 1, 1] v>
{
    c = Conv <pads = [1, 1, 1, 1]> (image, w)
    r = Relu (c)
    y = Conv (r, v)
}
"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A small net with three samples."""
    folder = tmp_path_factory.mktemp("subject")
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(MODEL)
    for name, shape in (("w", (4, 3, 3, 3)), ("v", (4, 4, 1, 1))):
        tensor = onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        model.graph.initializer.append(tensor)
    onnx.save(model, str(folder / "small.onnx"))
    feeds = [{"image": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in range(3)]
    save_feeds(folder / "small.npz", feeds)
    return Subject("small", folder / "small.onnx", folder / "small.npz")


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (Target(1.0), 1.0, True),
        (Target(1.0), 1.01, False),
        (Target(2.0, "at least"), 2.0, True),
        (Target(2.0, "at least"), 1.9, False),
        (Target(), 1e9, True),
    ],
)
def test_a_target_is_met_or_not(target: Target, value: float, met: bool) -> None:
    assert Cell((value,), target).met is met
    assert ("missed" in str(Cell((value,), target))) is not met


def test_a_cell_shows_the_median_and_the_spread() -> None:
    assert str(Cell((3.0, 1.0, 1.5), Target(1.6))) == "1.50 (1.00 to 3.00) ≤ 1.6: met"
    assert str(Cell((140.2,), unit="MB")) == "140 MB"
    assert str(Cell((-0.3,), unit="MB")) == "0 MB"
    assert str(Cell((0.041,), Target(0.05))) == "0.041 ≤ 0.05: met"


def test_ways_take_turns_and_each_begins_once() -> None:
    called: list[str] = []

    def way(name: str) -> dict[str, float]:
        called.append(name)
        return {name: float(len(called))}

    found = alternate({name: lambda name=name: way(name) for name in "abc"}, 3)  # type: ignore[misc]
    assert "".join(called) == "abcbcacab"
    assert found == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}


def test_figures_compare_the_runs_of_one_repeat() -> None:
    found = {"ours": [2.0, 9.0], "float": [1.0, 3.0]}
    divided, less = ratio(found, "ours", "float"), difference(found, "ours", "float")
    assert divided is not None and divided.values == (2.0, 3.0)
    assert less is not None and less.values == (1.0, 6.0)
    assert ratio(found, "asym", "float") is None


def test_figures_that_no_model_has_are_left_out() -> None:
    columns: list[dict[str, Cell | str]] = [{"one": Cell((1.0,))}, {"two": "2"}]
    assert rows(["one", "two", "three"], columns) == [["one", "1.00", "–"], ["two", "–", "2"]]


def test_samples_begin_anew_when_they_run_out() -> None:
    samples = Samples([{"x": 0}, {"x": 1}, {"x": 2}], 7)
    assert len(samples) == 7
    assert [feed["x"] for feed in samples] == [feed["x"] for feed in samples] == [0, 1, 2, 0, 1, 2, 0]


def test_ranges_are_apart_by_widths() -> None:
    assert apart((0.0, 2.0), (0.0, 2.0)) == 0
    assert apart((0.0, 2.0), (-0.5, 2.0)) == 0.25


@pytest.mark.slow
def test_a_child_gives_the_ranges_of_the_values(subject: Subject) -> None:
    told = spawn(subject, "ours:minmax", 3)
    values = np.concatenate([feed["image"] for feed in subject.samples(3)])
    assert told.ranges["image"] == (values.min(), values.max())
    assert 20 < told.start_mb <= told.peak_mb < 1000


def test_a_child_that_fails_says_why(subject: Subject, tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=r"small, float, 1 samples: .*gone\.onnx"):
        spawn(replace(subject, model=tmp_path / "gone.onnx"), "float", 1)


def test_the_watch_sees_the_work_of_others() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watch = Watch()
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        assert watch.others() > 0.5 / (os.cpu_count() or 1) * 0.5
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.slow
def test_every_figure_can_be_taken(subject: Subject) -> None:
    """The peer's agreement is checked on the way: it exits where its tensors or ranges are others."""
    found = measure(subject, Effort(repeats=1, count=3, peer_count=3, figures=FIGURES))
    assert not [remark for remark in found.remarks if not remark.startswith("other processes took")]
    for name in ("minmax ÷ float loop", "auto ÷ float loop", "minmax, peak − that of the float loop"):
        assert isinstance(found.cells[name], Cell), name
    assert "peer's Entropy s ÷ kl_histogram" in found.cells


def test_the_best_observer_is_bold_unless_it_is_a_count() -> None:
    values = {name: {"f1_with_float": 0.5, "n_detections": 60.0} for name in observers.OBSERVERS}
    values["mse"] = {"f1_with_float": 0.75, "n_detections": 70.0}
    first, second = observers.rows("ultraface_rfb320", {"float": {"n_detections": 63.0}, **values})
    assert first[2] == "" and [cell for cell in first if "**" in cell] == ["**0.7500**"]
    assert second[2] == "63" and not any("**" in cell for cell in second)
