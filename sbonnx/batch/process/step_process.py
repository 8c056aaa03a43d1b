"""Execution of a step in a separate process, so that a crash, hang or memory overflow affects only that step."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psutil

from sbonnx.batch.jobs.job import Outcome, Places, Status, Step, Tell, encodable
from sbonnx.batch.outcomes import from_json, now
from sbonnx.batch.process.cleanup import remove, remove_empty, scratch_root
from sbonnx.batch.process.starting import environment, started
from sbonnx.batch.process.step_main import Errand, Publish, Work, own_publish
from sbonnx.system.sizes import size_text

LOOK_EVERY: Final = 0.1
"""Seconds between two memory measurements."""

KIN_EVERY: Final = 1.0
"""Seconds between two scans for child processes of a step, which are few and long-lived."""

GRACE: Final = 10.0
"""Seconds that a process may take to exit after it reported its outcome."""

TOLD: Final = 1 << 16
"""Bytes per read from a process."""

READS: Final = 64
"""Maximum reads at a time, so that a process that writes endlessly does not block the batch."""

LONGEST: Final = 1 << 26
"""Maximum bytes of a line. A report of ten thousand layers has a tenth of that."""


class StepProcess:
    """A step running in a process, monitored by calling `look` about every `LOOK_EVERY` seconds.

        process = StepProcess(step, places, threads=2)
        while process.outcome is None:
            wait(process.sources(), timeout=LOOK_EVERY)
            process.look(tell)

    Args:
        threads: number of threads that it may use.
        cpus: the processors that it may use; None: any.
        work, publish: functions that run the step and publish its output; see `step_main.Errand`.
        attempt: number of this attempt, from 1.
        method: start method of processes; None: forkserver if available.

    Attributes:
        outcome: None while the step runs.
        memory, peak: current and peak resident memory of its processes in bytes.
        pid: PID of its process.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        step: Step,
        places: Places,
        *,
        threads: int = 1,
        cpus: Sequence[int] | None = None,
        work: Work | None = None,
        publish: Publish | None = None,
        attempt: int = 1,
        method: str | None = None,
    ) -> None:
        self.step = step
        self.places = places
        self.attempt = attempt
        self.cpus = tuple(cpus or ())
        self.outcome: Outcome | None = None
        self.memory = self.peak = 0
        self._publish = publish
        self._said: Outcome | None = None
        self._said_at = 0.0
        self._killed: tuple[Status, str] | None = None
        self._unread = bytearray()
        self._kin: list[psutil.Process] = []
        self._looked = self._kin_looked = 0.0
        self._oom_kills = _oom_kills()
        root = scratch_root(places)
        source, sink = multiprocessing.Pipe(duplex=False)
        alive, self._alive = multiprocessing.Pipe(duplex=False)
        errand = Errand(
            step=step,
            places=places,
            threads=threads,
            cpus=self.cpus,
            work=work,
            publish=publish,
            scratch=None if root is None else str(root),
            environment=environment(),
            again=attempt > 1,
        )
        try:
            self._process = started(errand, sink, alive, method)
        except BaseException:
            source.close()
            self._alive.close()
            raise
        finally:  # close our copies of the child's ends, so that the pipe ends when the child dies
            sink.close()
            alive.close()
        self._pipe: Connection = source
        if sys.platform != "win32":
            os.set_blocking(source.fileno(), False)
        self._began = time.monotonic()  # after the start: the first process waits for the fork server
        self.pid = int(self._process.pid or 0)
        self._scratch = None if root is None else root / f"{step.key}.{self.pid}"
        with contextlib.suppress(psutil.Error):
            self._kin = [psutil.Process(self.pid)]

    def sources(self) -> list[Any]:
        """Return the objects to wait for: the pipe and the sentinel of the process."""
        return [self._process.sentinel] if self._pipe.closed else [self._pipe, self._process.sentinel]

    def look(self, tell: Tell | None = None) -> None:
        """Process messages, enforce the limits, and check whether the process has ended."""
        if self.outcome is not None:
            return
        self._read(tell)
        ended = self._process.exitcode is not None
        if not ended:
            self._measure()
            self._limit()
            return
        self._read(tell)
        self.outcome = self._concluded()
        self._release()

    def kill(self, status: Status = "crashed", reason: str = "it was terminated with the batch") -> None:
        """Kill the process and its child processes."""
        if self.outcome is None and self._killed is None:
            self._killed = (status, reason)
            self._end_all()

    def end(self) -> Outcome:
        """Kill the process, wait until nothing of it runs, and return its outcome."""
        self.kill()
        while self.outcome is None:
            multiprocessing.connection.wait([self._process.sentinel], timeout=1.0)
            self.look()
        return self.outcome

    def _read(self, tell: Tell | None) -> None:
        seen = len(self._unread)
        for _ in range(READS):
            if self._pipe.closed:
                break
            got = self._received()
            if got is None:
                break
            if not got:
                self._pipe.close()
                break
            self._unread += got
        end = self._unread.rfind(b"\n", seen) + 1
        lines = bytes(self._unread[:end]).split(b"\n")
        del self._unread[:end]
        for line in lines:  # complete lines only: a line cut off by a kill is ignored
            self._hear(line, tell)
        if len(self._unread) > LONGEST:
            self.kill("crashed", f"it wrote more than {size_text(LONGEST)} without a line break to sbonnx's own pipe")

    def _received(self) -> bytes | None:
        """Read what the pipe has; None if it has nothing now, b"" at its end."""
        if sys.platform == "win32":
            try:
                return self._pipe.recv_bytes() if self._pipe.poll() else None
            except (EOFError, OSError):
                return b""
        try:
            return os.read(self._pipe.fileno(), TOLD)
        except BlockingIOError:
            return None

    def _hear(self, line: bytes, tell: Tell | None) -> None:
        """Handle a line. Invalid lines are ignored, because the code of a metric can write anything to the pipe."""
        try:
            if line.startswith(b"o"):
                self._said, self._said_at = from_json(line[1:]), time.monotonic()
                return
            stage, done, total = json.loads(line[1:]) if line.startswith(b"t") else ("", 0, None)
            count, whole = int(done), None if total is None else int(total)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            return
        if stage and tell is not None:
            tell(encodable(str(stage)), count, whole)

    def _measure(self) -> None:
        at = time.monotonic()
        if at - self._looked < LOOK_EVERY:
            return
        self._looked = at
        if at - self._kin_looked >= KIN_EVERY and self._kin:
            self._kin_looked = at
            with contextlib.suppress(psutil.Error):
                self._kin = [self._kin[0], *self._kin[0].children(recursive=True)]
        total = 0
        for process in self._kin:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        self.memory = total
        self.peak = max(self.peak, total)

    def _limit(self) -> None:
        limits = self.step.limits
        if self._said is not None:
            if time.monotonic() - self._said_at > GRACE:
                self._end_all()
        elif limits.memory is not None and self.memory > limits.memory:
            self.kill(
                "out of memory",
                f"it used {size_text(self.memory)} of memory, more than its limit of {size_text(limits.memory)}",
            )
        elif limits.seconds is not None and time.monotonic() - self._began > limits.seconds:
            self.kill("timed out", f"it ran longer than its limit of {limits.seconds:g} s")

    def _end_all(self) -> None:
        """Kill the process, its group, and child processes that left the group."""
        for process in self._kin[1:]:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil checks that the PID was not reused
        if hasattr(os, "killpg") and self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError, AttributeError):  # the process may not have its own group yet
            self._process.kill()

    def _concluded(self) -> Outcome:
        said = self._said or self._adopted()
        if said is None:
            status, reason = self._killed or _cause(self._process.exitcode or 0, self._oom_kills, self.peak)
            said = Outcome(self.step.key, status, reason=reason)
        return replace(
            said,
            key=self.step.key,
            seconds=time.monotonic() - self._began,
            peak_bytes=max(self.peak, said.peak_bytes),
            attempts=self.attempt,
            finished=now(),
        )

    def _adopted(self) -> Outcome | None:
        """Return the output that the process completed before it died, if any."""
        from sbonnx.batch.outcomes import made_before

        outcome = made_before(self.step, self.places)
        if outcome is None or self._killed is not None:
            return None
        if self.step.kind == "quantize":
            try:
                (self._publish or own_publish())(self.step, self.places)
            except Exception:  # the next attempt finds the output, and reports why it cannot be published
                return None
        return outcome

    def _release(self) -> None:
        self._end_all()  # child processes may outlive it
        self._pipe.close()
        self._alive.close()
        self._process.join()
        self._process.close()
        if self._scratch is not None:
            remove(self._scratch)
            remove_empty(self._scratch.parent)
        log = self.places.log(self.step.key)
        with contextlib.suppress(OSError):
            if log.stat().st_size == 0:
                log.unlink()


