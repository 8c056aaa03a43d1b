"""Before a batch runs on a cluster: is there one, are its workers fit, what do they see, what do they offer?"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sbonnx.batch.dask.cluster_tasks import differences, installed
from sbonnx.batch.dask.shards import shardable
from sbonnx.batch.jobs.job import Job, Places, Step
from sbonnx.batch.jobs.steps import recipe_of
from sbonnx.batch.redaction import reveal_job
from sbonnx.batch.storage.urls import is_url, local_path
from sbonnx.errors import DeviceError, OutputError, SbonnxError
from sbonnx.recipe import AUTO

GPU: Final = "GPU"
"""Resource of a worker for steps that run on CUDA."""

MEMORY: Final = "MEMORY"
"""Resource of a worker, bytes, for steps with a limit of memory."""

VERSIONS: Final = (
    "{'sbonnx': __import__('sbonnx.version', fromlist=['_']).__version__, "
    "'onnxruntime': __import__('onnxruntime').__version__}"
)
"""Asked of every worker as a text: a function of ours cannot be sent to one that has another sbonnx, or none."""


@dataclass(frozen=True)
class Offer:
    """What the workers that are there have.

    Attributes:
        slots: tasks that run at a time, by machine.
        gpu: whether one of them has a `GPU`.
        memory: the most `MEMORY` that one of them has; None where none says.
    """

    slots: Mapping[str, int]
    gpu: bool
    memory: float | None

    @property
    def total(self) -> int:
        """Tasks that run at a time."""
        return sum(self.slots.values())


@contextmanager
def connected(scheduler: Any, patience: float) -> Any:
    """A client of a cluster: of an address, of a cluster object, or the client that was given, which stays open.

    Raises:
        DeviceError: distributed is not installed, or nobody answers there.
    """
    if importlib.util.find_spec("distributed") is None:
        raise DeviceError("a cluster needs distributed, which is not installed: pip install 'sbonnx[cluster]'")
    from distributed import Client

    open_client: Any = Client  # distributed says nothing of its types

    if isinstance(scheduler, Client):
        if scheduler.asynchronous:
            raise DeviceError("the client of the cluster is asynchronous: give one made with asynchronous=False")
        yield scheduler
        return
    try:
        if hasattr(scheduler, "get_client"):
            client = scheduler.get_client()
        else:
            address = getattr(scheduler, "scheduler_address", scheduler)
            client = open_client(os.fspath(address), timeout=patience, set_as_default=False)
    except (OSError, asyncio.TimeoutError, ValueError, TypeError) as error:
        raise DeviceError(
            f"there is no scheduler at {scheduler!r} ({' '.join(str(error).split()) or type(error).__name__}): "
            "start one with 'dask scheduler', and give its address, such as tcp://host:8786"
        ) from error
    with client:
        yield client


def offer_of(client: Any, patience: float) -> Offer:
    """What the workers offer; waits for the first of them.

    Raises:
        DeviceError: none comes, or one has other versions of sbonnx or onnxruntime.
    """
    try:
        client.wait_for_workers(1, timeout=patience)
    except (TimeoutError, asyncio.TimeoutError) as error:  # two things before Python 3.11
        raise DeviceError(
            f"the scheduler {client.scheduler.address} had no workers for {patience:g} s: start some with "
            f"'dask worker {client.scheduler.address} --nthreads 1'"
        ) from error
    wanted = installed()
    wrong = []
    for where, found in sorted(client.run(eval, VERSIONS, on_error="return").items()):
        if isinstance(found, BaseException):
            wrong.append(f"worker {where} cannot import sbonnx ({found}): install it there")
        elif (told := differences(wanted, found, where)) is not None:
            wrong.append(told)
    if wrong:
        more = f" ({len(wrong) - 1} more workers are unfit)" if len(wrong) > 1 else ""
        raise DeviceError(wrong[0] + more)
    slots: dict[str, int] = {}
    gpu, memory = False, None
    for where, info in client.scheduler_info(n_workers=-1)["workers"].items():
        host = where.rpartition(":")[0]
        slots[host] = slots.get(host, 0) + int(info["nthreads"])
        resources = info.get("resources") or {}
        gpu = gpu or resources.get(GPU, 0) >= 1
        if MEMORY in resources:
            memory = max(memory or 0.0, float(resources[MEMORY]))
    return Offer(slots, gpu, memory)


def is_shared(client: Any, places: Places) -> bool:
    """Whether all workers see the folder of the batch: they look for a file in it.

    Raises:
        OutputError: this process cannot write there.
    """
    word = secrets.token_hex(8)
    path = places.state / f".seen-{word}"
    try:
        path.write_text(word)
    except OSError as error:
        raise OutputError(f"'{places.output}' cannot be written to: {error.strerror or error}") from error
    try:
        return all(client.run(_holds, str(path), word).values())
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def check_paths(client: Any, jobs: Iterable[Job], *, shared: bool) -> None:
    """What jobs read is seen by all workers. What is not here either is left to the step, which says so.

    Raises:
        DeviceError: a worker does not see a file, and which.
    """
    paths = dict.fromkeys(path for job in jobs for path in _paths(job, shared) if os.path.exists(path))
    for where, missing in sorted(client.run(_missing, list(paths)).items()):
        if missing:
            more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
            raise DeviceError(
                f"worker {where} does not see '{missing[0]}'{more}: put what jobs read where all workers see it, or "
                "name it by a URL"
            )


def needed(step: Step, offer: Offer, state: Path) -> tuple[dict[str, float], str | None]:
    """Resources that a step takes, and why no worker that is there has them; None: one has.

    Args:
        state: folder into which recipes that are named by URLs are fetched.
    """
    wanted: dict[str, float] = {}
    if any(_on_cuda(job, state) for job in step.jobs):
        wanted[GPU] = 1
        if not offer.gpu:
            return wanted, "its recipe's device is cuda, and no worker has a GPU: start one with --resources 'GPU=1'"
    limit = step.limits.memory
    if limit is not None and offer.memory is not None:
        wanted[MEMORY] = float(limit)
        if limit > offer.memory:
            why = f"it may take {limit} bytes of memory, and no worker has more than {offer.memory:.0f}"
            return wanted, f"{why}: lower its limit, or start one with more of --resources 'MEMORY=...'"
    return wanted, None


def absolute(job: Job) -> Job:
    """The job with paths that mean the same in another folder. What begins with ${NAME} is taken as it is."""

    def of(name: str | None) -> str | None:
        if name is None or is_url(name) or name.startswith("${") or name == AUTO:
            return name
        return os.path.abspath(name)

    metric = job.accept.metric
    if metric is not None:
        file, colon, function = metric.rpartition(":")
        metric = f"{of(file)}{colon}{function}"
    changes: dict[str, Any] = {field: of(getattr(job, field)) for field in ("model", "data", "recipe", "output")}
    return replace(job, **changes, accept=replace(job.accept, metric=metric))


def size_of(job: Job) -> float:
    """Bytes of the files that a job is calibrated from; without end where they are elsewhere."""
    total = 0.0
    for name in (job.model, job.data):
        path = None if name is None else local_path(name)
        if path is None:
            total += 0.0 if name is None else math.inf
        elif path.is_dir():
            total += sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
        elif path.exists():
            total += path.stat().st_size
    return total


def can_be_cut(step: Step, state: Path) -> bool:
    """Whether shards can measure what a calibrate step does. A recipe that is no good is left to the step."""
    for job in step.jobs:
        try:
            if shardable(recipe_of(reveal_job(job), state)) is not None:
                return False
        except SbonnxError:
            continue
    return True


def _on_cuda(job: Job, state: Path) -> bool:
    """Whether a job asks for a GPU; one whose recipe is no good asks for nothing, and its step says why."""
    try:
        return recipe_of(reveal_job(job), state).device.startswith("cuda")
    except SbonnxError:
        return False


def _paths(job: Job, shared: bool) -> Sequence[str]:
    """Local files that a job reads, and where it writes if workers do that."""
    try:
        real = reveal_job(job)
    except SbonnxError:  # its step says so
        return ()
    metric = real.accept.metric
    names = [real.model, real.data, real.recipe, None if metric is None else metric.rpartition(":")[0]]
    if shared:
        names.append(os.path.dirname(real.output))
    found = [local_path(name) for name in names if name]
    return [str(path.absolute()) for path in found if path is not None]


def _holds(path: str, word: str) -> bool:
    """Whether a file holds a word."""
    try:
        return Path(path).read_text() == word
    except OSError:
        return False


def _missing(paths: Sequence[str]) -> list[str]:
    """Those of the paths that are not there."""
    return [path for path in paths if not os.path.exists(path)]


__all__ = [
    "GPU",
    "MEMORY",
    "Offer",
    "absolute",
    "can_be_cut",
    "check_paths",
    "connected",
    "is_shared",
    "needed",
    "offer_of",
    "size_of",
]
