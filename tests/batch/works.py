"""Steps for tests, by title: what a process may do well or badly. The part of `work` that the engine is given."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sbonnx.batch.jobs.job import BatchReport, Job, Outcome, Places, Step, StepLimits, Tell, Watch
from sbonnx.batch.outcomes import now, to_json
from sbonnx.errors import ModelError


def step_of(
    name: str,
    output: Path,
    *,
    after: tuple[str, ...] = (),
    kind: Any = "quantize",
    key: str | None = None,
    **limits: Any,
) -> Step:
    """A step of that name. What comes before "-" is what it does: see `work`."""
    job = Job(name=name, model="m.onnx", data=None, backend="onnxruntime", output=str(output / f"{name}.onnx"))
    return Step(
        key=key or f"k-{name}",
        kind=kind,
        title=name,
        jobs=(job,),
        after=after,
        limits=StepLimits(**{"retries": 0, **limits}),
    )


def content(step: Step) -> bytes:
    """What `work` makes of a step: it depends on the key, and on nothing else."""
    return (f"{step.key}\n" * 20_000).encode()


def work(step: Step, places: Places, tell: Tell, threads: int) -> Outcome:
    """Do what the step's title says."""
    what = step.title.partition("-")[0]
    tell(what, 0, 2)
    found = DO[what](step, places, tell, threads) if what in DO else None
    if isinstance(found, Outcome):
        return found
    return make(step, places, {"threads": threads})


def make(step: Step, places: Places, counters: dict[str, int]) -> Outcome:
    """Write a file in pieces, as a step does: hidden, renamed, published. Counts itself in `ran`."""
    outcome = Outcome(step.key, "done", seconds=0.0, finished=now(), counters=counters)
    hidden = places.made(step.key).with_name(f".{step.key}.{os.getpid()}")
    hidden.mkdir(parents=True)
    data = content(step)
    with open(hidden / "model.onnx", "wb") as file:
        for start in range(0, len(data), 65536):
            file.write(data[start : start + 65536])
    (hidden / "outcome.json").write_text(to_json(outcome))
    os.rename(hidden, places.made(step.key))
    with open(places.output / "ran.txt", "a") as file:
        file.write(f"{step.key}\n")
    publish(step, places)
    return outcome


def publish(step: Step, places: Places) -> None:
    """Put the file where its job wants it, whole."""
    if step.kind != "quantize":
        return
    made = places.made(step.key) / "model.onnx"
    for job in step.jobs:
        target = Path(job.output)
        if target.exists() and target.read_bytes() == made.read_bytes():
            continue
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        temporary.write_bytes(made.read_bytes())
        os.replace(temporary, target)


def _refuse(step: Step, places: Places, tell: Tell, threads: int) -> None:
    raise ModelError(f"'{step.title}' is no model: give another")


def _fail(step: Step, places: Places, tell: Tell, threads: int) -> None:
    raise KeyError("no such thing")


def _segfault(step: Step, places: Places, tell: Tell, threads: int) -> None:
    ctypes.string_at(0)


def _suicide(step: Step, places: Places, tell: Tell, threads: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(step: Step, places: Places, tell: Tell, threads: int) -> None:
    os._exit(3)


def _eat(step: Step, places: Places, tell: Tell, threads: int) -> None:
    held = []
    while True:  # 20 MB each 20 ms, touched
        held.append(bytearray(os.urandom(1024)) * 20_000)
        time.sleep(0.02)


def _mark(path: Path, pid: int) -> None:
    """Write the process id atomically: a test reads the file as soon as it exists."""
    written = path.with_name(f"{path.name}.{pid}")
    written.write_text(str(pid))
    written.replace(path)


def _eat_in_child(step: Step, places: Places, tell: Tell, threads: int) -> None:
    """The memory is a grandchild's, which says who it is."""
    script = "import time; x = b'x' * 300_000_000; time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", script])
    _mark(places.output / "grandchild.txt", child.pid)
    child.wait()


def _hang(step: Step, places: Places, tell: Tell, threads: int) -> None:
    _mark(places.output / f"{step.title}.pid", os.getpid())
    time.sleep(60)


def _hang_deaf(step: Step, places: Places, tell: Tell, threads: int) -> None:
    """Holds Python's lock: no thread of this process runs any more."""
    _mark(places.output / f"{step.title}.pid", os.getpid())
    ctypes.PyDLL(None).sleep(60)


