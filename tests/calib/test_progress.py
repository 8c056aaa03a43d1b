"""Progress: a bar where there is a terminal, a line a minute where there is none, nothing when quiet."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from sbonnx.calib.progress import Bar, Lines, Progress, Silent, make_progress

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """A clock that goes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("sbonnx.calib.progress.time.monotonic", made)
    return made


def walk(progress: Progress, clock: Clock, steps: int, seconds: float, total: int | None) -> None:
    progress.start("calibrate", total)
    for _ in range(steps):
        clock.now += seconds
        progress.advance()
    progress.close()


def test_one_line_a_minute(clock: Clock) -> None:
    stream = io.StringIO()
    walk(Lines(stream), clock, steps=10, seconds=20, total=100)
    assert stream.getvalue().splitlines() == [
        "calibrate: 3 of 100, 0.05/s, 0:32:20 left",
        "calibrate: 6 of 100, 0.05/s, 0:31:20 left",
        "calibrate: 9 of 100, 0.05/s, 0:30:20 left",
    ]


def test_without_a_total_there_is_no_time_left(clock: Clock) -> None:
    stream = io.StringIO()
    walk(Lines(stream), clock, steps=2, seconds=61, total=None)
    assert stream.getvalue().splitlines() == ["calibrate: 1, 0.0164/s", "calibrate: 2, 0.0164/s"]


def test_short_work_says_nothing(clock: Clock) -> None:
    stream = io.StringIO()
    walk(Lines(stream), clock, steps=10, seconds=1, total=10)
    assert stream.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_which_one_is_made() -> None:
    assert isinstance(make_progress(quiet=True, stream=Terminal()), Silent)
    assert isinstance(make_progress(stream=io.StringIO()), Lines)
    bar = make_progress(stream=Terminal())
    assert isinstance(bar, Bar)
    bar.close()


def test_the_bar_counts_and_can_begin_anew() -> None:
    stream = Terminal()
    bar = Bar(stream)
    bar.start("first", 3)
    bar.advance(3)
    bar.start("calibrate", 2)
    bar.advance()
    bar._bar.refresh()
    bar.close()
    bar.close()
    assert "calibrate" in stream.getvalue()
    assert "1/2" in stream.getvalue()


def test_silent_is_silent(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    walk(Silent(), clock, steps=3, seconds=100, total=3)
    assert capsys.readouterr() == ("", "")


def test_importing_calibration_loads_no_rich() -> None:
    code = "import sys, sbonnx.calib.walk; sys.exit('rich' in sys.modules or 'onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
