"""Batches on a real cluster: a scheduler and two worker processes of Dask on this machine's loopback."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sbonnx.batch.dask import cluster
from sbonnx.batch.dask.cluster import DaskEngine
from sbonnx.batch.engine import LocalEngine
from sbonnx.batch.jobs.job import Outcome, Places, Step
from sbonnx.batch.jobs.steps import steps_of
from sbonnx.batch.outcomes import read_made
from sbonnx.errors import DeviceError
from tests.batch import works
from tests.batch.clusters import (
    ASSETS,
    CALIBRATED,
    Cluster,
    Seen,
    assert_equal_outputs,
    bytes_in,
    engine,
    jobs_in,
    steps_in,
    until,
)
from tests.batch.test_remote import Server
from tests.support.caching import complete


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_same_bytes_as_the_local_engine(shards: int, both: Cluster, alone: Path, tmp_path: Path) -> None:
    """One calibration on one worker or cut into shards: files and statistics are those of the local engine, and every
    sample went through the float model once.
    """
    seen = Seen()
    steps = steps_in(tmp_path)
    found = DaskEngine(both.client, shards=shards).run(steps, Places(tmp_path), seen)
    assert {one.status for one in found.values()} == {"done"} and list(found) != []
    assert_equal_outputs(tmp_path, alone)
    first = found[steps[0].key]
    assert first.counters["runs"] == CALIBRATED == sum(one.counters["runs"] for one in found.values())
    assert not list((tmp_path / ".sbonnx" / "steps").glob("*of*"))
    stages = seen.stages[steps[0].title]
    assert any(stage.endswith(f"({shards}/{shards})") for stage in stages) == (shards > 1), stages
    assert ("merge" in stages) == (shards > 1)
    assert seen.threads == {threading.current_thread().name}


@pytest.mark.slow
def test_where_workers_do_not_see_the_folder(
    both: Cluster, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What steps make comes back through the cluster: the same bytes, and reports in words of the batch."""
    monkeypatch.setattr(cluster, "is_shared", lambda client, places: False)
    steps = steps_in(tmp_path)
    found = DaskEngine(both.address, shards=2).run(steps, Places(tmp_path), Seen())
    assert {one.status for one in found.values()} == {"done"}
    assert_equal_outputs(tmp_path, alone)
    for step in steps[1:]:
        made = read_made(Places(tmp_path), step.key)
        for outcome in (found[step.key], made):
            assert outcome is not None and outcome.report is not None
            assert outcome.report["output"] == step.jobs[0].output
    assert not [path for path in both.folder.rglob("*-*/published") if path.exists()]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_models_data_and_outputs_by_url(
    shared: bool, both: Cluster, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is downloaded once by those who see one folder, and once more by each worker that does not see it."""
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp")
    if not shared:
        monkeypatch.setattr(cluster, "is_shared", lambda client, places: False)
    server = Server(ASSETS)
    try:
        jobs = [
            replace(
                job,
                model=f"{server.url}/digits.onnx",
                data=f"{server.url}/digits_calib.npz",
                output=(tmp_path / "there" / Path(job.output).name).as_uri(),
            )
            for job in jobs_in(tmp_path)
        ]
        steps = steps_of(jobs, tmp_path / ".sbonnx")
        found = DaskEngine(both.client).run(steps, Places(tmp_path), Seen())
    finally:
        server.close()
    assert {one.status for one in found.values()} == {"done"}
    assert bytes_in(tmp_path / "there") == {path.name: path.read_bytes() for path in alone.glob("*.onnx")}
    for name in ("/digits.onnx", "/digits_calib.npz"):
        assert server.downloads().count(name) in ((1,) if shared else (2, 3))


@pytest.mark.slow
def test_a_second_run_measures_nothing(both: Cluster, tmp_path: Path) -> None:
    """Statistics that are known are no shard's to measure again, though another target wants more of them."""
    first, other = jobs_in(tmp_path)
    DaskEngine(both.client, shards=2).run(steps_of([first], tmp_path / ".sbonnx"), Places(tmp_path), Seen())
    before = complete(tmp_path / ".sbonnx" / "sketches")
    steps = steps_of([first, replace(first, name="again", output=str(tmp_path / "again.onnx"))], tmp_path / ".sbonnx")
    again = [step for step in steps if step.kind == "calibrate"]
    found = DaskEngine(both.client, shards=2).run(again, Places(tmp_path), Seen())
    assert all(one.counters["runs"] in (0, CALIBRATED) for one in found.values())
    assert complete(tmp_path / ".sbonnx" / "sketches") == before
    wider = [step for step in steps_of([first, other], tmp_path / ".sbonnx") if step.kind == "calibrate"]
    more = DaskEngine(both.client, shards=2).run(wider, Places(tmp_path), Seen())
    assert [one.status for one in more.values()] == ["done"]


@pytest.mark.slow
def test_a_step_that_crashes_costs_itself_alone(both: Cluster, tmp_path: Path) -> None:
    before = both.client.run(os.getpid)
    steps = [
        works.step_of("segfault-a", tmp_path, kind="calibrate", retries=1),
        works.step_of("needs", tmp_path, after=("k-segfault-a",)),
        works.step_of("needs-more", tmp_path, after=("k-needs",)),
        works.step_of("good", tmp_path),
        works.step_of("refuse-b", tmp_path),
        works.step_of("fail-c", tmp_path),
    ]
    seen = Seen()
    found = engine(both.client).run(steps, Places(tmp_path), seen)
    statuses = {step.title: found[step.key].status for step in steps}
    assert statuses == {
        "segfault-a": "crashed",
        "needs": "skipped",
        "needs-more": "skipped",
        "good": "done",
        "refuse-b": "refused",
        "fail-c": "failed",
    }
    crashed = found["k-segfault-a"]
    assert "SIGSEGV" in crashed.reason and crashed.attempts == 2
    assert [end[3] for end in seen.ends if end[0] == "segfault-a"] == [True, False]
    assert found["k-needs"].reason.startswith("'segfault-a' did not succeed (crashed)")
    assert found["k-refuse-b"].reason == "'refuse-b' is no model: give another"
    assert (tmp_path / "good.onnx").read_bytes() == works.content(steps[3])
    assert both.client.run(os.getpid) == before


@pytest.mark.slow
def test_a_sample_that_is_not_finite_is_refused_as_on_one_machine(both: Cluster, tmp_path: Path) -> None:
    """One shard meets it, the other does not: the step measures by itself then, and the reason is the same."""
    with np.load(ASSETS / "digits_calib.npz") as held:
        ((name, values),) = ((name, held[name][:8].copy()) for name in held.files)
    values[5] = 3e38
    np.savez(tmp_path / "huge.npz", **{name: values})
    found = []
    for place in ("here", "there"):
        output = tmp_path / place
        job = replace(jobs_in(output)[0], data=str(tmp_path / "huge.npz"), split=None)
        steps = steps_of([job], output / ".sbonnx")
        runner: Any = LocalEngine(2) if place == "here" else DaskEngine(both.client, shards=2)
        found.append([(one.status, one.reason) for one in runner.run(steps, Places(output), Seen()).values()])
        assert not list(output.glob("*.onnx"))
    assert found[0] == found[1] and found[0][-1][0] == "refused" and "sample 5" in found[0][-1][1]


def test_what_crashed_once_is_tried_again(both: Cluster, tmp_path: Path) -> None:
    seen = Seen()
    found = engine(both.client).run([works.step_of("once-a", tmp_path, retries=1)], Places(tmp_path), seen)
    assert (found["k-once-a"].status, found["k-once-a"].attempts) == ("done", 2)
    assert [(title, attempt) for title, attempt, _ in seen.begun] == [("once-a", 1), ("once-a", 2)]
    assert [end[1::2] for end in seen.ends] == [("crashed", True), ("done", False)]


@pytest.mark.slow
def test_limits_hold_on_workers(both: Cluster, tmp_path: Path) -> None:
    steps = [
        works.step_of("hang-a", tmp_path, seconds=1.0),
        works.step_of("eat-a", tmp_path, memory=400 << 20, seconds=60.0),
    ]
    found = engine(both.client).run(steps, Places(tmp_path), Seen())
    assert found["k-hang-a"].status == "timed out" and "limit of 1 s" in found["k-hang-a"].reason
    assert found["k-eat-a"].status == "out of memory"


@pytest.mark.slow
def test_a_worker_that_is_killed_is_survived(tmp_path: Path) -> None:
    """kill -9 in the middle of a step: it runs again on another worker, the old process is gone, all is done."""
    (tmp_path / "cluster").mkdir()
    output = tmp_path / "out"
    output.mkdir()
    made = Cluster(tmp_path / "cluster")
    try:
        made.add("one")
        killed: list[str] = []

        def at(title: str, stage: str) -> None:
            if title == "slowly-a" and not killed:
                name = "one"
                killed.append(str(made.address_of(name)))
                made.add("two")
                made.kill(name)

        seen = Seen(at)
        steps = [works.step_of("slowly-a", output), works.step_of("needs", output, after=("k-slowly-a",))]
        found = DaskEngine(made.address, work=_hang_on_first, publish=works.publish).run(steps, Places(output), seen)
        assert [found[step.key].status for step in steps] == ["done", "done"]
        assert found["k-slowly-a"].attempts == 2
        assert seen.ends[0] == ("slowly-a", "crashed", "its worker was lost", True)
        assert killed == [seen.begun[0][2]] and seen.begun[1][2] == made.address_of("two") != killed[0]
        pid = int((output / "first.pid").read_text())
        until(lambda: not psutil.pid_exists(pid), "the end of the step whose worker was killed", 10)
        assert (output / "slowly-a.onnx").read_bytes() == works.content(steps[0])
        assert not [path for path in output.rglob(".*") if path.name != ".sbonnx"]
    finally:
        made.close()


def _hang_on_first(step: Step, places: Places, tell: Any, threads: int) -> Outcome:
    """Hangs the first time."""
    mark = places.output / "first.pid"
    if step.title == "slowly-a" and not mark.exists():
        mark.write_text(str(os.getpid()))
        tell("hangs", 0, 1)
        time.sleep(60)
    return works.make(step, places, {})


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_at_work(both: Cluster, tmp_path: Path) -> None:
    def at(title: str, stage: str) -> None:
        if (tmp_path / "hang-a.pid").exists() and (tmp_path / "hang-a.pid").read_text():
            raise KeyboardInterrupt

    steps = [works.step_of(name, tmp_path) for name in ("hang-a", "slow-b", "slow-c", "slow-d", "slow-e")]
    with pytest.raises(KeyboardInterrupt):
        engine(both.client).run(steps, Places(tmp_path), Seen(at))
    pid = int((tmp_path / "hang-a.pid").read_text())
    until(lambda: not psutil.pid_exists(pid), "the end of the step", 15)
    again = engine(both.client).run([works.step_of("good", tmp_path)], Places(tmp_path), Seen())
    assert again["k-good"].status == "done"


@pytest.mark.slow
def test_a_scheduler_that_is_lost_is_said(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    made = Cluster(tmp_path / "cluster")
    try:
        made.add("one")

        def at(title: str, stage: str) -> None:
            made.scheduler.send_signal(signal.SIGKILL)

        with pytest.raises(DeviceError, match="the scheduler was lost: start it and run the batch again"):
            engine(made.address).run([works.step_of("sleep-40", tmp_path)], Places(tmp_path), Seen(at))
    finally:
        made.close()
