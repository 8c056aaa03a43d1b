"""A cache makes a second run read instead of run, and a killed run go on; the numbers stay those of one plain run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from sbonnx.calib import calibrator as calibrators
from sbonnx.calib.cache.entries import SKETCH
from sbonnx.calib.cache.sketch_cache import CalibrationCache, SketchKey
from sbonnx.calib.data.dataset import read
from sbonnx.calib.engine import observation as observe
from sbonnx.calib.engine.sample_runner import Key, SampleRunner
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import DataError
from sbonnx.graph import Graph, load
from sbonnx.planning.types import ObserverChoice, Plan
from sbonnx.spec import Array
from tests.calib.test_calibrate import same
from tests.calib.test_shared_calibration import model_of
from tests.support.caching import assert_same, checkpoints, seen
from tests.support.calibration import calibrate
from tests.support.models import residual
from tests.support.naive import plan_linear

OBSERVERS = ("minmax", "moving_average", "percentile", "mse", "kl_histogram", "aciq", "auto")

FEEDS: list[dict[str, Array]] = [
    {"x": np.random.default_rng(seed).standard_normal((4, 3, 8, 8)).astype(np.float32) * (1 + seed)}
    for seed in range(9)
]


@pytest.fixture
def graph() -> Graph:
    return load(residual(channels=6))  # not a multiple of 8: onnxruntime sums in one layout wherever a layer ends


def plan_with(graph: Graph, observer: str) -> Plan:
    return plan_linear(graph, observer=ObserverChoice(observer))


@pytest.fixture
def no_inference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From the call on, no session may be opened."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a session was opened")

    return lambda: monkeypatch.setattr(observe, "LayerRunner", refuse)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["whole", "layer"])
def test_other_observers_run_nothing(graph: Graph, tmp_path: Path, granularity: Any, no_inference: Any) -> None:
    plain = {name: calibrate(graph, plan_with(graph, name), FEEDS) for name in OBSERVERS}
    first = calibrate(graph, plan_with(graph, "minmax"), FEEDS, cache=tmp_path / "cache", granularity=granularity)
    assert same(first, plain["minmax"])
    no_inference()
    for name in OBSERVERS:
        again = calibrate(graph, plan_with(graph, name), FEEDS, cache=tmp_path / "cache")
        assert same(again, plain[name])
        assert again.samples == plain[name].samples


def test_a_changed_weight_runs_what_depends_on_it(graph: Graph, tmp_path: Path) -> None:
    calibrate(graph, plan_with(graph, "minmax"), FEEDS, cache=tmp_path)
    changed = load(residual(seed=1))
    with pytest.raises(DataError, match="differs in model"):
        calibrate(changed, plan_with(changed, "minmax"), FEEDS, cache=tmp_path)
    with pytest.raises(DataError, match="differs in data"):
        calibrate(graph, plan_with(graph, "minmax"), FEEDS[:-1], cache=tmp_path)


@pytest.mark.slow
def test_rounds_between_checkpoints_change_nothing(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrators, "CHECKPOINT_EVERY", 0.0)
    found = calibrate(graph, plan_with(graph, "mse"), FEEDS, cache=tmp_path)
    assert same(found, calibrate(graph, plan_with(graph, "mse"), FEEDS))
    assert checkpoints(tmp_path) == 0


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_stopped(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrators, "CHECKPOINT_EVERY", 0.0)
    plan = plan_with(graph, "moving_average")
    ran: list[int] = []
    step = SampleRunner.step

    def noting(self: SampleRunner, number: int, piece: Any, run: Any, known: Any, unit: Any, blame: Any) -> None:
        if len(ran) == stop:
            raise KeyboardInterrupt
        ran.append(unit.index)
        step(self, number, piece, run, known, unit, blame)

    monkeypatch.setattr(SampleRunner, "step", noting)
    stop = 20
    with pytest.raises(KeyboardInterrupt):
        calibrate(graph, plan, FEEDS, cache=tmp_path, threads=1)
    ran.clear()
    stop = -1
    again = calibrate(graph, plan, FEEDS, cache=tmp_path, threads=1)
    assert ran == list(range(20, 36))
    assert same(again, calibrate(graph, plan, FEEDS))
    assert again.samples == 36


def test_tensors_of_equal_digests_are_both_resumed(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], [name], name) for name in "ab"]
    nodes.append(helper.make_node("Add", ["a", "b"], ["y"], "sum"))
    graph = model_of(nodes, 13)
    keys: dict[Key, Sketch] = {(name, None): seen(SketchKey("00")) for name in "ab"}
    data = read([{"x": np.zeros((1, 4, 5), np.float32)}], graph)
    first = CalibrationCache(tmp_path, graph, data, {})
    assert first.resume(keys) == (0, {})
    first.save_checkpoint(4, keys)
    samples, found = CalibrationCache(tmp_path, graph, data, {}).resume(keys)
    assert samples == 4 and found.keys() == keys.keys()
    for key, sketch in keys.items():
        assert_same(found[key], sketch)


KILLED = """
import sys, time
import numpy as np
from sbonnx.calib import calibrator
from tests.support.calibration import calibrate
from sbonnx.graph import load
from sbonnx.planning.types import ObserverChoice
from tests.support.naive import plan_linear
from tests.support.models import residual
from tests.calib.cache.test_resume import FEEDS
calibrator.CHECKPOINT_EVERY = 0.0

class Slow:
    def __iter__(self):
        for feed in FEEDS:
            time.sleep(float(sys.argv[2]))
            yield feed

graph = load(residual(channels=6))
calibrate(graph, plan_linear(graph, observer=ObserverChoice("mse")), Slow(), cache=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["auto"])
def test_killed_and_resumed(graph: Graph, tmp_path: Path, granularity: Any) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    run = subprocess.Popen([sys.executable, "-c", KILLED, str(cache), "0.2"], env=environment)
    deadline = time.monotonic() + 60
    while not checkpoints(cache) and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert checkpoints(cache), "it was killed too late"
    done = subprocess.run([sys.executable, "-c", KILLED, str(cache), "0"], env=environment, check=True, timeout=120)
    assert done.returncode == 0
    assert not list(temporary.glob("*sbonnx*"))
    assert checkpoints(cache) == 0
    found = calibrate(graph, plan_with(graph, "mse"), FEEDS, cache=cache, granularity=granularity)
    assert same(found, calibrate(graph, plan_with(graph, "mse"), FEEDS))


def test_damage_repeats_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that observes fewer tensors may sum in another order, so the run after damage observes all of them."""
    observed: list[set[Key]] = []

    def noting(graph: Graph, segments: Any, wishes: dict[Key, Any], **options: Any) -> Any:
        observed.append(set(wishes))
        return observe.Observation(graph, segments, wishes, **options)

    monkeypatch.setattr(calibrators, "Observation", noting)
    graph = load(residual(channels=8))
    plan = plan_with(graph, "minmax")
    whole = calibrate(graph, plan, FEEDS[:2], cache=tmp_path)
    for _ in range(2):
        first = min(tmp_path.glob(f"*{SKETCH}"))
        first.write_bytes(first.read_bytes()[:-1] + b"?")
        again = calibrate(graph, plan, FEEDS[:2], cache=tmp_path)
        assert same(again, whole)
        assert [note for note in again.notes if "1 damaged entries" in note]
    assert len(observed) == 3 and observed[0] == observed[1] == observed[2]
    assert len(observed[0]) == 4
