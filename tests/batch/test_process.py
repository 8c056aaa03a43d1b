"""A process for a step: whatever it does, the parent lives and can say what happened; and it never outlives that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sbonnx.batch.jobs.job import Outcome, Places
from sbonnx.batch.outcomes import from_json, read_made, to_json
from sbonnx.batch.process.cleanup import scratch_of, scratch_root, sweep
from sbonnx.batch.process.locks import lock_path, take
from sbonnx.batch.process.step_process import StepProcess, run_isolated
from tests.batch import works

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def run(name: str, places: Places, told: list[tuple[str, int, int | None]] | None = None, **limits: Any) -> Outcome:
    """One attempt at the step of that name."""

    def tell(stage: str, done: int = 0, total: int | None = None) -> None:
        if told is not None:
            told.append((stage, done, total))

    step = works.step_of(name, places.output, **limits)
    return run_isolated(StepProcess(step, places, work=works.work, publish=works.publish), tell)


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until it is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def ended(one: StepProcess) -> Outcome:
    """What becomes of it."""
    until(lambda: (one.look(), one.outcome)[1])  # type: ignore[func-returns-value]
    assert one.outcome is not None
    return one.outcome


def gone(pid: int) -> bool:
    """Whether no process of that number runs. A zombie has run."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def stray(places: Places) -> list[str]:
    """Hidden and temporary files below the output, but for the state's own folder name."""
    names = [path.relative_to(places.output).as_posix() for path in places.output.rglob("*")]
    return [name for name in names if "/." in f"/{name.removeprefix('.sbonnx')}" or name.endswith(".tmp")]


def test_a_step_that_is_done(places: Places) -> None:
    told: list[tuple[str, int, int | None]] = []
    outcome = run("slow", places, told)
    assert (outcome.status, outcome.reason, outcome.attempts) == ("done", "", 1)
    assert 0.15 < outcome.seconds < 10
    assert outcome.peak_bytes > 10_000_000
    assert outcome.finished.endswith("+00:00")
    assert told[0] == ("slow", 0, 2)
    assert [one for one in told if one[0] == "counting"], "the stage changes: it is told"
    assert [done for stage, done, _ in told if stage == "counting"] == sorted(
        done for stage, done, _ in told if stage == "counting"
    )
    step = works.step_of("slow", places.output)
    assert (places.output / "slow.onnx").read_bytes() == works.content(step)
    assert stray(places) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "limits", "status", "reason"),
    [
        ("refuse", {}, "refused", "'refuse' is no model: give another"),
        ("fail", {}, "failed", "KeyError: 'no such thing'"),
        ("segfault", {}, "crashed", "its process was killed by signal 11 (SIGSEGV)"),
        ("suicide", {}, "crashed", "its process was killed by signal 9 (SIGKILL)"),
        ("leave", {}, "crashed", "its process ended without a result (exit code 3)"),
        ("eat", {"memory": 200_000_000}, "out of memory", "more than its limit of 200 MB"),
        ("hang", {"seconds": 0.5}, "timed out", "it ran longer than its limit of 0.5 s"),
        ("hang_deaf", {"seconds": 0.5}, "timed out", "it ran longer than its limit of 0.5 s"),
        ("flood", {"seconds": 20}, "crashed", "it wrote more than 67.1 MB without a line break"),
        ("surrogate", {}, "failed", "ValueError: half a pair: \\ud800"),
    ],
)
def test_how_it_ends(name: str, limits: dict[str, Any], status: str, reason: str, places: Places) -> None:
    began = time.monotonic()
    outcome = run(name, places, **limits)
    assert outcome.status == status
    assert reason in outcome.reason
    assert "\n" not in outcome.reason
    assert time.monotonic() - began < 15
    assert not (places.output / f"{name}.onnx").exists()
    assert not places.made(f"k-{name}").exists()
    assert stray(places) == []


def test_the_kinds_of_what_was_raised(places: Places) -> None:
    assert run("refuse", places).error == "ModelError"
    assert run("fail", places).error == "KeyError"
    assert not places.log("k-refuse").exists(), "nothing was said: no log"
    assert "in _fail" in places.log("k-fail").read_text()


def test_code_that_writes_to_every_file(places: Places, capfd: pytest.CaptureFixture[str]) -> None:
    """Its own result arrives; the fork server and the resource tracker get nothing, and the next step is done."""
    for name in ("scribble", "slow", "scribble-2"):
        assert run(name, places).status == "done"
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_the_fork_server_has_one_thread(places: Places) -> None:
    assert run("threads", places).counters == {"threads": 1}


SHADOWED = ("select", "threading", "multiprocessing", "queue", "json", "sitecustomize")

