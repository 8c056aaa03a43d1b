"""Several processes see what one sees, bit for bit; and whatever happens to one of them, none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.calib.data.sample import Unit
from sbonnx.calib.engine.sample_runner import Key, Wish
from sbonnx.calib.observers import OBSERVERS, make_observer
from sbonnx.calib.sketches import Sketch
from sbonnx.calib.workers.protocol import Tray, TrayReader
from sbonnx.calib.workers.shards import Shards, one_process
from sbonnx.errors import DeviceError, NumericError
from sbonnx.graph import Graph, load
from sbonnx.spec import Array, QuantSpec, params_from_bounds
from tests.calib.engine.branching import nested
from tests.calib.observing import (
    EVERYTHING,
    IMAGES,
    PLAIN,
    POISON,
    RNG,
    ROOTS,
    alone,
    assert_same,
    batches,
    observation_of,
    squares,
)
from tests.support.models import model, residual

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers inherit open files")

ROOT = Path(__file__).resolve().parents[3]


def once_joined(shards: Shards, units: Iterator[Unit]) -> Iterator[Unit]:
    """The samples, from when all workers take some."""
    deadline = time.monotonic() + 60
    while shards.joined < shards.wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    yield from units


def shared(graph: Graph, wishes: Mapping[Key, Wish], data: Any, workers: int, **more: Any) -> dict[Key, Sketch]:
    """What several see."""
    observation, units = observation_of(graph, wishes, data, **more)
    with Shards(observation, workers, patience=0) as shards:
        seen = [unit for unit, _ in shards.stream(once_joined(shards, units))]
        assert [unit.index for unit in seen] == list(range(len(seen)))
        assert observation.samples == sum(unit.samples for unit in seen)
        assert sum(remote.samples for remote in shards.remotes) > 0
    found = observation.found()
    observation.close()
    return found


def gone(pids: Sequence[int], within: float = 20.0) -> bool:
    """Whether none of some processes runs (any more)."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(("workers", "size", "threads"), [(2, 1, 2), (3, 5, 2), (2, 4, 4), (6, 13, 1)])
def test_any_number_of_processes_sees_the_same(workers: int, size: int, threads: int) -> None:
    graph = load(residual())
    whole = alone(graph, PLAIN, batches(1))
    parts = shared(graph, PLAIN, batches(size), workers, threads=threads)
    assert_same(whole, parts)
    spec = QuantSpec(signed=False, symmetric=False)
    for name, observer in OBSERVERS.items():
        if observer.for_activations:
            for key, sketch in whole.items():
                one, other = (make_observer(name).bounds(each, spec) for each in (sketch, parts[key]))
                assert params_from_bounds(one, spec) == params_from_bounds(other, spec), (name, key)


def test_per_channel_and_extremes_only() -> None:
    graph = load(residual())
    wishes: dict[Key, Wish] = {("x", 1): Wish("histogram"), ("r", 1): EVERYTHING, ("r1", None): Wish(track=True)}
    assert_same(alone(graph, wishes, batches(1)), shared(graph, wishes, batches(3), 2))


def test_more_processes_than_samples() -> None:
    graph = load(residual())
    assert_same(alone(graph, PLAIN, batches(1, IMAGES[:2])), shared(graph, PLAIN, batches(1, IMAGES[:2]), 4))


@pytest.mark.parametrize("granularity", ["whole", "budget"])
def test_branches(granularity: str) -> None:
    graph = load(nested())
    feeds = [
        {"x": RNG.standard_normal((2, 4)).astype(np.float32), "a": np.array(i % 3 > 0), "b": np.array(i % 2 > 0)}
        for i in range(11)
    ]
    scopes: dict[str, list[str]] = {"": ["r", "m"]}
    outer = next(node for node in graph.nodes if node.op == "If")
    inner = next(node for node in outer.attrs["then_branch"].nodes if node.op == "If")
    scopes[f"{outer.name}/then_branch/{inner.name}/then_branch"] = ["v"]
    scopes[f"{outer.name}/else_branch"] = ["k"]
    wishes: dict[Key, Wish] = {(name, None): EVERYTHING for name in ("r", "m", "v", "k")}
    more: dict[str, Any] = {"scopes": scopes, "granularity": granularity, "memory": 64}
    found = alone(graph, wishes, feeds, **more)
    assert found["v", None].samples < found["m", None].samples
    assert_same(found, shared(graph, wishes, feeds, 2, **more))


