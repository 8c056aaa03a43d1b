"""Tasks on a worker of a cluster: a step runs in a separate process, and its output is sent back.

If the worker sees the folder of the batch, a step works there as on a single machine. Otherwise it works in a folder of
the worker: the outputs of its dependencies are unpacked there first, and its own output is sent back.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from sbonnx.batch.dask.sharding import run_merged
from sbonnx.batch.jobs.job import AGAIN, FINE, Outcome, Places, Step
from sbonnx.batch.jobs.outputs import file_name
from sbonnx.batch.outcomes import FILE, from_json, now, read_made, to_json
from sbonnx.batch.process.step_main import Publish, Work
from sbonnx.batch.process.step_process import StepProcess, run_isolated
from sbonnx.batch.remote import FOLDER
from sbonnx.errors import DeviceError, OutputError
from sbonnx.graph.storage.output_files import write_bytes
from sbonnx.system.cpu import cores

TELL_EVERY: Final = 0.5
"""Minimum seconds between two progress messages of a step to the scheduler."""

LOOK_EVERY: Final = 0.5
"""Seconds between two checks whether the step is still needed."""

COME_BACK: Final = ("steps", "sketches", "logs", "metrics")
"""Subfolders of the state folder whose files are transferred."""


@dataclass(frozen=True)
class ClusterErrand:
    """Task of a worker. It is pickled.

    Attributes:
        step, places: as on a single machine.
        topic: topic of the events with its progress.
        shared: whether workers see the folder of the batch.
        slots: concurrent tasks by host; other hosts: the number of threads of the worker.
        versions: package versions that the worker must have.
        part: whether the step is a shard; if its process dies, the whole step is run without shards.
        parts: keys of shards whose statistics the step merges, if all of them are done.
        work: runs the step; None: sbonnx's own.
        publish: see `step_main.Errand`.
    """

    step: Step
    places: Places
    topic: str
    shared: bool = True
    slots: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    part: bool = False
    parts: tuple[str, ...] = ()
    work: Work | None = None
    publish: Publish | None = None


@dataclass(frozen=True)
class Parcel:
    """Result of a task.

    Attributes:
        outcome: outcome of the step.
        files: its files in the state folder, by relative path; empty if the folder is shared.
    """

    outcome: Outcome
    files: tuple[tuple[str, bytes], ...] = ()


class StepDied(Exception):
    """The process of a step died, and a retry may succeed. Raised so that the scheduler retries the task."""

    def __init__(self, parcel: Parcel) -> None:
        super().__init__(parcel)
        self.parcel = parcel

    def __str__(self) -> str:
        return self.parcel.outcome.reason


def carry_out(errand: ClusterErrand, *before: Parcel) -> Parcel:
    """Run a step on this worker. `before`: results of its dependencies and shards.

    Raises:
        StepDied: the process of the step died.
    """
    from distributed import get_worker

    step = errand.step
    worker = get_worker()
    events = _Events(worker, errand)
    wrong = differences(errand.versions, installed(), worker.address)
    if wrong is not None:  # a worker that joined after the check of all workers
        return Parcel(Outcome(step.key, "refused", reason=wrong, finished=now(), error="DeviceError"))
    if any(parcel.outcome.key in step.after and parcel.outcome.status not in FINE for parcel in before):
        return Parcel(Outcome(step.key, "skipped", attempts=0, finished=now()))
    events("began")
    parts = _parts_to_merge(errand, before, events)
    work = partial(run_merged, parts=parts, work=errand.work) if parts else errand.work
    at_once = errand.slots.get(worker.address.rpartition(":")[0]) or worker.state.nthreads
    threads = max(1, cores() // max(1, at_once))
    with _work_folder(errand, worker, before) as (near, places):
        try:
            process = StepProcess(near, places, threads=threads, work=work, publish=errand.publish)
            outcome = run_isolated(process, events.tell, stopped=_Cancelled(worker))
        except OSError as error:
            outcome = Outcome(step.key, "crashed", reason=f"{error} (on {worker.address})", finished=now())
        if not errand.shared:
            outcome = _with_job_outputs(errand.step, near, places, outcome)
        parcel = Parcel(outcome, () if errand.shared else tuple(_packed(places)))
    if outcome.status in AGAIN and not errand.part:
        events("died", outcome=to_json(outcome))
        raise StepDied(parcel)
    return parcel


def unpack(files: Sequence[tuple[str, bytes]], places: Places) -> None:
    """Write the transferred files to the state folder. The output folder of a step appears atomically, by a rename.

    Raises:
        DeviceError: a file has a name that no worker would use; nothing is written.
        OutputError: they cannot be written.
    """
    for name, _ in files:
        _check_name(name, places)
    folders: dict[str, list[tuple[str, bytes]]] = {}
    try:
        for name, content in files:
            kind, _, rest = name.partition("/")
            path = places.state / name
            if kind == "steps":
                key, _, inner = rest.partition("/")
                folders.setdefault(key, []).append((inner, content))
            elif kind != "sketches" or not path.exists():
                _write(path, content)
        for key, rows in folders.items():
            _write_folder(places.made(key), rows)
    except OSError as error:
        raise OutputError(f"'{places.state}' cannot be written to: {error.strerror or error}") from error


def _check_name(name: str, places: Places) -> None:
    """Check that a file is inside one of the transferred folders of the state folder, with links resolved."""
    kind, *rest = name.split("/")
    depth = 2 if kind == "steps" else 1
    root = os.path.realpath(places.state)
    plain = len(rest) >= depth and not any(piece.startswith(".") or piece in ("", "..") for piece in rest)
    if kind in COME_BACK and plain and "\0" not in name and "\\" not in name:
        real = os.path.realpath(places.state / name)
        if real == os.path.join(root, *name.split("/")):
            return
    raise DeviceError(
        f"a worker sent a file named {name[:200]!r}, which does not belong to the state of the batch: "
        "check who can reach the cluster"
    )


def installed() -> dict[str, str]:
    """Return the installed versions that results depend on."""
    from sbonnx.system.runtime import onnxruntime
    from sbonnx.version import __version__

    return {"sbonnx": __version__, "onnxruntime": onnxruntime().__version__}


def differences(wanted: Mapping[str, str], found: Mapping[str, str], where: str) -> str | None:
    """Return one sentence about the version differences of a worker, or None."""
    wrong = [
        f"{name} {found.get(name, 'none')} (here: {version})"
        for name, version in wanted.items()
        if found.get(name) != version
    ]
    if not wrong:
        return None
    return f"worker {where} has {' and '.join(wrong)}: install the same versions on all workers and here"


# --- on the worker ----------------------------------------------------------------------------------


class _Events:
    """Sends the progress of a step as scheduler events, from one thread."""

    def __init__(self, worker: Any, errand: ClusterErrand) -> None:
        self._worker = worker
        self._errand = errand
        self._stage = ""
        self._at = 0.0

    def __call__(self, what: str, **more: Any) -> None:
        message = {"what": what, "key": self._errand.step.key, "worker": self._worker.address, **more}
        self._worker.log_event(self._errand.topic, message)

    def tell(self, stage: str, done: int = 0, total: int | None = None) -> None:
        at = time.monotonic()
        if stage != self._stage or at - self._at >= TELL_EVERY or done == total:
            self._stage, self._at = stage, at
            self("told", stage=stage, done=done, total=total)


class _Cancelled:
    """Callable that returns whether this thread's task was cancelled, or its worker is closing."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._key = worker.get_current_task()
        self._looked = 0.0
        self._so = False

    def __call__(self) -> bool:
        at = time.monotonic()
        if at - self._looked >= LOOK_EVERY:
            self._looked = at
            task = self._worker.state.tasks.get(self._key)
            closing = self._worker.status.name in ("closing", "closed", "failed")
            self._so = closing or task is None or task.state in ("cancelled", "released", "forgotten")
        return self._so


