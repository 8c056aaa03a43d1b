"""What the tests of clusters share: a scheduler and workers on this machine's loopback, and a batch for them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sbonnx.batch.dask.cluster import DaskEngine
from sbonnx.batch.jobs.job import Job, Outcome, Step, Watch
from sbonnx.batch.jobs.steps import steps_of
from tests.batch import works
from tests.support.caching import complete

distributed = pytest.importorskip("distributed", reason="clusters are Dask's")

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "sbonnx" / "assets"
GIB = 1 << 30
SAMPLES = 48
CALIBRATED = SAMPLES - 6  # held out
"""All of them: they are too few to hold any out."""

QUICK = (
    ("w.quantizer.type", "nearest"),
    ("samples", str(SAMPLES // 4)),
    ("verify.feeds", "4"),
    ("verify.latency", "false"),
)
"""What no test here is about, and takes long."""


class Cluster:
    """A scheduler and its workers, each an interpreter of its own."""

    def __init__(self, folder: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._environment = environment or {}
        self._started: list[subprocess.Popen[bytes]] = []
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        file = folder / "scheduler.json"
        here = ["--scheduler-file", str(file), "--host", "127.0.0.1"]
        self.scheduler = self._start("scheduler", *here, "--port", "0", "--no-dashboard", *options)
        self._file = file
        self.client = self._connected()
        self.address: str = self.client.scheduler.address

    def add(self, name: str, *options: str) -> None:
        """Start a worker."""
        place = self.folder / name
        self.workers[name] = self._start(
            "worker",
            "--scheduler-file",
            str(self._file),
            "--host",
            "127.0.0.1",
            "--nthreads",
            "1",
            "--name",
            name,
            "--no-nanny",
            "--no-dashboard",
            "--local-directory",
            str(place),
            *options,
        )
        until(lambda: self.address_of(name) is not None, f"worker {name} to join")

    def address_of(self, name: str) -> str | None:
        """Where a worker is; None where there is none of that name."""
        known = self.client.scheduler_info(n_workers=-1)["workers"]
        return next((str(where) for where, info in known.items() if info["name"] == name), None)

    def kill(self, name: str) -> None:
        """kill -9."""
        process = self.workers.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        """End all of it."""
        self.client.close()
        for process in reversed(self._started):
            process.kill()
            process.wait()

    def _start(self, what: str, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self._environment}
        with open(self.folder / f"{what}-{len(self._started)}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.dask_{what}", *arguments],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
            )
        self._started.append(process)
        return process

    def _connected(self) -> Any:
        until(lambda: self._file.is_file() and self._file.stat().st_size > 0, "the scheduler")
        return distributed.Client(scheduler_file=str(self._file), timeout=30, set_as_default=False)


def until(holds: Callable[[], bool], what: str, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


class Seen(Watch):
    """A watch that keeps what it is told, and may do something at a word."""

    def __init__(self, at: Callable[[str, str], None] | None = None) -> None:
        self.begun: list[tuple[str, int, str]] = []
        self.ends: list[tuple[str, str, str, bool]] = []
        self.stages: dict[str, list[str]] = {}
        self.threads: set[str] = set()
        self._at = at

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        """See `Watch`."""

    def started(self, step: Step, attempt: int, where: str) -> None:
        """See `Watch`."""
        self.threads.add(threading.current_thread().name)
        self.begun.append((step.title, attempt, where))

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        """See `Watch`."""
        self.stages.setdefault(step.title, []).append(stage)
        if self._at is not None:
            self._at(step.title, stage)

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        """See `Watch`."""
        self.threads.add(threading.current_thread().name)
        self.ends.append((step.title, outcome.status, outcome.reason, again))

    def close(self) -> None:
        """See `Watch`."""


def engine(at: Any, **more: Any) -> DaskEngine:
    return DaskEngine(at, work=works.work, publish=works.publish, **more)


def jobs_in(output: Path) -> list[Job]:
    """Targets of the bundled model, of two opsets."""
    rows = [("onnxruntime", "w8a8"), ("onnxruntime", "w4a8")]
    return [
        Job(
            f"{backend}-{bits}",
            str(ASSETS / "digits.onnx"),
            str(ASSETS / "digits_calib.npz"),
            backend,
            str(output / f"{backend}-{bits}.onnx"),
            split=4,
            overrides=(("bits", bits), *QUICK),
        )
        for backend, bits in rows
    ]


def steps_in(output: Path) -> tuple[Step, ...]:
    return steps_of(jobs_in(output), output / ".sbonnx")


def bytes_in(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob(pattern) if path.is_file()}


def assert_equal_outputs(output: Path, alone: Path) -> None:
    """The quantized files and their statistics are equal, byte for byte."""
    ours, theirs = bytes_in(output, "*.onnx"), bytes_in(alone, "*.onnx")
    assert {name for name in ours if "/" not in name} == {name for name in theirs if "/" not in name}
    assert ours == theirs and len(ours) == 4
    assert complete(output / ".sbonnx" / "sketches") == complete(alone / ".sbonnx" / "sketches") != {}
    assert not [path for path in output.rglob(".*") if path.name != ".sbonnx"]
