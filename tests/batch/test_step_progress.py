"""What is shown of a batch as it goes, in its three forms."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from sbonnx.batch.jobs.job import Outcome, Watch
from sbonnx.batch.step_progress import BatchJsonLines, BatchLines, Quiet, Table, clock, make_watch
from tests.batch import works

OUT = Path("out")


def play(watch: Watch) -> None:
    """A batch of four steps: one up to date, one done, one that crashes, is tried again and crashes, one at work."""
    steps = [works.step_of(name, OUT) for name in ("a", "b", "c", "d")]
    watch.begin(steps, {"k-a": Outcome("k-a", "done", seconds=3.0)})
    watch.started(steps[1], 1, "11")
    watch.told(steps[1], "prepare", 0, None, 0)
    watch.told(steps[1], "calibrate", 3, 10, 120_000_000)
    watch.told(steps[1], "", 0, None, 130_000_000)
    watch.ended(steps[1], Outcome("k-b", "done", seconds=2.0, peak_bytes=200_000_000), again=False)
    crashed = Outcome("k-c", "crashed", reason="its process was killed\nby signal 11", seconds=1.0)
    for attempt in (1, 2):
        watch.started(steps[2], attempt, "12")
        watch.ended(steps[2], crashed, again=attempt == 1)
    watch.started(steps[3], 1, "13")
    watch.told(steps[3], "round", 5, 0, 0)
    watch.told(steps[3], "verify", 7, None, 50_000_000)


def test_lines() -> None:
    stream = io.StringIO()
    watch = BatchLines(stream)
    play(watch)
    watch.close()
    watch.close()
    lines = stream.getvalue().splitlines()
    assert lines[:4] == [
        "4 steps, 1 up to date",
        "[2/4] quantize b: done (2.0 s, 200 MB)",
        "[2/4] quantize c: crashed (1.0 s, 0 B): its process was killed by signal 11; it will be retried",
        "[3/4] quantize c: crashed (1.0 s, 0 B): its process was killed by signal 11",
    ]
    assert lines[4].startswith("3 of 4 steps, 1 up to date, 1 not successful, in ")
    assert len(lines) == 5


def test_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is at work, where nothing ends."""
    stream = io.StringIO()
    watch = BatchLines(stream)
    play(watch)
    step = works.step_of("d", OUT)
    count = len(stream.getvalue().splitlines())
    monkeypatch.setattr("sbonnx.batch.step_progress.LINE_EVERY", 0.0)
    watch.told(step, "verify", 8, 20, 50_000_000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == count + 1
    assert lines[-1] == "running: d (verify 8 of 20, 0.0 s, 50 MB)"


def test_json_lines() -> None:
    stream = io.StringIO()
    watch = BatchJsonLines(stream)
    play(watch)
    watch.close()
    watch.close()
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [one["event"] for one in events] == [
        *("begin", "started", "told", "told", "ended"),
        *("started", "ended", "started", "ended"),
        *("started", "told", "told", "end"),
    ]
    assert events[0] == {"event": "begin", "steps": 4, "up_to_date": 1}
    told = events[3]
    assert told.pop("left_seconds") > 0
    assert told == {
        "event": "told",
        "key": "k-b",
        "stage": "calibrate",
        "done": 3,
        "total": 10,
        "memory_bytes": 120_000_000,
    }
    ended = events[4]
    assert (ended["status"], ended["jobs"], ended["peak_bytes"], ended["again"]) == ("done", ["b"], 200_000_000, False)
    assert [one["again"] for one in events if one["event"] == "ended"] == [False, True, False]
    assert (events[-1]["ended"], events[-1]["steps"]) == (3, 4)


def test_stages_are_reported_at_most_twice_a_second() -> None:
    stream = io.StringIO()
    watch = BatchJsonLines(stream)
    step = works.step_of("a", OUT)
    watch.begin([step], {})
    watch.started(step, 1, "1")
    for done in range(1000):
        watch.told(step, "calibrate", done, 1000, 0)
    watch.told(step, "round", 0, None, 0)
    told = [json.loads(line) for line in stream.getvalue().splitlines() if '"told"' in line]
    assert [one["stage"] for one in told] == ["calibrate", "round"]


def drawn(watch: Table) -> str:
    """The table as text, 120 columns wide."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(watch._drawn())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_table() -> None:
    """Who is at work with stage, count, time and memory; who has ended; what went wrong stays above it."""
    stream = io.StringIO()
    watch = Table(stream)
    play(watch)
    text = drawn(watch)
    watch.close()
    watch.close()
    title, heads, *rows = text.splitlines()
    assert title.startswith("3 of 4 steps, 1 up to date, 1 not successful, about ")
    assert heads.split() == ["job", "stage", "progress", "time", "memory"]
    cells = [row.split() for row in rows if row.strip()]
    assert [row[0] for row in cells] == ["b", "c", "d"], "what was up to date is not shown"
    assert cells[0][1:] == ["done", "2.0", "s", "200", "MB"]
    assert cells[2][1:3] == ["verify", "7"]
    assert cells[2][-2:] == ["50", "MB"]
    assert "quantize c: crashed" in stream.getvalue()


def test_a_bar_where_the_total_is_known() -> None:
    watch = Table(io.StringIO())
    step = works.step_of("a" * 80, OUT)
    watch.begin([step], {})
    watch.started(step, 2, "1")
    watch.told(step, "calibrate", 5, 10, 0)
    text = drawn(watch)
    watch.close()
    assert "━" in text
    assert "calibrate (attempt 2)" in text
    assert "a" * 47 + "…" in text
    assert "left" not in text.splitlines()[0], "nothing is known of how long it takes"


def test_the_time_left() -> None:
    """What such steps took before, and the mean of this run for others, by how many are at work."""
    expected = {("quantize", "a"): 10.0, ("quantize", "b"): 30.0}
    watch = BatchJsonLines(io.StringIO(), expected=expected)
    steps = [works.step_of(name, OUT) for name in ("a", "b", "c")]
    watch.begin(steps, {})
    assert watch._left() is None, "of c nothing is known"
    watch.ended(steps[0], Outcome("k-a", "done", seconds=20.0), again=False)
    assert watch._left() == pytest.approx(50.0, abs=0.2)
    for step in steps[1:]:
        watch.started(step, 1, "1")
    time.sleep(0.3)
    left = watch._left()
    assert left is not None
    assert 24.0 < left < 24.9


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (3.21, "3.2 s"), (59.94, "59.9 s"), (245, "4:05"), (3723, "1:02:03")]
)
def test_times(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_which_of_them() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def kind(**how: Any) -> type[Watch]:
        return type(make_watch(**how))

    assert kind(stream=io.StringIO()) is BatchLines
    assert kind(stream=Terminal()) is Table
    assert kind(stream=Terminal(), quiet=True) is Quiet
    assert kind(stream=Terminal(), quiet=True, as_json=True) is BatchJsonLines


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    watch = make_watch(quiet=True)
    play(watch)
    watch.close()
    assert capsys.readouterr() == ("", "")
