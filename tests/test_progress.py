"""Progress: a bar where there is a terminal, a line a minute where there is none, nothing when quiet."""

from __future__ import annotations

import io
import json
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sbonnx import progress as progress_module
from sbonnx.progress import (
    Bar,
    JsonLines,
    Lines,
    NotebookBar,
    Progress,
    Silent,
    _peak,
    make_progress,
    memory_in_use,
    shown_by_default,
)
from sbonnx.system.sizes import size_text

ROOT = Path(__file__).resolve().parents[1]


class Clock:
    """A clock that goes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


MEMORY = 512_300_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that goes when told, in a process of 512 MB."""
    made = Clock()
    monkeypatch.setattr("sbonnx.progress.time.monotonic", made)
    monkeypatch.setattr("sbonnx.progress.memory_in_use", lambda: MEMORY)
    return made


def walk(progress: Progress, clock: Clock, steps: int, seconds: float, total: int | None) -> None:
    progress.start("calibrate", total)
    for _ in range(steps):
        clock.now += seconds
        progress.advance()
    progress.close()


def layers(progress: Progress, clock: Clock, samples: int = 4, segments: int = 3) -> None:
    """Segment by segment, a second a sample, 1.5 GB on disk in the second one."""
    progress.start("calibrate", samples)
    for number in range(1, segments + 1):
        progress.state(segment=(number, segments))
        for _ in range(samples):
            clock.now += 1
            progress.state(spilled=1_500_000_000 if number == 2 else 0)
            progress.advance()
    progress.close()


def test_one_line_a_minute(clock: Clock) -> None:
    stream = io.StringIO()
    walk(Lines(stream), clock, steps=10, seconds=20, total=100)
    assert stream.getvalue().splitlines() == [
        "calibrate: 3 of 100, 0.05/s, 512 MB in memory, 0:32:20 left",
        "calibrate: 6 of 100, 0.05/s, 512 MB in memory, 0:31:20 left",
        "calibrate: 9 of 100, 0.05/s, 512 MB in memory, 0:30:20 left",
    ]


def test_without_a_total_there_is_no_time_left(clock: Clock) -> None:
    stream = io.StringIO()
    walk(Lines(stream), clock, steps=2, seconds=61, total=None)
    assert stream.getvalue().splitlines() == [
        "calibrate: 1, 0.0164/s, 512 MB in memory",
        "calibrate: 2, 0.0164/s, 512 MB in memory",
    ]


def test_short_work_says_nothing(clock: Clock) -> None:
    stream = io.StringIO()
    walk(Lines(stream), clock, steps=10, seconds=1, total=10)
    assert stream.getvalue() == ""


def test_segments_are_counted_each_and_the_time_left_is_for_all(clock: Clock) -> None:
    stream = io.StringIO()
    layers(Lines(stream, every=2), clock)
    assert stream.getvalue().splitlines() == [
        "calibrate: segment 1 of 3, 2 of 4, 1/s, 512 MB in memory, 0:00:10 left",
        "calibrate: segment 1 of 3, 4 of 4, 1/s, 512 MB in memory, 0:00:08 left",
        "calibrate: segment 2 of 3, 2 of 4, 1/s, 512 MB in memory, 1.5 GB on disk, 0:00:06 left",
        "calibrate: segment 2 of 3, 4 of 4, 1/s, 512 MB in memory, 1.5 GB on disk, 0:00:04 left",
        "calibrate: segment 3 of 3, 2 of 4, 1/s, 512 MB in memory, 0:00:02 left",
        "calibrate: segment 3 of 3, 4 of 4, 1/s, 512 MB in memory, 0:00:00 left",
    ]


def test_json_lines(clock: Clock) -> None:
    """Every key, and what it says in the middle of the second segment."""
    stream = io.StringIO()
    layers(JsonLines(stream), clock)
    said = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(said) == 13, "one a sample, which are a second apart, and the last"
    assert said[5] == {
        "stage": "calibrate",
        "segment": 2,
        "segments": 3,
        "done": 2,
        "total": 4,
        "per_second": 1.0,
        "memory_bytes": MEMORY,
        "spilled_bytes": 1_500_000_000,
        "eta_seconds": 6.0,
        "elapsed_seconds": 6.0,
    }
    assert (said[-1]["done"], said[-1]["eta_seconds"]) == (4, 0.0)


def test_json_lines_are_at_most_four_a_second_and_end_with_the_last(clock: Clock) -> None:
    stream = io.StringIO()
    progress = JsonLines(stream)
    walk(progress, clock, steps=1000, seconds=0.01, total=None)
    progress.close()
    said = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert 38 <= len(said) <= 41
    last = said[-1]
    assert (last["done"], last["total"], last["eta_seconds"], last["segment"]) == (1000, None, None, None)
    assert last["elapsed_seconds"] == pytest.approx(10)


def test_every_stage_has_a_last_json_line(clock: Clock) -> None:
    stream = io.StringIO()
    progress = JsonLines(stream)
    progress.start("calibrate", 1)
    progress.advance()
    progress.start("verify", 2)
    progress.close()
    said = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(one["stage"], one["done"]) for one in said] == [("calibrate", 1), ("verify", 0)]