SCRIPT = """
import sys, select, threading, multiprocessing, queue, json
from pathlib import Path
from sbonnx.batch.jobs.job import Places
from sbonnx.batch.process.step_process import StepProcess, run_isolated
from tests.batch import works

sys.path.insert(0, "")  # as in an interactive session
places = Places(Path("out"))
step = works.step_of("import", places.output)
print(run_isolated(StepProcess(step, places, work=works.work, method=sys.argv[1]), lambda *_: None).status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_no_module_of_the_working_folder_is_run(method: str, tmp_path: Path) -> None:
    """Modules beside downloaded models; the process of a step has imported none of them before."""
    folder, script = tmp_path / "downloads", tmp_path / "script.py"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(folder / name)!r} + '.imported', 'w').close()\n")
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), method]
    done = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
    assert list(folder.glob("*.imported")) == []


def test_a_native_crash_leaves_its_stack(places: Places) -> None:
    run("segfault", places)
    assert "_segfault" in places.log("k-segfault").read_text()


def test_memory_of_what_a_step_starts_counts(places: Places) -> None:
    outcome = run("eat_in_child", places, memory=250_000_000)
    assert outcome.status == "out of memory"
    assert outcome.peak_bytes > 250_000_000
    until(lambda: gone(int((places.output / "grandchild.txt").read_text())), 5)


def test_made_before_it_died_is_done(places: Places) -> None:
    """Killed between the rename and its last word."""
    assert run("hang_after", places).status == "done"
    assert (places.output / "hang_after.onnx").exists()


def test_made_and_not_yet_published(places: Places) -> None:
    assert run("unpublished", places).status == "done"
    step = works.step_of("unpublished", places.output)
    assert (places.output / "unpublished.onnx").read_bytes() == works.content(step)


def test_what_is_made_is_not_made_again(places: Places) -> None:
    for _ in range(2):
        assert run("simple", places).status == "done"
    assert (places.output / "ran.txt").read_text() == "k-simple\n"


def test_an_unreadable_outcome_is_recomputed(places: Places) -> None:
    """As after a loss of power: the folder is there, and the file in it is empty."""
    places.made("k-simple").mkdir(parents=True)
    (places.made("k-simple") / "outcome.json").touch()
    assert read_made(places, "k-simple") is None
    assert run("simple", places).status == "done"
    made = read_made(places, "k-simple")
    assert made is not None
    assert made.status == "done"
    assert stray(places) == []


def test_leftovers_of_a_step_go_before_it_begins(places: Places) -> None:
    left = places.made("k-simple").with_name(".k-simple.4711")
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    assert run("simple", places).status == "done"
    assert not left.exists()


def test_what_a_step_finds_around_itself(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of now, not of when the first process was started; its share of processors; no script of ours."""
    monkeypatch.setenv("MARK_OF_THE_TEST", "here")
    step = works.step_of("look", places.output)
    cpus = sorted(os.sched_getaffinity(0))[:1]
    one = StepProcess(step, places, threads=1, cpus=cpus, work=works.work, publish=works.publish)
    found = ended(one).report
    assert found is not None
    assert (found["threads"], found["cores"], found["omp"]) == (1, 1, "1")
    assert (found["mark"], found["group"], found["main"], found["stdin"]) == ("here", True, "", "")
    root = scratch_of(places)
    assert Path(found["temporary"]).parent == root
    assert not root.exists()
    assert places.log("k-look").read_text() == "said on stdout\nsaid on stderr\n"


def test_the_numbers_of_a_step_cross_the_pipe() -> None:
    """Whatever stands in an outcome comes out as it went in."""
    outcome = Outcome(
        "k",
        "unaccepted",
        reason="zu klein: 3 dB\nand more",
        seconds=1.5,
        peak_bytes=1 << 40,
        attempts=3,
        report={"metrics": {"sqnr": float("inf"), "é": [1, None, "x"]}},
        accepted=(("min_sqnr", 3.0, 20.0, False),),
        counters={"runs": 512},
        finished="2026-01-01T00:00:00+00:00",
        error="ModelError",
    )
    assert from_json(to_json(outcome)) == outcome
    assert "\n" not in to_json(outcome)
    for bad in ("", "[]", '{"key": "k"}', '{"key": "k", "status": "done"'):
        with pytest.raises(ValueError):
            from_json(bad)


def test_another_process_at_the_step_is_waited_for(places: Places) -> None:
    """An orphan of a killed batch still works: its result is taken over, not made again."""
    held = take(lock_path(places, "k-simple"))
    assert held is not None
    told: list[tuple[str, int, int | None]] = []
    found: list[Outcome] = []
    other = threading.Thread(target=lambda: found.append(run("simple", places, told)))
    other.start()
    until(lambda: told)
    assert told[0][0] == "waiting for another process at the same step"
    works.make(works.step_of("simple", places.output), places, {"by": 7})  # the orphan ends
    os.close(held)
    other.join(20)
    assert found[0].counters == {"by": 7}
    assert (places.output / "ran.txt").read_text() == "k-simple\n"


