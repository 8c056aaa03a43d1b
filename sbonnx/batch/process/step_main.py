"""What runs in the process of a step: it dies with its parent, locks the step, works, and says what became of it.

Everything it says goes over a pipe, a line each: ``t["stage", done, total]`` and at last ``o{outcome}``. A line that a
kill cuts short has no end, and so was not said. Each line begins with a line break: code of a metric may have written
to the same pipe.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from sbonnx.batch.jobs.job import Outcome, Places, Step, Tell
from sbonnx.batch.outcomes import now, to_json
from sbonnx.batch.process.cleanup import clear, remove
from sbonnx.batch.process.locks import lock_path, take
from sbonnx.calib.engine.threads import limit_threads
from sbonnx.errors import SbonnxError
from sbonnx.isolation import leave_safe_start
from sbonnx.terminal import escaped

if sys.platform != "win32":
    import fcntl

Work = Callable[[Step, Places, Tell, int], Outcome]
"""Does a step: what it makes appears as `Places.made`, with its outcome, by a rename."""

Publish = Callable[[Step, Places], object]
"""Puts what a step has made where its jobs want it; what is there already is left alone."""

TOLD_EVERY: Final = 0.1
"""Seconds between two lines about the same stage."""

POOLS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""What libraries that are loaded later ask how many threads they may use."""

TRIES: Final = 100
"""Times that a folder is made anew when another process has removed the one around it."""

PR_SET_PDEATHSIG: Final = 1
"""prctl(2), Linux."""


@dataclass(frozen=True)
class Errand:
    """What a process is sent to do.

    Attributes:
        step, places, threads: for `work`.
        cpus: the processors to run on; none: any.
        work, publish: None: sbonnx's own.
        scratch: folder in which to make one for temporary files; None: the system's.
        environment: of the caller: the server of forks was started earlier.
        again: whether an earlier attempt has begun the log.
    """

    step: Step
    places: Places
    threads: int
    cpus: tuple[int, ...] = ()
    work: Work | None = None
    publish: Publish | None = None
    scratch: str | None = None
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    again: bool = False


def serve(errand: Errand, sink: Connection, alive: Connection) -> None:
    """Do it. `sink`: where to say what becomes of it; `alive`: ends with the parent."""
    _apart(alive)
    _listen_to_nobody(errand)
    _close_others(sink.fileno(), alive.fileno())
    _within(errand)
    say = _Say(sink)
    key, places = errand.step.key, errand.places
    # never closed: it is held until there is nothing left of this process
    if take(lock_path(places, key)) is None:
        say("waiting for another process at the same step")
        take(lock_path(places, key), wait=True)
    try:
        outcome = _adopted(errand) or _done(errand, say)
    except SbonnxError as error:
        outcome = Outcome(key, "refused", reason=str(error), finished=now(), error=type(error).__name__)
    except BaseException as error:
        print(escaped(traceback.format_exc(), keep="\n"), file=sys.stderr)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        outcome = Outcome(key, "failed", reason=reason, finished=now(), error=type(error).__name__)
    say.outcome(outcome)
    if errand.scratch is not None:
        remove(Path(tempfile.gettempdir()))


def own_work() -> Work:
    """sbonnx's own work, imported where it is used: a batch of others' steps needs none of it."""
    from sbonnx.batch.work import run_step

    return run_step


def own_publish() -> Callable[..., object]:
    """sbonnx's own way to publish; see `own_work`."""
    from sbonnx.batch.storage.publish import publish

    return publish


def _adopted(errand: Errand) -> Outcome | None:
    """What another process made of the step before this one had the lock, put in its place."""
    from sbonnx.batch.intact import made_before

    made = made_before(errand.step, errand.places)
    if made is not None and errand.step.kind == "quantize":
        (errand.publish or own_publish())(errand.step, errand.places)
    return made


