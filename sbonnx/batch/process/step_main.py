"""Main function of a step's process: it ends with its parent, locks the step, runs it and reports the outcome.

Messages go over a pipe, one per line: ``t["stage", done, total]`` and finally ``o{outcome}``. A line cut off by a kill
has no line break, and is ignored. Each message also begins with a line break, because the code of a metric may have
written to the same pipe.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
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
from sbonnx.batch.outcomes import outcome_of, to_json
from sbonnx.batch.process.cleanup import clear, remove
from sbonnx.batch.process.locks import lock_path, take_when_free
from sbonnx.calib.engine.threads import limit_threads
from sbonnx.errors import SbonnxError
from sbonnx.system.isolation import leave_safe_start
from sbonnx.system.terminal import escaped

if sys.platform != "win32":
    import fcntl

Work = Callable[[Step, Places, Tell, int], Outcome]
"""Runs a step. Its output, including the outcome, appears as `Places.made` by an atomic rename."""

Publish = Callable[[Step, Places], object]
"""Copies a step's output to the output paths of its jobs; up-to-date files are not touched."""

TOLD_EVERY: Final = 0.1
"""Minimum seconds between two messages about the same stage."""

POOLS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Environment variables with the thread count of libraries that are loaded later."""

TRIES: Final = 100
"""Maximum attempts to create a folder whose parent another process may be removing."""

PR_SET_PDEATHSIG: Final = 1
"""Option of prctl(2), Linux."""


@dataclass(frozen=True)
class Errand:
    """Task of a step's process.

    Attributes:
        step, places, threads: arguments of `work`.
        cpus: the processors to run on; empty: any.
        work, publish: None: sbonnx's own.
        scratch: parent of the folder for temporary files; None: the system's folder for temporary files.
        environment: environment of the caller, because the fork server was started earlier.
        again: whether an earlier attempt already wrote to the log.
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
    """Run the task. `sink`: pipe for messages; `alive`: pipe that ends with the parent."""
    _end_with_parent(alive)
    _redirect_streams(errand)
    _close_others(sink.fileno(), alive.fileno())
    _set_environment(errand)
    send = _MessagePipe(sink)
    key, places = errand.step.key, errand.places
    # the lock is never closed, so that it is held until the process has ended
    take_when_free(lock_path(places, key), send)
    try:
        outcome = _adopted(errand)
        if outcome is None:
            clear(places, key)  # incomplete or damaged output; safe while the lock is held
            outcome = (errand.work or own_work())(errand.step, places, send, errand.threads)
    except BaseException as error:
        if not isinstance(error, SbonnxError):
            print(escaped(traceback.format_exc(), keep="\n"), file=sys.stderr)
        outcome = outcome_of(key, error)
    send.outcome(outcome)
    if errand.scratch is not None:
        remove(Path(tempfile.gettempdir()))


def own_work() -> Work:
    """Return sbonnx's own work function. Imported on demand, because custom steps do not need it."""
    from sbonnx.batch.work import run_step

    return run_step


def own_publish() -> Callable[..., object]:
    """Return sbonnx's own publish function; see `own_work`."""
    from sbonnx.batch.jobs.outputs import publish

    return publish


def _adopted(errand: Errand) -> Outcome | None:
    """Publish and return the output that another process created before this one got the lock, if any."""
    from sbonnx.batch.outcomes import made_before

    outcome = made_before(errand.step, errand.places)
    if outcome is not None and errand.step.kind == "quantize":
        (errand.publish or own_publish())(errand.step, errand.places)
    return outcome


class _MessagePipe:
    """Writes messages to the pipe. Thread-safe."""

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
        """Write the outcome, the last message."""
        with self._lock:
            self._write("o" + to_json(outcome))

    def _write(self, line: str) -> None:
        rest = memoryview(b"\n" + line.encode() + b"\n")
        try:
            if sys.platform == "win32":  # a pipe has a handle there, which os.write does not take
                self._sink.send_bytes(rest)
                return
            while rest:
                rest = rest[os.write(self._sink.fileno(), rest) :]
        except BrokenPipeError:  # the parent is gone
            _end()


def _end() -> None:
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _end_with_parent(alive: Connection) -> None:
    """Create a process group that is killed when the parent dies, whatever its threads are doing.

    Ctrl-C on the terminal reaches only the parent. Three mechanisms are used, because each fails on some system: Linux
    sends SIGKILL to the group when the write end of an unused pipe is closed (fcntl(2), F_SETSIG), and to this process
    when the fork server dies (prctl(2)); on all systems a thread waits for the end of the pipe. Without a fork server
    there is no prctl: Linux sends that signal when the thread dies that started this process, which in a parent with
    threads is before its pipes are closed, so this process would end first and leave its children behind.
    """
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            os.setsid()
    if sys.platform == "linux":
        fd = alive.fileno()
        parent = multiprocessing.parent_process()
        if parent is None or parent.pid != os.getppid():  # the fork server started this process
            with contextlib.suppress(OSError, AttributeError):
                import ctypes

                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(fd, fcntl.F_SETSIG, int(signal.SIGKILL))
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        with contextlib.suppress(OSError):  # the OOM killer should prefer this process to the parent
            Path("/proc/self/oom_score_adj").write_text("500")

    def wait() -> None:
        with contextlib.suppress(EOFError, OSError):
            alive.recv_bytes()
        _end()

    threading.Thread(target=wait, daemon=True, name="until the parent ends").start()


def _redirect_streams(errand: Errand) -> None:
    """Redirect stdin to /dev/null, stdout and stderr to the log, including stack traces of native crashes."""
    log = errand.places.log(errand.step.key)
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if errand.again else os.O_TRUNC)
    empty, written = os.open(os.devnull, os.O_RDONLY), os.open(log, flags, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    sys.stdin = os.fdopen(0, closefd=False)  # that of multiprocessing uses another descriptor
    os.dup2(empty, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.close(empty)
    os.close(written)
    faulthandler.enable(file=2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _close_others(*kept: int) -> None:
    """Close all open files except the standard streams and `kept`.

    multiprocessing passes on pipes of the fork server and of the resource tracker. Both processes would end with a
    traceback if anything were written to them.
    """
    from multiprocessing import forkserver, resource_tracker

    tracker: Any = getattr(resource_tracker, "_resource_tracker", None)
    server: Any = getattr(forkserver, "_forkserver", None)
    for owner, names in ((tracker, ("_fd", "_pid")), (server, ("_forkserver_alive_fd", "_inherited_fds"))):
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, None)  # both are restarted on demand
    with contextlib.suppress(OSError):  # no /dev/fd on this system
        for name in os.listdir("/dev/fd"):
            if int(name) > 2 and int(name) not in kept:
                with contextlib.suppress(OSError):
                    os.close(int(name))


def _set_environment(errand: Errand) -> None:
    """Apply the caller's environment, the processors and thread count of the step, and its temporary folder."""
    os.environ.clear()
    os.environ.update(errand.environment)
    leave_safe_start()
    os.environ.update(dict.fromkeys(POOLS, str(errand.threads)))
    if errand.cpus and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a processor was removed in the meantime
            os.sched_setaffinity(0, errand.cpus)
    limit_threads(errand.threads)
    if errand.scratch is not None:
        folder = Path(errand.scratch) / f"{errand.step.key}.{os.getpid()}"
        for _ in range(TRIES):  # a process that ends may remove the parent folder at any time
            with contextlib.suppress(FileNotFoundError):
                folder.parent.mkdir(mode=0o700, exist_ok=True)
                folder.mkdir(mode=0o700, exist_ok=True)
                break
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = str(folder)