def _parts_to_merge(errand: ClusterErrand, before: Sequence[Parcel], events: _Events) -> tuple[str, ...]:
    """Return the shards to merge; empty if one of them failed: then the step measures everything itself."""
    ended = {parcel.outcome.key: parcel.outcome for parcel in before}
    for key in errand.parts:
        if ended[key].status not in FINE:
            events.tell(f"measuring on one worker, because a shard {ended[key].status}: {ended[key].reason}")
            return ()
    return errand.parts


@contextmanager
def _work_folder(errand: ClusterErrand, worker: Any, before: Sequence[Parcel]) -> Iterator[tuple[Step, Places]]:
    """Yield the step and the folder to work in: that of the batch, or a temporary one of the worker."""
    if errand.shared:
        yield errand.step, errand.places
        return
    root = Path(worker.local_directory) / "sbonnx"
    downloads = root / FOLDER
    downloads.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{errand.step.key[:12]}-", dir=root))
    try:
        places = Places(folder)
        places.state.mkdir()
        os.symlink(downloads, places.state / FOLDER)  # URLs are downloaded once per worker
        for parcel in before:
            unpack(parcel.files, places)
        jobs = []
        for number, job in enumerate(errand.step.jobs):
            place = folder / "published" / str(number)
            place.mkdir(parents=True)
            jobs.append(replace(job, output=str(place / file_name(job))))  # a model refers to its data file by name
        yield replace(errand.step, jobs=tuple(jobs)), places
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _with_job_outputs(step: Step, near: Step, places: Places, outcome: Outcome) -> Outcome:
    """Replace the worker's output paths by those of the jobs, in the outcome and in the stored outcomes."""

    def renamed(found: Outcome) -> Outcome:
        line = to_json(found)
        for theirs, ours in zip(near.jobs, step.jobs, strict=True):
            line = line.replace(json.dumps(theirs.output)[1:-1], json.dumps(ours.output)[1:-1])
        return from_json(line)

    for key in {step.key, step.work}:
        stored = read_made(places, key)
        if stored is not None:
            _write(places.made(key) / FILE, to_json(renamed(stored)).encode())
    return renamed(outcome)


def _packed(places: Places) -> Iterator[tuple[str, bytes]]:
    """Yield the files of the state folder, without locks and hidden files."""
    for part in COME_BACK:
        for path in sorted((places.state / part).rglob("*")):
            name = path.relative_to(places.state)
            if not path.is_file() or path.suffix == ".lock" or any(piece.startswith(".") for piece in name.parts):
                continue
            with suppress(FileNotFoundError):  # another process has removed a checkpoint
                yield name.as_posix(), path.read_bytes()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content)


def _write_folder(folder: Path, rows: Sequence[tuple[str, bytes]]) -> None:
    """Create a folder atomically; an existing one has the same content."""
    if folder.exists():
        return
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        for name, content in rows:
            _write(hidden / name, content)
        os.rename(hidden, folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
