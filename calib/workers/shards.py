"""Calibration in several processes: each observes some of the samples, and their sketches are merged.

The main process iterates over the data, of any kind, and runs samples as well; the others run
`sbonnx.calib.workers.worker_main` in new interpreters, so neither a fork of a process with threads nor the user's main
module is involved. Samples are handed out one by one to the process with the least load. A worker needs 0.2 to 0.4 s of
one core to start: the main process uses all its threads until then, and starts no workers if the remaining data do not
take much longer than that.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count as counting
from queue import SimpleQueue
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Final

from sbonnx.calib.data.sample import Unit
from sbonnx.calib.engine.observation import Observation
from sbonnx.calib.engine.session import CPU
from sbonnx.calib.sketches import Sketch
from sbonnx.calib.storage.spill_file import spill_folder
from sbonnx.calib.workers.protocol import Job, WorkerPiece, store
from sbonnx.calib.workers.worker_handle import Remote
from sbonnx.errors import DeviceError, SbonnxError

PATIENCE: Final = 10.0
"""Minimum seconds of remaining work for which workers are started.

On few cores threads are as fast, and a start takes 0.1 to 0.2 s of the total on two cores.
"""

SOUND: Final = 0.2
"""Warm-up in seconds before the throughput is estimated."""

AHEAD: Final = 8
"""Maximum samples in flight or done ahead of the next sample in order, per thread."""


def one_process(workers: int, granularity: str, provider: str) -> str | None:
    """Return why calibration runs in one process although more were requested; None if it does not."""
    if workers < 2:
        return None
    if provider != CPU:
        return f"workers={workers} was not heeded: one process feeds a GPU"
    if granularity == "layer":
        return f"workers={workers} was not heeded: layer by layer, one process works on one store of activations"
    if sys.platform == "win32":
        return f"workers={workers} was not heeded: Windows hands no open files to a new process"
    return None


@dataclass(frozen=True)
class _Outcome:
    """Outcome of a sample.

    Attributes:
        error: exception raised in this process.
        unit: the sample, if a worker failed on it.
        said: message of the worker.
    """

    error: Exception | None = None
    unit: Unit | None = None
    said: str = ""


class Shards:
    """Runs samples through the segments of an observation in several processes.

        with Shards(observation, 4, count=data.count) as shards:
            for unit, _ in shards.stream(units):
                ...

    Args:
        observation: receives all statistics at the end of each stream; on CPU.
        workers: processes, this one included. The threads of the observation are divided among them, at least one each.
        count: number of feeds, if known.
        patience: see `PATIENCE`; with 0 the workers are started immediately.

    Attributes:
        wanted: number of other processes to use.
        remotes: those that were started.
    """

    def __init__(
        self, observation: Observation, workers: int, *, count: int | None = None, patience: float = PATIENCE
    ) -> None:
        self.remotes: list[Remote] = []
        self._observation = observation
        self.wanted = workers - 1
        self._share = max(1, observation.threads // workers)
        self._window = AHEAD * (observation.threads + self.wanted * self._share)
        self._count = count
        self._patience = patience
        self._numbers = counting()
        self._spent, self._feeds = 0.0, 0  # seconds and feeds so far
        self._starter: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._waiting: SimpleQueue[tuple[int, Unit] | None] = SimpleQueue()  # for the threads of this process
        self._change = threading.Condition()  # guards the following attributes
        self._room = observation.threads  # number of threads of this process that are to work
        self._busy = 0  # samples in these threads
        self._outcomes: dict[int, _Outcome] = {}
        self._closing = False
        self._broken: Exception | None = None  # error that prevented the start of workers

    @property
    def joined(self) -> int:
        """Number of other processes that run samples now."""
        return sum(remote.ready for remote in self.remotes)

    def stream(self, units: Iterator[Unit]) -> Iterator[tuple[Unit, dict[str, Any]]]:
        """Run samples as `Observation.stream`; units are yielded without their feeds. May be called again.

        Raises:
            DeviceError: a worker cannot start, or was terminated; its samples are named.
            the exceptions of `Observation.stream`, for the first failing sample in the order of the data.
        """
        work = self._observation.work()
        self._employ(work)
        pending: deque[tuple[int, Unit]] = deque()
        began = time.monotonic()
        self._start_if_worth(0.0)
        for unit in units:
            self._start_if_worth(time.monotonic() - began)
            while pending and (outcome := self._outcome(pending[0][0], wait=len(pending) >= self._window)):
                yield self._settled(outcome, pending.popleft()[1], work), {}
            number = next(self._numbers)
            self._hand_out(number, unit)
            pending.append((number, replace(unit, feed={})))
        while pending and (outcome := self._outcome(pending[0][0], wait=True)):
            yield self._settled(outcome, pending.popleft()[1], work), {}
        self._gather()
        self._spent += time.monotonic() - began

    def close(self) -> None:
        """Stop the other processes. Idempotent."""
        with self._change:
            self._closing = True
        if self._starter is not None:
            self._starter.join()
        for remote in self.remotes:
            remote.close()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- this process -------------------------------------------------------------------------------

    def _employ(self, work: Callable[[Unit], Any]) -> None:
        """Start the threads of this process."""
        if not self._threads:
            self._threads = [self._thread(self._work, work) for _ in range(self._room)]

    def _work(self, work: Callable[[Unit], Any]) -> None:
        """Run samples from the queue until it ends."""
        while (item := self._waiting.get()) is not None:
            error = None
            try:
                if not self._closing:
                    work(item[1])
            except Exception as caught:  # raised in the order of the samples
                error = caught
            with self._change:
                self._busy -= 1
                self._outcomes[item[0]] = _Outcome(error)
                self._change.notify_all()
            del item  # otherwise the feed would stay alive until the next one

    def _hand_out(self, number: int, unit: Unit) -> None:
        """Give a sample to the thread or process with the least load, as soon as one has room."""
        with self._change:
            while True:
                self._check()
                remotes = [remote for remote in self.remotes if remote.has_room]
                if remotes or self._busy < 2 * self._room:
                    break
                self._change.wait()
            chosen = min(remotes, key=_load, default=None)
            if chosen is not None and (self._busy >= 2 * self._room or _load(chosen) <= self._busy / self._room):
                chosen.promise(number, unit)
            else:
                chosen = None
                self._busy += 1
        if chosen is None:
            self._waiting.put((number, unit))
        else:
            chosen.give(number, unit)

    def _outcome(self, number: int, *, wait: bool) -> _Outcome | None:
        """Return the outcome of a sample, or None if it is unknown; with `wait`, block until it is known."""
        with self._change:
            while True:
                self._check()
                if number in self._outcomes or not wait:
                    return self._outcomes.pop(number, None)
                self._change.wait()

    def _settled(self, outcome: _Outcome, unit: Unit, work: Callable[[Unit], Any]) -> Unit:
        """Count a completed sample and return it, or raise its error."""
        if outcome.error is not None:
            raise outcome.error
        if outcome.unit is not None:
            work(outcome.unit)  # raises the same error with more details of the graph
            raise DeviceError(
                f"a calibration worker failed on {outcome.unit.where}, where this process does not: {outcome.said}; "
                "use workers=1"
            )
        self._observation.samples += unit.samples
        self._feeds += unit.closes
        return unit

    # --- other processes ----------------------------------------------------------------------------

    def _start_if_worth(self, elapsed: float) -> None:
        """Start the workers if the remaining data are estimated to take long enough."""
        if self._starter is not None or not self.wanted:
            return
        spent = self._spent + elapsed
        left = spent  # the count is unknown: assume as much again
        if self._count is not None:
            known = self._feeds and spent >= SOUND
            left = spent / self._feeds * (self._count - self._feeds) if known else 0.0
        if left >= self._patience:
            self._starter = self._thread(self._start)

    def _start(self) -> None:
        """Start the workers. The models are in an anonymous file until all workers have read it."""
        try:
            observation = self._observation
            with TemporaryFile(prefix="sbonnx-", dir=spill_folder(), buffering=0) as models:
                pieces = tuple(
                    WorkerPiece(s.outputs, s.observed, s.conditions, s.reads, f"the model{s.scope and ' in '}{s.scope}")
                    for s in observation.segments
                )
                job = Job(pieces, store(observation.models(), models), dict(observation.wishes), self._share)
                for _ in range(self.wanted):
                    with self._change:
                        if self._closing:
                            return
                    remote = Remote(models, self._share)
                    self.remotes.append(remote)
                    remote.begin(job)
                    self._thread(self._listen, remote)
        except (SbonnxError, OSError) as error:
            with self._change:
                self._broken = error
                self._change.notify_all()

    def _listen(self, remote: Remote) -> None:
        """Process the messages of a worker."""
        for kind, *rest in remote.answers():
            with self._change:
                if kind == "ready":
                    self._make_way(remote)
                elif kind == "failed":
                    remote.complaint = rest[0].strip().splitlines()[-1]
                elif kind == "sketches":
                    remote.sketches = rest[0]
                else:
                    unit = remote.take_back(rest[0])
                    self._outcomes[rest[0]] = _Outcome() if kind == "done" else _Outcome(unit=unit, said=rest[1])
                self._change.notify_all()
        with self._change:
            remote.gone = True
            self._change.notify_all()

    def _make_way(self, remote: Remote) -> None:
        """Register a worker, and stop as many threads of this process as it has."""
        remote.ready = True
        leave = min(self._share, self._room - 1)
        self._room -= leave
        for _ in range(leave):
            self._waiting.put(None)

    def _check(self) -> None:
        """Raise DeviceError if a worker could not start or ended early."""
        if self._broken is not None:
            raise DeviceError(f"no calibration workers can be started ({self._broken}): use workers=1")
        for remote in self.remotes:
            if remote.complaint:
                raise DeviceError(f"a calibration worker cannot start ({remote.complaint}): use workers=1")
            if remote.gone:
                where = [unit.where for unit in remote.under_way.values()]
                at = f"at {' or '.join(where)}" if where else "between two samples"
                raise DeviceError(f"a calibration worker {remote.ending()} {at}: use fewer workers, or workers=1")

    def _gather(self) -> None:
        """Merge the sketches of the workers."""
        with self._change:
            asked = [remote for remote in self.remotes if remote.ready]
        for remote in asked:
            remote.ask()
        for remote in asked:
            with self._change:
                while remote.sketches is None:
                    self._check()
                    self._change.wait()
                found, remote.sketches = remote.sketches, None
            self._observation.add({key: Sketch.from_arrays(arrays) for key, arrays in found}, samples=0)

    def _thread(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name="sbonnx-calib", daemon=True)
        thread.start()
        return thread


def _load(remote: Remote) -> float:
    """Return the number of samples of a worker per thread."""
    return len(remote.under_way) / remote.threads