def _hang_after(step: Step, places: Places, tell: Tell, threads: int) -> None:
    """Dies between the rename and the word to the parent."""
    make(step, places, {})
    os.kill(os.getpid(), signal.SIGKILL)


def _die_before_publishing(step: Step, places: Places, tell: Tell, threads: int) -> None:
    make(step, places, {})
    Path(step.jobs[0].output).unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def _once(step: Step, places: Places, tell: Tell, threads: int) -> None:
    """Crashes the first time."""
    mark = places.output / f"{step.title}.tried"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGSEGV)


def _look(step: Step, places: Places, tell: Tell, threads: int) -> Outcome:
    """What the process finds around itself."""
    print("said on stdout")
    print("said on stderr", file=sys.stderr)
    import tempfile

    from sbonnx.system.cpu import cores

    temporary = Path(tempfile.gettempdir())
    (temporary / "left").write_text("behind")
    report = {
        "threads": threads,
        "cores": cores(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "mark": os.environ.get("MARK_OF_THE_TEST", ""),
        "temporary": str(temporary),
        "group": os.getpgrp() == os.getpid(),
        "main": str(getattr(sys.modules["__main__"], "__file__", "")),
        "stdin": sys.stdin.read() if sys.stdin else "",
    }
    return Outcome(step.key, "done", report=report)


def _slow(step: Step, places: Places, tell: Tell, threads: int) -> None:
    for done in range(10):
        tell("counting", done, 10)
        time.sleep(0.02)


def _sleep(step: Step, places: Places, tell: Tell, threads: int) -> None:
    time.sleep(float(step.title.split("-")[1]))


ODD = b'o{"key":"k","status":"done","accepted":[{}]}\n'
"""Nearly an outcome."""


def _scribble(step: Step, places: Places, tell: Tell, threads: int) -> None:
    """Writes to every open file."""
    for number in range(3, 256):
        for text in (b"scribble", b"o{}\n", ODD, b't["\\ud800", "x", []]\n', b't["stage", Infinity, 1]\nohno'):
            with contextlib.suppress(OSError):
                os.write(number, text)


def _flood(step: Step, places: Places, tell: Tell, threads: int) -> None:
    """Writes to every open file without end."""
    while True:
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(number, b"x" * 65536)


def _surrogate(step: Step, places: Places, tell: Tell, threads: int) -> None:
    """Raises what cannot be encoded."""
    raise ValueError("half a pair: \ud800")


def _threads(step: Step, places: Places, tell: Tell, threads: int) -> Outcome:
    """Counts the threads of the process that it was forked from."""
    return Outcome(step.key, "done", counters={"threads": len(os.listdir(f"/proc/{os.getppid()}/task"))})


def _import(step: Step, places: Places, tell: Tell, threads: int) -> Outcome:
    """Imports modules that nothing has imported yet."""
    import queue
    import select

    return Outcome(step.key, "done", report={"files": [str(queue.__file__), str(getattr(select, "__file__", ""))]})


DO: dict[str, Any] = {
    "refuse": _refuse,
    "fail": _fail,
    "segfault": _segfault,
    "suicide": _suicide,
    "leave": _leave,
    "eat": _eat,
    "eat_in_child": _eat_in_child,
    "hang": _hang,
    "hang_deaf": _hang_deaf,
    "hang_after": _hang_after,
    "unpublished": _die_before_publishing,
    "once": _once,
    "look": _look,
    "slow": _slow,
    "sleep": _sleep,
    "scribble": _scribble,
    "flood": _flood,
    "surrogate": _surrogate,
    "threads": _threads,
    "import": _import,
}


class Begun(Watch):
    """A watch that keeps the titles of what was begun."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.settled = 0
        self.closed = 0

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        """See `Watch`."""
        self.settled = len(settled)

    def started(self, step: Step, attempt: int, where: str) -> None:
        """See `Watch`."""
        self.titles.append(step.title)

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        """See `Watch`."""

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        """See `Watch`."""

    def close(self) -> None:
        """See `Watch`."""
        self.closed += 1


def statuses(report: BatchReport) -> dict[str, str]:
    """How each job has ended, by name."""
    return {row.job.name: row.outcome.status for row in report.rows}
