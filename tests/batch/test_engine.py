"""The engine: order, shares, limits, retries, what one step's end means for others. Steps do as their titles say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from sbonnx.batch.engine import LocalEngine, default_workers
from sbonnx.batch.jobs.job import Outcome, Places, Step, Watch
from sbonnx.batch.process.cleanup import scratch_of
from sbonnx.batch.process.step_process import StepProcess
from sbonnx.errors import DeviceError
from sbonnx.system.cpu import cores
from tests.batch import works

ROOT = Path(__file__).resolve().parents[2]


class Seen(Watch):
    """A watch that keeps what it is told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.ends: list[tuple[str, str, bool]] = []
        self.stages: dict[str, list[str]] = {}
        self.memory: dict[str, int] = {}
        self.at_once = 0
        self._running: set[str] = set()

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        """See `Watch`."""

    def started(self, step: Step, attempt: int, where: str) -> None:
        """See `Watch`."""
        assert int(where) > 1
        self.begun.append((step.title, attempt))
        self._running.add(step.key)
        self.at_once = max(self.at_once, len(self._running))

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        """See `Watch`."""
        self.stages.setdefault(step.title, []).append(stage)
        self.memory[step.title] = max(memory, self.memory.get(step.title, 0))

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        """See `Watch`."""
        self._running.discard(step.key)
        self.ends.append((step.title, outcome.status, again))

    def close(self) -> None:
        """See `Watch`."""


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def run(steps: Sequence[Step], places: Places, workers: int = 2, **more: object) -> tuple[dict[str, Outcome], Seen]:
    """All of the steps, run."""
    seen = Seen()
    engine = LocalEngine(workers, work=works.work, publish=works.publish, **more)  # type: ignore[arg-type]
    return engine.run(steps, places, seen), seen


@pytest.mark.slow
def test_the_bad_ones_cost_only_themselves(places: Places) -> None:
    """Crash, memory, time, refusal: each is reported as such; the others are done."""
    names = ["segfault", "one", "suicide", "refuse", "two", "fail", "leave", "three"]
    steps = [works.step_of(name, places.output) for name in names]
    steps.append(works.step_of("eat", places.output, memory=200_000_000))
    steps.append(works.step_of("hang", places.output, seconds=0.5))
    outcomes, seen = run(steps, places)
    assert {key.removeprefix("k-"): one.status for key, one in outcomes.items()} == {
        "segfault": "crashed",
        "suicide": "crashed",
        "leave": "crashed",
        "refuse": "refused",
        "fail": "failed",
        "eat": "out of memory",
        "hang": "timed out",
        "one": "done",
        "two": "done",
        "three": "done",
    }
    for step in steps:
        whole = outcomes[step.key].status == "done"
        assert Path(step.jobs[0].output).exists() is whole
        if whole:
            assert Path(step.jobs[0].output).read_bytes() == works.content(step)
        else:
            assert outcomes[step.key].reason
    assert seen.at_once == 2
    assert len(seen.ends) == len(steps)
    assert not [path for path in places.output.rglob(".*") if path.name != ".sbonnx"], "nothing hidden is left"
    assert not scratch_of(places).exists()


def test_needs_come_first_and_a_lost_one_is_named(places: Places) -> None:
    """Of a chain whose first crashes all are skipped; the other chain runs in its order."""
    out = places.output
    steps = [
        works.step_of("last", out, after=("k-middle",)),
        works.step_of("middle", out, after=("k-segfault",)),
        works.step_of("segfault", out, kind="calibrate"),
        works.step_of("b", out, after=("k-a",)),
        works.step_of("a", out, kind="calibrate"),
        works.step_of("c", out, after=("k-not-among-them",)),
    ]
    outcomes, seen = run(steps, places, workers=1)
    assert [outcomes[f"k-{name}"].status for name in ("a", "b", "c")] == ["done"] * 3
    assert [outcomes[f"k-{name}"].status for name in ("middle", "last")] == ["skipped"] * 2
    assert outcomes["k-middle"].reason == (
        "'segfault' did not succeed (crashed): its process was killed by signal 11 (SIGSEGV)"
    )
    assert outcomes["k-middle"].attempts == 0
    begun = [title for title, _ in seen.begun]
    assert begun.index("a") < begun.index("b")
    assert not {"middle", "last"} & set(begun)


