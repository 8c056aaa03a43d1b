"""A batch of steps that do as their titles say: attempts, reasons, what is kept and for how long, a polite end."""

from __future__ import annotations

import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sbonnx.batch.api import fulfil
from sbonnx.batch.database import State
from sbonnx.batch.engine import LocalEngine
from sbonnx.batch.jobs.batch_plan import BatchRequest
from sbonnx.batch.jobs.job import BatchReport, Places, Step
from tests.batch import works
from tests.batch.works import Begun, statuses

ROOT = Path(__file__).resolve().parents[2]
FAST = (("ROUNDING", "nearest"), ("BIAS_CORRECTION", "none"))


def wished(output: Path, *steps: Step) -> BatchRequest:
    """A wish for all of them."""
    jobs = tuple(one.jobs[0] for one in steps if one.kind == "quantize")
    return BatchRequest("tests", Places(output), jobs, jobs, steps)


def play(one: BatchRequest, watch: Begun | None = None, workers: int = 2) -> BatchReport:
    """The batch of those steps."""
    engine = LocalEngine(workers, work=works.work, publish=works.publish)
    return fulfil(one, engine=engine, publish=works.publish, watch=watch)


def test_every_attempt_is_written_down(tmp_path: Path) -> None:
    one = wished(tmp_path, works.step_of("once", tmp_path, retries=1), works.step_of("refuse", tmp_path, retries=3))
    assert statuses(play(one)) == {"once": "done", "refuse": "refused"}
    db = sqlite3.connect(one.places.database)
    rows = db.execute("SELECT key, number, status FROM attempts ORDER BY key, number").fetchall()
    db.close()
    assert rows == [("k-once", 1, "crashed"), ("k-once", 2, "done"), ("k-refuse", 1, "refused")]


def test_the_reason_is_that_of_the_step_that_was_lost(tmp_path: Path) -> None:
    first = works.step_of("segfault", tmp_path, kind="calibrate")
    report = play(wished(tmp_path, first, works.step_of("a", tmp_path, after=(first.key,))))
    (row,) = report.rows
    assert (row.outcome.status, row.outcome.key) == ("crashed", first.key)
    assert report.steps["k-a"].status == "skipped"
    assert report.exit_code == 1


def test_what_crashed_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    one = wished(tmp_path, works.step_of("once", tmp_path), works.step_of("a", tmp_path))
    assert statuses(play(one)) == {"once": "crashed", "a": "done"}
    seen = Begun()
    assert statuses(play(one, seen)) == {"once": "done", "a": "done"}
    assert seen.titles == ["once"]


def test_a_calibration_that_no_step_needs_is_not_run(tmp_path: Path) -> None:
    """The calibration has another key, since a job is new; but those that are left do not wait for it."""
    a = works.step_of("a", tmp_path, after=("k-c",))
    play(wished(tmp_path, works.step_of("c", tmp_path, kind="calibrate"), a))
    other = works.step_of("c", tmp_path, kind="calibrate", key="k-other")
    seen = Begun()
    play(wished(tmp_path, other, dataclasses.replace(a, after=("k-other",))), seen)
    assert seen.titles == []


def test_killed_while_it_published(tmp_path: Path) -> None:
    """Made, and the name beside the output is still there: nothing is to be run, and it goes all the same."""
    one = wished(tmp_path, works.step_of("a", tmp_path))
    play(one)
    (tmp_path / "a.onnx").unlink()
    (tmp_path / ".a.onnx.4711.tmp").write_text("half")
    seen = Begun()
    assert play(one, seen).ok
    assert seen.titles == []
    assert (tmp_path / "a.onnx").read_bytes() == works.content(one.steps[0])
    assert not (tmp_path / ".a.onnx.4711.tmp").exists()


def test_unused_state_is_deleted_after_a_while(tmp_path: Path) -> None:
    """After a month without use; what is used stays however old it is, and so do outputs."""
    a, b = works.step_of("a", tmp_path), works.step_of("b", tmp_path)
    play(wished(tmp_path, a, b))
    places = Places(tmp_path)
    for key in ("k-a", "k-b"):
        os.utime(places.made(key), (time.time() - 31 * 86400,) * 2)
    for name, days in (("old", 31), ("new", 29)):
        places.sketches(name).mkdir(parents=True)
        os.utime(places.sketches(name), (time.time() - days * 86400,) * 2)
    places.metrics.mkdir()
    for name, days in (("old", 31), ("new", 29)):
        (places.metrics / f"{name}.json").touch()
        os.utime(places.metrics / f"{name}.json", (time.time() - days * 86400,) * 2)
    seen = Begun()
    play(wished(tmp_path, a), seen)
    assert seen.titles == []
    assert [path.name for path in places.sketches("new").parent.iterdir()] == ["new"]
    assert [path.name for path in places.metrics.iterdir()] == ["new.json"]
    assert places.made("k-a").is_dir()
    assert not places.made("k-b").exists()
    assert sorted(path.name for path in (tmp_path / ".sbonnx" / "steps").iterdir()) == ["k-a", "k-a.lock"]
    assert (tmp_path / "b.onnx").read_bytes() == works.content(b)
    os.utime(places.made("k-a"), (time.time() - 29 * 86400,) * 2)
    play(wished(tmp_path, b))
    assert places.made("k-a").is_dir()


INTERRUPTED = """
import sys
from pathlib import Path
from sbonnx.cli.output.error_lines import guard
from tests.batch import works
from tests.batch.test_fulfil import play, wished

def run() -> int:
    output = Path(sys.argv[1])
    names = ["a", "hang", "z"]
    return play(wished(output, *(works.step_of(name, output) for name in names)), workers=1).exit_code

sys.exit(guard(run)())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_end(number: int, tmp_path: Path) -> None:
    """One line that says how far it is; no process stays; the state is good."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    begin = "import signal; signal.signal(signal.SIGTERM, signal.default_int_handler)"
    parent = subprocess.Popen(
        [sys.executable, "-c", begin + INTERRUPTED, tmp_path], stderr=subprocess.PIPE, cwd=ROOT, env=environment
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "hang.pid").exists():
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.02)
    parent.send_signal(number)
    _, said = parent.communicate(timeout=20)
    assert parent.returncode == 2
    assert said.decode() == "interrupted; 1 of 3 jobs are done; the same command continues from there\n"
    pid = int((tmp_path / "hang.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with State(Places(tmp_path)):
        pass
    db = sqlite3.connect(tmp_path / ".sbonnx" / "state.sqlite")
    rows = db.execute("SELECT key, status FROM attempts ORDER BY id").fetchall()
    db.close()
    assert rows == [("k-a", "done"), ("k-hang", "cut off")]