def test_the_lock_is_held_for_as_long_as_the_process_lives(places: Places) -> None:
    one = StepProcess(works.step_of("hang", places.output), places, work=works.work, publish=works.publish)
    until((places.output / "hang.pid").exists)
    assert take(lock_path(places, "k-hang")) is None
    left = places.made("k-hang").with_name(f".k-hang.{one.pid}")
    left.mkdir()
    sweep(places, [one.step])
    assert left.exists(), "somebody is at it"
    one.end()
    assert gone(one.pid)
    sweep(places, [one.step])
    assert not left.exists()
    free = take(lock_path(places, "k-hang"))
    assert free is not None
    os.close(free)


@pytest.mark.parametrize("what", ["a link", "a folder"])
def test_only_what_a_batch_makes_is_swept(what: str, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the scratch folder can be guessed: a link in its place, or in it, leads nowhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(places.output))
    elsewhere, scratch = places.output / "elsewhere", scratch_of(places)
    for folder in (elsewhere, elsewhere if what == "a link" else scratch):
        for name in ("backup.2024", "k-a.4711"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "file").touch()
    if what == "a link":
        scratch.symlink_to(elsewhere)
    else:
        (scratch / "k-a.4711" / "link").symlink_to(elsewhere)
        (scratch / "k-a.12").symlink_to(elsewhere)
    beside = [places.output / name for name in (".a.onnx.notes.tmp", ".a.onnx.12.tmp", ".a.onnx.tmp", ".a.onnx.1f")]
    for path in beside:
        path.mkdir() if path.name.endswith(".12.tmp") else path.touch()
    os.close(take(lock_path(places, "k-a")) or 0)
    sweep(places, [works.step_of("a", places.output)])
    assert all(path.exists() for path in (*beside, elsewhere / "k-a.4711" / "file", elsewhere / "backup.2024" / "file"))
    assert sorted(path.name for path in scratch.iterdir()) == [
        "backup.2024",
        *(["k-a.4711"] if what == "a link" else []),
    ]
    assert (scratch_root(places) is None) == (what == "a link")


PARENT = """
import sys
from pathlib import Path
from sbonnx.batch.jobs.job import Places
from sbonnx.batch.process.step_process import StepProcess, run_isolated
from tests.batch import works
output = Path(sys.argv[1])
step = works.step_of(sys.argv[2], output)
process = StepProcess(step, Places(output), work=works.work, publish=works.publish, method=sys.argv[3])
run_isolated(process, lambda *a: None)
"""
"""Without a guard, as people write scripts: the processes do not run it again."""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("name", ["hang", "hang_deaf", "eat_in_child"])
def test_it_dies_with_its_parent(name: str, method: str, places: Places) -> None:
    """kill -9 of the parent: nothing goes on, not even what holds Python's lock, nor what it has started."""
    mark = places.output / ("grandchild.txt" if name == "eat_in_child" else f"{name}.pid")
    script = places.output / "script.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, script, places.output, name, method], cwd=ROOT, env=environment)
    try:
        until(lambda: mark.exists() and mark.read_text())
        family = psutil.Process(parent.pid).children(recursive=True)
    finally:
        parent.kill()
        parent.wait()
    assert int(mark.read_text()) in [one.pid for one in family] or method == "forkserver"
    until(lambda: gone(int(mark.read_text())), 5)
    until(lambda: all(gone(one.pid) for one in family), 5)


@pytest.mark.slow
def test_the_server_of_forks_is_killed(places: Places) -> None:
    """It takes its processes with it, and the next step has another."""
    assert run("simple", places).status == "done"
    one = StepProcess(works.step_of("hang", places.output), places, work=works.work, publish=works.publish)
    until((places.output / "hang.pid").exists)
    server = psutil.Process(one.pid).ppid()
    assert server != os.getpid()
    os.kill(server, signal.SIGKILL)
    assert ended(one).status == "crashed"
    until(lambda: gone(one.pid), 5)
    assert run("other", places).status == "done"


def test_stopped_from_outside(places: Places) -> None:
    step = works.step_of("hang", places.output)
    began = time.monotonic()
    process = StepProcess(step, places, work=works.work, publish=works.publish)
    outcome = run_isolated(process, lambda *_: None, stopped=lambda: True)
    assert outcome.status == "crashed"
    assert time.monotonic() - began < 10


def test_an_interrupt_ends_the_process(places: Places) -> None:
    def interrupted() -> bool:
        if (places.output / "hang.pid").exists():
            raise KeyboardInterrupt
        return False

    step = works.step_of("hang", places.output)
    with pytest.raises(KeyboardInterrupt):
        run_isolated(StepProcess(step, places, work=works.work), lambda *_: None, stopped=interrupted)
    assert gone(int((places.output / "hang.pid").read_text()))