def test_a_ring_is_no_batch(places: Places) -> None:
    steps = [works.step_of("a", places.output, after=("k-b",)), works.step_of("b", places.output, after=("k-a",))]
    with pytest.raises(ValueError, match="depend on each other"):
        run(steps, places)


@pytest.mark.slow
def test_crashes_are_tried_again_and_refusals_are_not(places: Places) -> None:
    out = places.output
    steps = [
        works.step_of("once", out, retries=1),
        works.step_of("segfault", out, retries=2),
        works.step_of("refuse", out, retries=2),
        works.step_of("fail", out, retries=2),
        works.step_of("other", out),
    ]
    outcomes, seen = run(steps, places, workers=1)
    assert (outcomes["k-once"].status, outcomes["k-once"].attempts) == ("done", 2)
    assert (outcomes["k-segfault"].status, outcomes["k-segfault"].attempts) == ("crashed", 3)
    assert [attempt for title, attempt in seen.begun if title == "segfault"] == [1, 2, 3]
    assert [title for title, _ in seen.begun].count("refuse") == 1
    assert [title for title, _ in seen.begun].count("fail") == 1
    assert ("once", "crashed", True) in seen.ends
    assert ("once", "done", False) in seen.ends
    assert seen.begun.index(("other", 1)) < seen.begun.index(("segfault", 2)), "behind the others"
    assert places.log("k-segfault").read_text().count("Fatal Python error") == 3


def test_a_worker_that_is_killed_is_tried_again(places: Places) -> None:
    """By hand, from outside, while it works."""
    step = works.step_of("sleep-0.5", places.output, retries=1)

    class Killer(Seen):
        def started(self, step: Step, attempt: int, where: str) -> None:
            super().started(step, attempt, where)
            if attempt == 1:
                os.kill(int(where), signal.SIGKILL)

    seen = Killer()
    outcomes = LocalEngine(1, work=works.work, publish=works.publish).run([step], places, seen)
    assert (outcomes[step.key].status, outcomes[step.key].attempts) == ("done", 2)
    assert seen.ends == [("sleep-0.5", "crashed", True), ("sleep-0.5", "done", False)]


