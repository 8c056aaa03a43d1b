"""What a batch remembers: read from SQLite directly, and after kills and damage."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbonnx.batch.database import State, past, peek
from sbonnx.batch.jobs.job import Outcome, Places, Step
from sbonnx.errors import OutputError
from tests.batch import works

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def rows(places: Places, what: str) -> list[tuple[Any, ...]]:
    """Rows of the database, past our own code."""
    db = sqlite3.connect(places.database)
    try:
        return db.execute(what).fetchall()
    finally:
        db.close()


def step(places: Places, name: str) -> Step:
    return works.step_of(name, places.output)


def put(places: Places, name: str, outcome: Outcome, attempt: int = 1) -> None:
    """A step that was tried and ended so."""
    with State(places) as state:
        state.started(step(places, name), attempt, "4711")
        state.ended(step(places, name), outcome)


def test_an_attempt_and_its_end(places: Places) -> None:
    refused = Outcome("k-a", "refused", reason="no model", seconds=1.5, peak_bytes=77, error="ModelError")
    put(places, "a", refused)
    assert rows(places, "SELECT key, kind, title, status, reason, error, attempts FROM steps") == [
        ("k-a", "quantize", "a", "refused", "no model", "ModelError", 1)
    ]
    assert rows(places, "SELECT key, number, place, status, reason, seconds, peak_bytes FROM attempts") == [
        ("k-a", 1, "4711", "refused", "no model", 1.5, 77)
    ]
    assert rows(places, "SELECT count(*) FROM attempts WHERE ended IS NULL") == [(0,)]


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (Outcome("k-a", "refused", reason="no model", error="ModelError"), True),
        (Outcome("k-a", "refused", reason="disk is full", error="OutputError"), False),
        (Outcome("k-a", "refused", reason="no onnxruntime", error="DeviceError"), False),
        (Outcome("k-a", "crashed", reason="signal 11"), False),
        (Outcome("k-a", "out of memory", reason="2 GB"), False),
        (Outcome("k-a", "timed out", reason="10 s"), False),
        (Outcome("k-a", "failed", reason="KeyError", error="KeyError"), False),
        (Outcome("k-a", "done"), False),  # its folder is not there
    ],
)
def test_what_need_not_run_again(outcome: Outcome, kept: bool, places: Places) -> None:
    put(places, "a", outcome)
    aside = peek(places, [step(places, "a")])
    with State(places) as state:
        found = state.settled([step(places, "a")])
        assert (list(found) == ["k-a"]) is kept
        assert aside == found
        state.forget("k-a")
        assert state.settled([step(places, "a")]) == {}


def test_what_was_made_without_a_row_is_adopted(places: Places) -> None:
    """Its batch was killed between the rename and the row."""
    works.make(step(places, "a"), places, {"runs": 3})
    assert peek(places, [step(places, "a")])["k-a"].counters == {"runs": 3}
    assert not places.database.exists(), "who only looks writes nothing"
    with State(places) as state:
        found = state.settled([step(places, "a"), step(places, "b")])
    assert [(key, one.status, one.counters) for key, one in found.items()] == [("k-a", "done", {"runs": 3})]
    assert rows(places, "SELECT key, status FROM steps") == [("k-a", "done")]


def test_what_was_measured_from_outside_is_kept(places: Places) -> None:
    made = works.make(step(places, "a"), places, {})
    put(places, "a", replace(made, seconds=12.0, peak_bytes=1 << 30))
    with State(places) as state:
        assert state.settled([step(places, "a")])["k-a"].peak_bytes == 1 << 30


def test_times_for_estimates(places: Places) -> None:
    """By name: the key is another when the recipe has changed. The last one counts."""
    for seconds, day in ((5.0, "2026-01-01"), (7.0, "2026-01-02")):
        outcome = Outcome(f"k-{day}", "done", seconds=seconds, finished=day)
        with State(places) as state:
            state.ended(replace(step(places, "a"), key=outcome.key), outcome)
    put(places, "b", Outcome("k-b", "crashed", seconds=99.0))
    with State(places) as state:
        assert state.expected(step(places, "a")) == 7.0
        assert state.expected(step(places, "b")) is None
    assert past(places) == {("quantize", "a"): 7.0}


def test_skipped_steps_leave_no_row(places: Places) -> None:
    with State(places) as state:
        state.ended(step(places, "a"), Outcome("k-a", "skipped", reason="b crashed"))
    assert rows(places, "SELECT * FROM steps") == []


HOLD = """
import sys, time
from pathlib import Path
from sbonnx.batch.jobs.job import Places
from sbonnx.batch.database import State
from tests.batch import works
places = Places(Path(sys.argv[1]))
with State(places) as state:
    state.started(works.step_of("a", places.output), 1, "4711")
    print("at work", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_one_batch_at_a_time(places: Places) -> None:
    """The second names the first; when that is killed nothing is in the way, and its attempt is closed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, places.output], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "at work\n"
        with (
            pytest.raises(OutputError, match=f"a batch is running in .* \\(process {first.pid}\\): wait"),
            State(places),
        ):
            pass
        assert rows(places, "SELECT number, ended FROM attempts") == [(1, None)]
        assert past(places) == {}, "a look aside is not kept off"
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        assert first.stdout is not None
        first.stdout.close()
    with State(places):
        assert rows(places, "SELECT number, status FROM attempts") == [(1, "cut off")]


def test_the_same_process_can_not_either(places: Places) -> None:
    with State(places) as state:
        with pytest.raises(OutputError, match="a batch is running in"), State(places):
            pass
        state.close()
        with State(places):
            pass


def test_a_damaged_database_costs_what_was_refused_only(places: Places) -> None:
    put(places, "a", Outcome("k-a", "refused", error="ModelError"))
    works.make(step(places, "b"), places, {})
    places.database.write_bytes(b"this is no database, and long enough to be looked at" * 100)
    assert list(peek(places, [step(places, "a"), step(places, "b")])) == ["k-b"]
    with State(places) as state:
        assert list(state.settled([step(places, "a"), step(places, "b")])) == ["k-b"]
    assert rows(places, "SELECT key FROM steps") == [("k-b",)]


def test_one_of_a_later_version_is_left_alone(places: Places) -> None:
    with State(places):
        pass
    db = sqlite3.connect(places.database)
    db.execute("PRAGMA user_version=99")
    db.close()
    before = places.database.read_bytes()
    with pytest.raises(OutputError, match="written by a later version of sbonnx"), State(places):
        pass
    assert places.database.read_bytes() == before
    with pytest.raises(OutputError, match="later version"), State(places):  # the lock was given back
        pass


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written to"), State(Places(tmp_path / "file" / "out")):
        pass


def test_a_full_disk_is_said(places: Places) -> None:
    """And what was written before stays, with nothing of what was not."""
    put(places, "a", Outcome("k-a", "crashed"))
    with State(places) as state:
        state._db.execute("PRAGMA max_page_count=1")  # no more pages than there are
        with pytest.raises(OutputError, match=r"state\.sqlite' cannot be written: database or disk is full"):
            state.ended(step(places, "a"), Outcome("k-a", "failed", reason="x" * 1_000_000))
    assert rows(places, "SELECT key, status FROM steps") == [("k-a", "crashed")]