def test_shapes_that_grow_and_large_weights() -> None:
    graph = load(model("agraph (float[N,T,200] x) => (float[N,T,200] y) { y = MatMul (x, w) }", w=(200, 200)))
    feeds = [{"x": RNG.standard_normal((n, t, 200)).astype(np.float32)} for n, t in ((1, 3), (2, 90), (1, 7), (3, 200))]
    wishes: dict[Key, Wish] = {("x", None): EVERYTHING, ("y", None): Wish("histogram")}
    observation, units = observation_of(graph, wishes, feeds)
    with Shards(observation, 2, patience=0) as shards:
        for _ in shards.stream(once_joined(shards, units)):
            pass
        assert shards.remotes[0].samples
    assert_same(alone(graph, wishes, feeds), observation.found())


def test_pieces_of_a_stream_are_complete_one_by_one() -> None:
    """Whoever saves what was seen so far can do so between two streams."""
    graph = load(residual())
    observation, units = observation_of(graph, PLAIN, batches(1))
    with Shards(observation, 2, patience=0) as shards:
        units = once_joined(shards, units)
        for _ in shards.stream(islice(units, 7)):
            pass
        assert_same(alone(graph, PLAIN, batches(1, IMAGES[:7])), observation.found())
        for _ in shards.stream(units):
            pass
        assert_same(alone(graph, PLAIN, batches(1)), observation.found())
    assert observation.samples == 13


def test_no_process_is_started_for_little() -> None:
    observation, units = observation_of(load(residual()), PLAIN, batches(1))
    with Shards(observation, 4, count=13) as shards:
        assert len(list(shards.stream(units))) == 13
        assert shards.remotes == []
    assert observation.found()["r", None].samples == 13


def test_nan_is_blamed_as_in_one_process() -> None:
    """The first in the order of the data, by whomever it was found."""
    messages = []
    for workers in (1, 2, 2):
        observation, units = observation_of(load(model(POISON, w=(4, 4))), ROOTS, squares(3, 4, 5, 6))
        with Shards(observation, workers, patience=0) as shards, pytest.raises(NumericError) as caught:
            list(shards.stream(once_joined(shards, units)))
        messages.append(str(caught.value))
        assert gone([remote.pid for remote in shards.remotes])
    assert "activation 'r' holds 1 NaN and 0 infinite values at feed 3; the first layer" in messages[0]
    assert messages == messages[:1] * 3


def test_nan_in_a_worker() -> None:
    """The first sample goes to the worker: of two that have nothing to do, it is the one."""
    observation, units = observation_of(load(model(POISON, w=(4, 4))), ROOTS, squares(0))
    with Shards(observation, 2, patience=0) as shards:
        with pytest.raises(NumericError, match=r"activation 'r' holds 1 NaN and 0 infinite values at feed 0"):
            list(shards.stream(once_joined(shards, islice(units, 1))))
        assert shards.remotes[0].samples == 1


