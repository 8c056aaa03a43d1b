"""What happens on a worker of a cluster: a step in a process of its own, and what it made on its way back.

Where the worker sees the folder of the batch, a step works there as it does on one machine. Where it does not, it works
in a folder of the worker's, what the steps before it made is laid there first, and what it made travels back.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from sbonnx.batch.dask.sharding import run_merged
from sbonnx.batch.jobs.job import AGAIN, FINE, Job, Outcome, Places, Step
from sbonnx.batch.jobs.steps import file_name
from sbonnx.batch.outcomes import FILE, from_json, now, read_made, to_json
from sbonnx.batch.process.step_main import Publish, Work
from sbonnx.batch.process.step_process import run_isolated
from sbonnx.batch.storage.remote import FOLDER
from sbonnx.cpu import cores
from sbonnx.errors import DeviceError, OutputError

TELL_EVERY: Final = 0.5
"""Seconds between two words of a step on its way to the scheduler."""

LOOK_EVERY: Final = 0.5
"""Seconds between two looks whether the step is still wanted."""

COME_BACK: Final = ("steps", "sketches", "logs", "metrics")
"""Folders of the state whose files travel."""


@dataclass(frozen=True)
class Errand:
    """What a worker is to do. It is pickled.

    Attributes:
        step, places: as on one machine.
        topic: of the events in which it says how far it is.
        shared: whether workers see the folder of the batch.
        slots: how many tasks run at a time on a machine, by its name; others: as many as the worker has threads.
        versions: what the worker must have installed.
        part: whether the step is a shard of one; where it dies, that one is done without shards.
        parts: keys of shards whose statistics the step takes in, where all of them are done.
        work: what to do; None: sbonnx's own.
        publish: see `child.Errand`.
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
    """What comes back.

    Attributes:
        outcome: of the step.
        files: what it left in the state folder, by path in there; none where the folder is shared.
    """

    outcome: Outcome
    files: tuple[tuple[str, bytes], ...] = ()


class StepDied(Exception):
    """The process of a step died, and another attempt may go well: raised so that the scheduler makes one."""

    def __init__(self, parcel: Parcel) -> None:
        super().__init__(parcel)
        self.parcel = parcel

    def __str__(self) -> str:
        return self.parcel.outcome.reason


def carry_out(errand: Errand, *before: Parcel) -> Parcel:
    """Do a step on this worker. `before`: what the steps that it needs, and its shards, came back with.

    Raises:
        StepDied: its process did.
    """
    from distributed import get_worker

    step = errand.step
    worker = get_worker()
    said = _Said(worker, errand)
    wrong = differences(errand.versions, installed(), worker.address)
    if wrong is not None:  # one that joined after the others were asked
        return Parcel(Outcome(step.key, "refused", reason=wrong, finished=now(), error="DeviceError"))
    if any(parcel.outcome.key in step.after and parcel.outcome.status not in FINE for parcel in before):
        return Parcel(Outcome(step.key, "skipped", attempts=0, finished=now()))
    said("began")
    parts = _whole(errand, before, said)
    work = partial(run_merged, parts=parts, work=errand.work) if parts else errand.work
    threads = _threads(errand, worker)
    with _place(errand, worker, before) as (near, places):
        try:
            outcome = run_isolated(
                near, places, threads, said.tell, work=work, publish=errand.publish, stopped=_Unwanted(worker)
            )
        except OSError as error:
            outcome = Outcome(step.key, "crashed", reason=f"{error} (on {worker.address})", finished=now())
        if not errand.shared:
            outcome = _in_words_of(errand.step, near, places, outcome)
        parcel = Parcel(outcome, () if errand.shared else tuple(_packed(places)))
    if outcome.status in AGAIN and not errand.part:
        said("died", outcome=to_json(outcome))
        raise StepDied(parcel)
    return parcel


def unpack(files: Sequence[tuple[str, bytes]], places: Places) -> None:
    """Lay what came back in the state folder. What a step made appears whole: its folder by a rename.

    Raises:
        DeviceError: a file has a name that a worker does not give; nothing is written then.
        OutputError: it cannot be written there.
    """
    for name, _ in files:
        _check_name(name, places)
    made: dict[str, list[tuple[str, bytes]]] = {}
    try:
        for name, content in files:
            kind, _, rest = name.partition("/")
            if kind == "steps":
                key, _, inner = rest.partition("/")
                made.setdefault(key, []).append((inner, content))
            else:
                _write(places.state / name, content)
        for key, rows in made.items():
            _appear(places.made(key), rows)
    except OSError as error:
        raise OutputError(f"'{places.state}' cannot be written to: {error.strerror or error}") from error


def _check_name(name: str, places: Places) -> None:
    """That a file belongs into one of the folders of the state, links followed."""
    kind, *rest = name.split("/")
    depth = 2 if kind == "steps" else 1
    root = os.path.realpath(places.state)
    plain = len(rest) >= depth and not any(piece.startswith(".") or piece in ("", "..") for piece in rest)
    if kind in COME_BACK and plain and "\0" not in name and "\\" not in name:
        real = os.path.realpath(places.state / name)
        if real == os.path.join(root, *name.split("/")):
            return
    raise DeviceError(
        f"a worker sent a file named {name[:200]!r}, which has no place in the state of the batch: "
        "look who can reach the cluster"
    )