def run_isolated(process: StepProcess, tell: Tell, stopped: Callable[[], bool] | None = None) -> Outcome:
    """Wait for the end of one attempt at a step, with the limits of the step.

    Args:
        tell: receives progress.
        stopped: called about ten times per second; if it returns True, the process is killed.
    """
    try:
        while process.outcome is None:
            multiprocessing.connection.wait(process.sources(), timeout=LOOK_EVERY)
            process.look(tell)
            if stopped is not None and stopped():
                return process.end()
        return process.outcome
    except BaseException:
        process.end()
        raise


def _cause(code: int, oom_kills: int | None, peak: int) -> tuple[Status, str]:
    if code >= 0:
        return "crashed", f"its process ended without a result (exit code {code})"
    name = {number.value: number.name for number in signal.Signals}.get(-code, "unknown")
    if -code == getattr(signal, "SIGKILL", 9) and oom_kills is not None and (_oom_kills() or 0) > oom_kills:
        return "out of memory", f"the system killed it because memory ran out; it used {size_text(peak)} before"
    return "crashed", f"its process was killed by signal {-code} ({name})"


def _oom_kills() -> int | None:
    """Return the number of processes that the Linux OOM killer has ended; None if unknown.

    Read from /proc/vmstat (since 4.13). It counts the whole machine, also inside a container.
    """
    try:
        with Path("/proc/vmstat").open() as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    except OSError:
        return None
