"""Checks before a batch runs on a cluster: connection, versions, visible files and resources of workers."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sbonnx.batch.dask.cluster_tasks import differences, installed
from sbonnx.batch.dask.sharding import shardable
from sbonnx.batch.jobs.job import Job, Places, Step
from sbonnx.batch.jobs.steps import recipe_of
from sbonnx.batch.redaction import reveal_job
from sbonnx.batch.remote import is_url, local_path
from sbonnx.errors import DeviceError, MissingPackageError, OutputError, SbonnxError
from sbonnx.recipe import AUTO, Recipe

GPU: Final = "GPU"
"""Worker resource for steps that run on CUDA."""

MEMORY: Final = "MEMORY"
"""Worker resource, in bytes, for steps with a memory limit."""

VERSIONS: Final = (
    "{'sbonnx': __import__('sbonnx.version', fromlist=['_']).__version__, "
    "'onnxruntime': __import__('onnxruntime').__version__}"
)
"""Evaluated on every worker as text, because our functions cannot be unpickled there with another sbonnx or none."""


@dataclass(frozen=True)
class ClusterResources:
    """Resources of the available workers.

    Attributes:
        slots: concurrent tasks, by host.
        gpu: whether a worker has a `GPU`.
        memory: largest `MEMORY` of a worker; None if no worker declares it.
    """

    slots: Mapping[str, int]
    gpu: bool
    memory: float | None

    @property
    def total(self) -> int:
        return sum(self.slots.values())


@contextmanager
def connected(scheduler: Any, patience: float) -> Any:
    """Yield a client of a cluster, from an address or cluster object; a given client is used as it is and stays open.

    Raises:
        DeviceError: distributed is not installed, or the scheduler does not answer.
    """
    if importlib.util.find_spec("distributed") is None:
        raise MissingPackageError("a cluster needs distributed, which is not installed: pip install 'sbonnx[cluster]'")
    from distributed import Client

    open_client: Any = Client  # distributed has no type annotations

    if isinstance(scheduler, Client):
        if scheduler.asynchronous:
            raise DeviceError("the client of the cluster is asynchronous: create it with asynchronous=False")
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
            "start one with 'dask scheduler', and use its address, such as tcp://host:8786"
        ) from error
    with client:
        yield client


def cluster_resources(client: Any, patience: float) -> ClusterResources:
    """Return the resources of the workers; waits for the first worker.

    Raises:
        DeviceError: no worker appears, or one has other versions of sbonnx or onnxruntime.
    """
    try:
        client.wait_for_workers(1, timeout=patience)
    except (TimeoutError, asyncio.TimeoutError) as error:  # different types before Python 3.11
        raise DeviceError(
            f"the scheduler {client.scheduler.address} had no workers for {patience:g} s: start some with "
            f"'dask worker {client.scheduler.address} --nthreads 1'"
        ) from error
    wanted = installed()
    wrong = []
    for where, versions in sorted(client.run(eval, VERSIONS, on_error="return").items()):
        if isinstance(versions, BaseException):
            wrong.append(f"worker {where} cannot import sbonnx ({versions}): install it there")
        elif (told := differences(wanted, versions, where)) is not None:
            wrong.append(told)
    if wrong:
        more = f" ({len(wrong) - 1} more workers have such a problem)" if len(wrong) > 1 else ""
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
    return ClusterResources(slots, gpu, memory)


def is_shared(client: Any, places: Places) -> bool:
    """Return whether all workers see the folder of the batch, by looking for a file in it.

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
    """Check that all workers see the inputs of jobs. Files missing here too are reported by the step.

    Raises:
        DeviceError: a worker does not see a file, which the message names.
    """
    paths = dict.fromkeys(path for job in jobs for path in _paths(job, shared) if os.path.exists(path))
    for where, missing in sorted(client.run(_missing, list(paths)).items()):
        if missing:
            more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
            raise DeviceError(
                f"worker {where} does not see '{missing[0]}'{more}: put the inputs of jobs where all workers see them, "
                "or name them by URLs"
            )


def needed(step: Step, resources: ClusterResources, state: Path) -> tuple[dict[str, float], str | None]:
    """Return the resources that a step requires, and why no available worker has them; None if one has.

    Args:
        state: folder for downloads of recipes.
    """
    wanted: dict[str, float] = {}
    if any(recipe.device.startswith("cuda") for recipe in _recipes(step, state)):
        wanted[GPU] = 1
        if not resources.gpu:
            return wanted, "its recipe's device is cuda, and no worker has a GPU: start one with --resources 'GPU=1'"
    limit = step.limits.memory
    if limit is not None and resources.memory is not None:
        wanted[MEMORY] = float(limit)
        if limit > resources.memory:
            why = f"it may take {limit} bytes of memory, and no worker has more than {resources.memory:.0f}"
            return wanted, f"{why}: lower its limit, or start one with more of --resources 'MEMORY=...'"
    return wanted, None


def absolute(job: Job) -> Job:
    """Return the job with absolute paths. Names that begin with ${NAME} are unchanged."""

    def of(name: str | None) -> str | None:
        if name is None or is_url(name) or name.startswith("${") or name == AUTO:
            return name
        return os.path.abspath(name)

    metric = job.accept.metric
    if metric is not None:
        file, colon, function = metric.rpartition(":")
        metric = f"{of(file)}{colon}{function}"
    changes: dict[str, Any] = {field: of(getattr(job, field)) for field in ("model", "data", "recipe", "output")}
    if job.preprocess_file is not None:
        changes["preprocess"] = of(job.preprocess)
    labelled = None if job.evaluation is None else job.evaluation.with_paths(lambda name: of(name) or name)
    return replace(job, **changes, evaluation=labelled, accept=replace(job.accept, metric=metric))


def size_of(job: Job) -> float:
    """Return the total bytes of a job's model and data; infinity if one is remote."""
    total = 0.0
    for name in (job.model, job.data):
        path = None if name is None else local_path(name)
        if path is None:
            total += 0.0 if name is None else math.inf
        elif path.is_dir():
            total += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        elif path.exists():
            total += path.stat().st_size
    return total


def can_be_sharded(step: Step, state: Path) -> bool:
    """Return whether a calibrate step can be sharded."""
    return all(shardable(recipe) is None for recipe in _recipes(step, state))


def _recipes(step: Step, state: Path) -> Iterator[Recipe]:
    """Yield the recipes of the jobs, without invalid ones, which the step reports."""
    for job in step.jobs:
        with suppress(SbonnxError):
            yield recipe_of(reveal_job(job), state)


def _paths(job: Job, shared: bool) -> Sequence[str]:
    """List the local files that a job reads, and its output folder if workers write there."""
    try:
        real = reveal_job(job)
    except SbonnxError:  # its step reports the error
        return ()
    metric = real.accept.metric
    names = [
        real.model,
        real.data,
        real.preprocess_file,
        real.recipe,
        None if metric is None else metric.rpartition(":")[0],
    ]
    if real.evaluation is not None:
        names += [
            real.evaluation.data,
            real.evaluation.vocabulary,
            *(named.rpartition(":")[0] for named in real.evaluation.functions),
        ]
    if shared:
        names.append(os.path.dirname(real.output))
    paths = [local_path(name) for name in names if name]
    return [str(path.absolute()) for path in paths if path is not None]


def _holds(path: str, word: str) -> bool:
    try:
        return Path(path).read_text() == word
    except OSError:
        return False


def _missing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]