def installed() -> dict[str, str]:
    """What the numbers depend on, as it is installed here."""
    from sbonnx.runtime import onnxruntime
    from sbonnx.version import __version__

    return {"sbonnx": __version__, "onnxruntime": onnxruntime().__version__}


def differences(wanted: Mapping[str, str], found: Mapping[str, str], where: str) -> str | None:
    """What a worker has that is not as it should be, in one sentence."""
    wrong = [
        f"{name} {found.get(name, 'none')} (here: {version})"
        for name, version in wanted.items()
        if found.get(name) != version
    ]
    if not wrong:
        return None
    return f"worker {where} has {' and '.join(wrong)}: install the same versions on all workers and here"


# --- on the worker ----------------------------------------------------------------------------------


class _Said:
    """Says how far a step is, as events of the scheduler; from one thread."""

    def __init__(self, worker: Any, errand: Errand) -> None:
        self._worker = worker
        self._errand = errand
        self._stage = ""
        self._at = 0.0

    def __call__(self, what: str, **more: Any) -> None:
        message = {"what": what, "key": self._errand.step.key, "worker": self._worker.address, **more}
        self._worker.log_event(self._errand.topic, message)

    def tell(self, stage: str, done: int = 0, total: int | None = None) -> None:
        """See `Tell`."""
        at = time.monotonic()
        if stage != self._stage or at - self._at >= TELL_EVERY or done == total:
            self._stage, self._at = stage, at
            self("told", stage=stage, done=done, total=total)


class _Unwanted:
    """Whether the task of this thread was cancelled, or its worker is about to close."""

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


def _whole(errand: Errand, before: Sequence[Parcel], said: _Said) -> tuple[str, ...]:
    """The shards to take in. Should one not be done the step measures by itself, and says what is wrong as ever."""
    ended = {parcel.outcome.key: parcel.outcome for parcel in before}
    for key in errand.parts:
        if ended[key].status not in FINE:
            said.tell(f"measuring on one worker, since a part of it {ended[key].status}: {ended[key].reason}")
            return ()
    return errand.parts


def _threads(errand: Errand, worker: Any) -> int:
    """This task's share of the machine."""
    host = worker.address.rpartition(":")[0]
    at_once = errand.slots.get(host) or worker.state.nthreads
    return max(1, cores() // max(1, at_once))


@contextmanager
def _place(errand: Errand, worker: Any, before: Sequence[Parcel]) -> Iterator[tuple[Step, Places]]:
    """Where to work: in the folder of the batch, or in one of the worker's that is gone afterwards."""
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
        os.symlink(downloads, places.state / FOLDER)  # what is named by URLs is downloaded once a worker
        for parcel in before:
            unpack(parcel.files, places)
        jobs = tuple(_redirected(job, folder, number) for number, job in enumerate(errand.step.jobs))
        yield replace(errand.step, jobs=jobs), places
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _redirected(job: Job, folder: Path, number: int) -> Job:
    """The job with its output in a folder of the worker's; the name stays, files refer to it."""
    place = folder / "published" / str(number)
    place.mkdir(parents=True)
    return replace(job, output=str(place / file_name(job)))


def _in_words_of(step: Step, near: Step, places: Places, outcome: Outcome) -> Outcome:
    """The outcome, also where it is written, with the outputs that jobs name in place of those of the worker."""

    def renamed(found: Outcome) -> Outcome:
        line = to_json(found)
        for theirs, ours in zip(near.jobs, step.jobs, strict=True):
            line = line.replace(json.dumps(theirs.output)[1:-1], json.dumps(ours.output)[1:-1])
        return from_json(line)

    for key in {step.key, step.work}:
        made = read_made(places, key)
        if made is not None:
            _write(places.made(key) / FILE, to_json(renamed(made)).encode())
    return renamed(outcome)


def _packed(places: Places) -> Iterator[tuple[str, bytes]]:
    """What lies in the state folder; no locks, nothing hidden."""
    for part in COME_BACK:
        for path in sorted((places.state / part).rglob("*")):
            name = path.relative_to(places.state)
            if path.is_file() and path.suffix != ".lock" and not any(piece.startswith(".") for piece in name.parts):
                yield name.as_posix(), path.read_bytes()


def _write(path: Path, content: bytes) -> None:
    """A file that appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _appear(folder: Path, rows: Sequence[tuple[str, bytes]]) -> None:
    """A folder that appears whole; one that is there holds the same."""
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


def _umask() -> int:
    """What the user takes from the rights of new files."""
    now_ = os.umask(0)
    os.umask(now_)
    return now_


__all__ = ["Errand", "Parcel", "StepDied", "carry_out", "differences", "installed", "unpack"]
