"""Worker process: opens sessions, runs samples through them, returns sketches.

Started by `sbonnx.calib.workers.shards`. Imports neither onnx nor the graph code, which would double the start time.
"""

from __future__ import annotations

import os
import select
import threading
import traceback
from collections.abc import Mapping
from queue import SimpleQueue
from typing import IO, Any, Final

from sbonnx.calib.data.sample import Unit
from sbonnx.calib.engine.sample_runner import Lane, last_reads, through
from sbonnx.calib.engine.session import CPU, Session
from sbonnx.calib.workers.protocol import Job, Parcel, TrayReader, load, receive, send
from sbonnx.errors import NumericError

LOOK_EVERY: Final = 2.0
"""Seconds between checks whether the parent process is alive, in case another process holds the pipe open."""


class Worker:
    """One worker.

    Args:
        inbox, outbox: pipes from and to the parent.
        models: file of the models.
        trays: files of the trays.
        parent: process id of the parent.
    """

    def __init__(self, inbox: IO[bytes], outbox: IO[bytes], models: int, trays: list[int], parent: int) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._models = models
        self._trays = [TrayReader(fd) for fd in trays]
        self._parent = parent
        self._lock = threading.Lock()  # of the outbox
        self._waiting: SimpleQueue[tuple[int, Unit]] = SimpleQueue()

    def serve(self) -> None:
        """Process messages of the parent until it ends or closes the pipe."""
        job = self._next()[0]
        try:
            self._open(job)
        except Exception:  # any error: the parent reports it to the user
            self._say("failed", traceback.format_exc())
            return
        lanes = [Lane(job.wishes) for _ in range(job.threads)]
        for lane in lanes:
            threading.Thread(target=self._run, args=(lane,), daemon=True).start()
        self._say("ready")
        while True:
            kind, *rest = self._next()
            if kind == "run":
                self._take(*rest)
            else:
                self._say("sketches", _gathered(lanes))

    def _open(self, job: Job) -> None:
        self._pieces = job.pieces
        self._last = last_reads(job.pieces)
        self._sessions = [
            None if stored is None else Session(load(stored, self._models), [CPU], threads=1, name=piece.name)
            for stored, piece in zip(job.models, job.pieces, strict=True)
        ]
        os.close(self._models)

    def _next(self) -> tuple[Any, ...]:
        """Wait for the next message; ends the process, with all its threads, if the parent has ended."""
        while not select.select([self._inbox], [], [], LOOK_EVERY)[0]:
            if os.getppid() != self._parent:
                os._exit(1)
        message = receive(self._inbox)
        if message is None:
            os._exit(0)
        return message

    def _take(self, number: int, tray: int, parcel: Parcel, index: int, where: str, samples: int) -> None:
        """Queue a sample."""
        self._waiting.put((number, Unit(index, where, self._trays[tray].take(parcel), samples)))

    def _run(self, lane: Lane) -> None:
        """Run samples through the pieces, one after the other."""
        while True:
            number, unit = self._waiting.get()
            try:
                through(lane, self._pieces, self._sessions, self._last, unit, _blame)
            except Exception as error:  # any error: the parent runs the sample again for details
                self._say("bad", number, f"{type(error).__name__}: {error}")
            else:
                self._say("done", number)

    def _say(self, *message: Any) -> None:
        """Send a message; ends the process if the parent has ended."""
        try:
            with self._lock:
                send(self._outbox, message)
        except BrokenPipeError:
            os._exit(0)


def _blame(number: int, tensor: str, known: Mapping[str, Any], unit: Unit) -> Exception:
    """Return a short error for a non-finite tensor; the parent runs the sample again for details."""
    return NumericError(f"'{tensor}' holds NaN or infinite values at {unit.where}")


def _gathered(lanes: list[Lane]) -> list[tuple[Any, dict[str, Any]]]:
    """Merge the sketches of all lanes to (key, arrays), and reset the lanes."""
    for lane in lanes:
        lane.settle()
    first, *others = lanes
    for other in others:
        for key, sketch in other.sketches.items():
            first.sketches[key].merge(sketch)
    found = [(key, sketch.to_arrays()) for key, sketch in first.sketches.items()]
    for lane in lanes:
        lane.forget()
    return found


def main(inbox: int, outbox: int, models: int, trays: list[int], parent: int) -> None:
    """Run a worker over inherited files. Never returns: threads may be in the middle of a sample."""
    with os.fdopen(inbox, "rb", buffering=0) as source, os.fdopen(outbox, "wb", buffering=0) as target:
        Worker(source, target, models, trays, parent).serve()
    os._exit(0)