def _done(errand: Errand, say: Tell) -> Outcome:
    """The step, done. What others left half done, or is damaged, goes first: under the lock nobody else is at it."""
    clear(errand.places, errand.step.key)
    return (errand.work or own_work())(errand.step, errand.places, say, errand.threads)


class _Say:
    """Says things over the pipe; from any thread."""

    def __init__(self, sink: Connection) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._stage = ""
        self._at = 0.0

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        at = time.monotonic()
        with self._lock:
            if stage == self._stage and at - self._at < TOLD_EVERY and done != total:
                return
            self._stage, self._at = stage, at
            self._write("t" + json.dumps([stage, int(done), None if total is None else int(total)]))

    def outcome(self, outcome: Outcome) -> None:
        """The last word."""
        with self._lock:
            self._write("o" + to_json(outcome))

    def _write(self, line: str) -> None:
        rest = memoryview(b"\n" + line.encode() + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._sink.fileno(), rest) :]
        except BrokenPipeError:  # nobody listens: the parent is gone
            _end()


def _end() -> None:
    """End this process and what it has started."""
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _apart(alive: Connection) -> None:
    """A process group of its own, that dies with the parent, whatever its threads are at.

    Ctrl-C on the terminal is for the parent alone. Three ways, since each fails somewhere: Linux sends SIGKILL when
    the writing end of a pipe on which nothing is ever written is closed (fcntl(2), F_SETSIG), and when the server of
    forks dies (prctl(2)); everywhere a thread waits for the end of the pipe.
    """
    with contextlib.suppress(OSError):
        os.setsid()
    fd = alive.fileno()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(fd, fcntl.F_SETSIG, int(signal.SIGKILL))
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        with contextlib.suppress(OSError):  # rather this one than the parent, should the machine run out of memory
            Path("/proc/self/oom_score_adj").write_text("500")

    def wait() -> None:
        os.read(fd, 1)
        _end()

    threading.Thread(target=wait, daemon=True, name="until the parent ends").start()


def _listen_to_nobody(errand: Errand) -> None:
    """Input is empty; what is printed goes to the log, the stacks of a native crash too."""
    log = errand.places.log(errand.step.key)
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if errand.again else os.O_TRUNC)
    empty, written = os.open(os.devnull, os.O_RDONLY), os.open(log, flags, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing's has another number
    os.dup2(empty, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.close(empty)
    os.close(written)
    faulthandler.enable(file=2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _close_others(*kept: int) -> None:
    """Close all open files but the standard streams and `kept`. multiprocessing hands on pipes of the fork server and
    of the resource tracker, both of which end with a traceback when anything is written to them."""
    from multiprocessing import forkserver, resource_tracker

    tracker: Any = getattr(resource_tracker, "_resource_tracker", None)
    server: Any = getattr(forkserver, "_forkserver", None)
    for owner, names in ((tracker, ("_fd", "_pid")), (server, ("_forkserver_alive_fd", "_inherited_fds"))):
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, None)  # each is started again when it is used
    with contextlib.suppress(OSError):  # a system without such a folder
        for name in os.listdir("/dev/fd"):
            if int(name) > 2 and int(name) not in kept:
                with contextlib.suppress(OSError):
                    os.close(int(name))


def _within(errand: Errand) -> None:
    """The caller's environment, the step's share of processors and threads, a place for temporary files."""
    os.environ.clear()
    os.environ.update(errand.environment)
    leave_safe_start()
    os.environ.update(dict.fromkeys(POOLS, str(errand.threads)))
    if errand.cpus and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a processor was taken away meanwhile
            os.sched_setaffinity(0, errand.cpus)
    limit_threads(errand.threads)
    if errand.scratch is not None:
        folder = Path(errand.scratch) / f"{errand.step.key}.{os.getpid()}"
        for _ in range(TRIES):  # who ends last removes the folder around it, perhaps just now
            with contextlib.suppress(FileNotFoundError):
                folder.parent.mkdir(mode=0o700, exist_ok=True)
                folder.mkdir(mode=0o700, exist_ok=True)
                break
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = str(folder)
