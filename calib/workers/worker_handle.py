"""`Remote`: handle of a worker process in the main process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import IO, Any, Final

from sbonnx.calib.data.sample import Unit
from sbonnx.calib.workers.protocol import Job, Tray, receive, send
from sbonnx.errors import DeviceError
from sbonnx.isolation import python_command

ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Disables OpenBLAS threads in workers: no matrix products run there, and the threads take a quarter of the start."""

GRACE: Final = 5.0
"""Seconds to wait for a process to end after its pipe was closed."""


class Remote:
    """A worker process. One thread sends samples and requests; another reads the answers.

    Args:
        models: file of the models.
        threads: samples it runs at a time.

    Attributes:
        ready: its sessions are open.
        gone: it ended, or reported that it cannot start (`complaint`).
        under_way: its samples by number.
        sketches: its sketches as (key, arrays); None before they arrive.
        samples: number of samples it has completed.

    Raises:
        DeviceError: the system cannot start more processes.
    """

    def __init__(self, models: IO[bytes], threads: int) -> None:
        self.threads = threads
        self.ready = self.gone = False
        self.complaint = ""
        self.under_way: dict[int, Unit] = {}
        self.sketches: list[tuple[Any, dict[str, Any]]] | None = None
        self.samples = 0
        self._trays = [Tray() for _ in range(threads + 1)]  # one is filled while the others are read
        self._free = list(range(threads + 1))
        self._places: dict[int, int] = {}  # tray of each sample in flight
        inbox, to = os.pipe()
        answers, outbox = os.pipe()
        files = [models.fileno(), *(tray.fd for tray in self._trays)]
        arguments = [inbox, outbox, files[0], files[1:], os.getpid()]
        try:
            self._process = subprocess.Popen(
                python_command("sbonnx.calib.workers.worker_main", "main", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[inbox, outbox, *files],
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,  # Ctrl-C is for this process, which then closes the pipes
            )
        except OSError as error:
            os.close(to)
            os.close(answers)
            raise DeviceError(
                f"no worker process can be started ({error.strerror or error}): use fewer workers"
            ) from error
        finally:
            os.close(inbox)
            os.close(outbox)
        self._to = os.fdopen(to, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb")

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def has_room(self) -> bool:
        """Whether it accepts another sample."""
        return self.ready and not self.gone and bool(self._free)

    def begin(self, job: Job) -> None:
        """Send the work description."""
        self._send((job,))

    def promise(self, number: int, unit: Unit) -> None:
        """Reserve a tray for a sample, before `give`."""
        self._places[number] = self._free.pop()
        self.under_way[number] = unit

    def give(self, number: int, unit: Unit) -> None:
        """Send a reserved sample."""
        tray = self._places[number]
        parcel = self._trays[tray].fill(unit.feed)
        self._send(("run", number, tray, parcel, unit.index, unit.where, unit.samples))

    def take_back(self, number: int) -> Unit:
        """Register a sample as completed and return it."""
        self._free.append(self._places.pop(number))
        self.samples += 1
        return self.under_way.pop(number)

    def ask(self) -> None:
        """Request the sketches of the samples since the last request."""
        self.sketches = None
        self._send(("sketches",))

    def answers(self) -> Iterator[tuple[Any, ...]]:
        """Yield its messages until it ends."""
        with self._answers:
            while (message := receive(self._answers)) is not None:
                yield message

    def ending(self) -> str:
        """Describe how it ended."""
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code >= 0:
            return f"ended with code {code}"
        why = ", most likely because the machine was short of memory" if -code == signal.SIGKILL else ""
        return f"was ended by signal {-code} ({signal.Signals(-code).name}){why}"

    def close(self) -> None:
        """End the process. Idempotent."""
        self._to.close()  # this tells it to end
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for tray in self._trays:
            tray.close()

    def _send(self, message: tuple[Any, ...]) -> None:
        """Send a message; the reading thread detects a closed pipe."""
        try:
            send(self._to, message)
        except BrokenPipeError:
            self.gone = True