def test_a_process_that_cannot_be_started(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time only: it is tried again; every time: said, and the batch goes on to its end."""
    tries = []

    def none_at_first(*args: object, **more: object) -> StepProcess:
        tries.append(more["attempt"])
        if len(tries) < 2:
            raise OSError("Resource temporarily unavailable")
        return StepProcess(*args, **more, work=works.work, publish=works.publish)  # type: ignore[arg-type]

    engine = LocalEngine(1)
    monkeypatch.setattr(engine, "_start", none_at_first)
    seen = Seen()
    monkeypatch.setattr(seen, "started", lambda *_: None)
    outcomes = engine.run([works.step_of("a", places.output, retries=1)], places, seen)
    assert outcomes["k-a"].status == "done"
    assert seen.ends == [("a", "crashed", True), ("a", "done", False)]
    tries.clear()
    outcomes = engine.run([works.step_of("b", places.output)], places, seen)
    assert (outcomes["k-b"].status, outcomes["k-b"].reason) == ("crashed", "Resource temporarily unavailable")


def test_the_longest_way_begins_first(places: Places) -> None:
    """Not the longest step: that behind which most is waiting."""
    out = places.output
    steps = [
        works.step_of("short", out),
        works.step_of("long", out),
        works.step_of("head", out, kind="calibrate"),
        works.step_of("tail", out, after=("k-head",)),
        works.step_of("unknown", out),
    ]
    seconds = {"short": 1.0, "long": 5.0, "head": 2.0, "tail": 4.0, "unknown": None}
    _, seen = run(steps, places, workers=1, expected=lambda step: seconds[step.title])
    assert [title for title, _ in seen.begun] == ["head", "long", "tail", "unknown", "short"]


def test_processors_are_shared_among_those_that_can_begin(places: Places) -> None:
    """Several: one each, not the same. One that is alone: all of them."""
    out = places.output
    steps = [
        works.step_of("look-a", out),
        works.step_of("look-b", out),
        works.step_of("look-z", out, after=("k-look-a", "k-look-b")),
    ]
    outcomes, _ = run(steps, places, workers=2)
    found = {key: one.report for key, one in outcomes.items() if one.report}
    assert len(found) == 3
    each = max(1, cores() // 2)
    assert [found[f"k-look-{name}"]["threads"] for name in "abz"] == [each, each, cores()]
    assert [found[f"k-look-{name}"]["cores"] for name in "abz"] == [each, each, cores()]


def test_more_workers_than_processors(places: Places) -> None:
    count = 2 * cores() + 1
    outcomes, seen = run([works.step_of(f"sleep-0.4-{n}", places.output) for n in range(count)], places, workers=count)
    assert {one.status for one in outcomes.values()} == {"done"}
    assert {one.counters["threads"] for one in outcomes.values()} == {1}
    assert seen.at_once == count


def test_progress_reports_stages_and_memory(places: Places) -> None:
    _, seen = run([works.step_of("slow", places.output)], places)
    assert "counting" in seen.stages["slow"]
    assert seen.memory["slow"] > 10_000_000


def test_workers() -> None:
    assert 1 <= default_workers() <= cores()
    with pytest.raises(DeviceError, match="at least one worker, got 0"):
        LocalEngine(0)


@pytest.mark.slow
def test_the_cost_of_a_process(places: Places) -> None:
    """Far below half a second a step, beyond the work itself."""
    run([works.step_of("first", places.output)], places)  # the server of forks is started once
    steps = [works.step_of(f"n-{number}", places.output) for number in range(20)]
    began = time.monotonic()
    outcomes, _ = run(steps, places, workers=1)
    took = time.monotonic() - began
    assert {one.status for one in outcomes.values()} == {"done"}
    assert took / len(steps) < 0.5


SCRIPT = """
import json, sys
from pathlib import Path
from sbonnx.batch.engine import LocalEngine
from sbonnx.batch.jobs.job import Places
from sbonnx.batch.step_progress import BatchJsonLines
from tests.batch import works

output = Path(sys.argv[1])
steps = [works.step_of(name, output, seconds=60) for name in sys.argv[2:]]
LocalEngine(2, work=works.work, publish=works.publish).run(steps, Places(output), BatchJsonLines(sys.stdout))
"""


@contextlib.contextmanager
def batch_of(places: Places, *names: str) -> Iterator[subprocess.Popen[bytes]]:
    """A batch of those steps in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(places.output), *names]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_parent_is_ended(number: int, places: Places) -> None:
    """Its processes end; what is half done is nowhere, and the next run does all of it."""
    with batch_of(places, "hang-a", "hang_deaf-b") as process:
        assert process.stdout is not None
        pids = []
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "started":
                pids.append(int(event["where"]))
            if len(pids) == 2:
                break
        deadline = time.monotonic() + 10
        while len(list(places.output.glob("*.pid"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(10)
        deadline = time.monotonic() + 5
        while any(psutil.pid_exists(pid) for pid in pids):
            assert time.monotonic() < deadline, "it outlives the batch"
            time.sleep(0.02)
        if number == signal.SIGINT:
            assert process.stderr is not None
            assert b"KeyboardInterrupt" in process.stderr.read()
    state = places.output / ".sbonnx"
    unfinished = [state / ".digests.json.0a1b2c3d.tmp", state / "sketches" / "s" / "m" / ".layer.rounded.0a1b2c3d.tmp"]
    for left in (state / "steps" / ".k-hang-a.4711", places.output / ".hang-a.onnx.0a1b.tmp", *unfinished):
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_text("half") if left.suffix == ".tmp" else left.mkdir()
    mine = places.output / ".mine.tmp"
    mine.touch()
    steps = [works.step_of("hang-a", places.output, seconds=0.2)]
    outcomes, _ = run(steps, places)
    assert outcomes["k-hang-a"].status == "timed out"
    assert mine.exists(), "what is not ours stays"
    hidden = [path.name for path in places.output.rglob(".*") if path.name != ".sbonnx"]
    assert hidden == [".mine.tmp"]