def test_memory_in_use_is_what_the_system_counts() -> None:
    """Against the peak that getrusage knows: not above it, and 64 MB more are seen."""
    resource = pytest.importorskip("resource", reason="Windows counts otherwise")
    before = memory_in_use()
    block = mmap.mmap(-1, 64_000_000)  # not by the allocator, which may hold as much that other tests gave back
    np.frombuffer(block, np.uint8)[:] = 1
    now = memory_in_use()
    assert before is not None and now is not None
    unit = 1 if sys.platform == "darwin" else 1024
    assert now <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + (4 << 20)
    assert now - before > 0.8 * len(block)
    highest = _peak()
    assert highest is not None and highest > 0.9 * now


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (512_300_000, "512 MB"), (-1500, "-1.5 kB"), (1e15, "1,000 TB")],
)
def test_sizes_are_short(count: float, text: str) -> None:
    assert size_text(count) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_which_one_is_made() -> None:
    assert isinstance(make_progress(quiet=True, stream=Terminal()), Silent)
    assert isinstance(make_progress(stream=io.StringIO()), Lines)
    assert isinstance(make_progress(quiet=True, as_json=True, stream=Terminal()), JsonLines)
    bar = make_progress(stream=Terminal())
    assert isinstance(bar, Bar)
    bar.close()


def test_the_bar_counts_and_restarts() -> None:
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


def test_the_bar_shows_the_segment_and_the_figures(clock: Clock) -> None:
    stream = Terminal()
    bar = Bar(stream)
    bar.state(segment=(1, 2))
    bar.advance()
    bar.start("calibrate", 4)
    for number in (1, 2):
        bar.state(segment=(number, 2), spilled=3_000_000)
        clock.now += 1
        bar.advance()
    task = bar._bar.tasks[0]
    bar.close()
    assert (task.description, task.completed, task.total) == ("calibrate, segment 2 of 2", 1, 4)
    assert task.fields["pace"] == "1/s, 512 MB in memory, 3 MB on disk, 0:00:01 left"


def test_silent_is_silent(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    walk(Silent(), clock, steps=3, seconds=100, total=3)
    assert capsys.readouterr() == ("", "")


def test_importing_calibration_loads_no_rich() -> None:
    code = "import sys, sbonnx.calib.calibrator; sys.exit('rich' in sys.modules or 'onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


class FakeDisplay:
    """``IPython.display``: what was shown, as texts."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def HTML(self, text: str) -> str:  # noqa: N802 - IPython's name
        return text

    def display(self, page: str, *, display_id: bool) -> FakeDisplay:
        assert display_id and not self.pages, "one display, which is updated"
        self.pages.append(page)
        return self

    def update(self, page: str) -> None:
        self.pages.append(page)


def test_a_bar_in_a_notebook() -> None:
    fake = FakeDisplay()
    bar = NotebookBar(fake, every=0.0)
    bar.start("calibration <1>", 4)
    bar.advance(3)
    assert 'value="3" max="4"' in fake.pages[-1] and "calibration &lt;1&gt;: 3 of 4" in fake.pages[-1]
    bar.start("saving", None)
    assert "<progress ></progress>" in fake.pages[-1]
    bar.close()
    bar.close()
    assert fake.pages[-1] == "" and fake.pages.count("") == 1


def test_notebooks_show_a_bar_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDisplay()
    monkeypatch.setattr(progress_module, "in_notebook", lambda: True)
    monkeypatch.setattr(progress_module, "import_module", lambda name: fake)

    @shown_by_default
    def work(*, progress: Progress | None = None) -> Progress | None:
        if progress is not None:
            progress.start("work", 2)
        return progress

    silent = Silent()
    assert work(progress=silent) is silent and not fake.pages
    assert isinstance(work(), NotebookBar)
    assert "work: 0 of 2" in fake.pages[0] and fake.pages[-1] == "", "closed at the end"
    monkeypatch.setattr(progress_module, "in_notebook", lambda: False)
    assert work() is None


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminals_show_a_bar_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage after stage: a stage that closes its display does not hide those that follow it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := FakeTerminal())

    @shown_by_default
    def work(*, progress: Progress | None = None) -> Progress | None:
        if progress is not None:
            for stage in ("calibration", "training"):
                progress.start(stage, 2)
                progress.advance(2)
                progress.close()
        return progress

    assert isinstance(work(), Bar)
    shown = terminal.getvalue()
    assert "calibration" in shown and "training" in shown
    assert isinstance(work(progress=Silent()), Silent) and terminal.getvalue() == shown


@pytest.mark.parametrize("name", ["prepare", "train"])
def test_training_shows_a_bar_by_default(name: str) -> None:
    pytest.importorskip("torch")
    qat = pytest.importorskip("sbonnx.qat", exc_type=ImportError)
    assert getattr(qat, name).__wrapped__.__name__ == name