def test_a_failure_that_only_a_worker_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be explained here is said as it is."""
    observation, units = observation_of(load(model(POISON, w=(4, 4))), ROOTS, squares(0))
    monkeypatch.setattr(observation, "work", lambda: lambda unit: {})
    with (
        Shards(observation, 2, patience=0) as shards,
        pytest.raises(DeviceError, match=r"failed on feed 0, where this process does not: NumericError: 'r' holds NaN"),
    ):
        list(shards.stream(once_joined(shards, islice(units, 1))))


def test_a_worker_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # asked for anew; the usual one is shared with whatever else runs
    observation, units = observation_of(load(residual()), PLAIN, batches(1))
    with Shards(observation, 3, patience=0) as shards:

        def killing(units: Iterator[Unit]) -> Iterator[Unit]:
            yield from islice(units, 5)
            os.kill(shards.remotes[0].pid, signal.SIGKILL)
            yield from units
            time.sleep(0.5)

        with pytest.raises(
            DeviceError, match=r"worker was ended by signal 9 \(SIGKILL\).* (at feed|between)"
        ) as caught:
            list(shards.stream(killing(once_joined(shards, units))))
        assert "\n" not in str(caught.value)
    assert gone([remote.pid for remote in shards.remotes])
    assert tempfile.gettempdir() == str(tmp_path)
    assert not list(tmp_path.glob("sbonnx*"))  # onnxruntime may leave a file of its own


def slowly(units: Iterator[Unit]) -> Iterator[Unit]:
    """Samples that take their time."""
    for unit in units:
        time.sleep(0.1)
        yield unit


def test_workers_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for program, says in (("/nowhere/python", "no worker process can be started"), ("false", "ended with code 1")):
        observation, units = observation_of(load(residual()), PLAIN, batches(1))
        monkeypatch.setattr(sys, "executable", program)
        with Shards(observation, 2, patience=0) as shards, pytest.raises(DeviceError, match=says):
            list(shards.stream(slowly(units)))
        monkeypatch.undo()


def test_why_one_process() -> None:
    assert one_process(1, "layer", "CUDAExecutionProvider") is None
    assert one_process(2, "whole", "CPUExecutionProvider") is None
    assert "GPU" in str(one_process(2, "whole", "CUDAExecutionProvider"))
    assert "one store" in str(one_process(2, "layer", "CPUExecutionProvider"))


def test_a_tray_holds_any_feed() -> None:
    tray = Tray()
    reader = TrayReader(os.dup(tray.fd))
    feeds: list[dict[str, Array]] = [
        {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "flag": np.array(True)},
        {"h": RNG.standard_normal((200, 300)).astype(np.float16), "none": np.zeros((0, 3), np.int64)},
        {"t": np.asfortranarray(RNG.standard_normal((5, 7))), "text": np.array(["a", "bc"], object)},
        {"row": IMAGES[3:4, :, ::2]},
    ]
    for feed in feeds:
        found = reader.take(tray.fill(feed))
        assert found.keys() == feed.keys()
        for name, values in feed.items():
            assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape)
            np.testing.assert_array_equal(found[name], values)
    tray.close()


def test_a_worker_loads_little() -> None:
    heavy = {"onnx", "onnx_graphsurgeon", "pydantic", "torch"}
    code = f"import sys, sbonnx.calib.workers.worker_main; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


SCRIPT = """
import os, threading, time
from sbonnx.calib.workers.shards import Shards
from sbonnx.graph import load
from tests.calib.observing import IMAGES, PLAIN, observation_of
from tests.calib.workers.test_shards import once_joined
from tests.support.models import residual

class Reader:  # cannot be pickled, nor walked twice at once
    def __init__(self):
        self.lock = threading.Lock()
    def __iter__(self):
        for i in range(10**6):
            with self.lock:
                yield {"x": IMAGES[i % 13 : i % 13 + 1]}

observation, units = observation_of(load(residual()), PLAIN, Reader())
with Shards(observation, 3, patience=0) as shards:
    for unit, _ in shards.stream(once_joined(shards, units)):
        if unit.index == 20:
            heir = os.fork() if "HEIR" in os.environ else -1  # has all files open that its parent has
            if heir == 0:
                time.sleep(60)
                os._exit(0)
            print(heir, *(remote.pid for remote in shards.remotes), flush=True)
"""
"""A script without a guard for __main__, which a spawned process of multiprocessing would run again."""


@pytest.mark.parametrize(
    ("sent", "more"),
    [(signal.SIGKILL, {}), (signal.SIGINT, {}), (signal.SIGTERM, {}), (signal.SIGKILL, {"HEIR": "1"})],
)
def test_workers_end_with_their_parent(sent: signal.Signals, more: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **more}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        heir, *pids = (int(pid) for pid in parent.stdout.readline().split())
        assert len(pids) == 2 and not gone(pids, within=0.2)
        parent.send_signal(sent)
        assert gone(pids)
        if heir > 0:
            os.kill(heir, signal.SIGKILL)
        said = parent.stderr.read()
    assert parent.returncode == -sent
    assert said.count("Traceback") == (sent == signal.SIGINT)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("sbonnx")]


def test_threads_end_too() -> None:
    before = threading.active_count()
    observation, units = observation_of(load(residual()), PLAIN, batches(1))
    with Shards(observation, 2, patience=0) as shards:
        next(shards.stream(units))
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_one_slow_sample_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they run ahead without end."""
    observation, units = observation_of(load(residual()), PLAIN, batches(1, np.tile(IMAGES, (10, 1, 1, 1))))
    ahead: list[int] = []

    def work(unit: Unit) -> dict[str, Any]:
        if unit.index == 0:
            time.sleep(0.5)
            ahead.append(max(started))
        started.append(unit.index)
        return {}

    started: list[int] = []
    monkeypatch.setattr(observation, "work", lambda: work)
    with Shards(observation, 1) as shards:
        assert [unit.index for unit, _ in shards.stream(units)] == list(range(130))
    assert 2 < ahead[0] < 40
