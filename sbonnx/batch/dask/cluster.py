"""`DaskEngine`: runs the steps of a batch as tasks of a Dask cluster."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, final
from uuid import uuid4

from sbonnx.batch.dask.cluster_check import (
    ClusterResources,
    absolute,
    can_be_sharded,
    check_paths,
    cluster_resources,
    connected,
    is_shared,
    needed,
    size_of,
)
from sbonnx.batch.dask.cluster_tasks import ClusterErrand, Parcel, StepDied, carry_out, installed, unpack
from sbonnx.batch.dask.sharding import Shard, part_keys, run_part
from sbonnx.batch.jobs.job import Outcome, Places, Step, Watch
from sbonnx.batch.outcomes import from_json, now, outcome_of, read_made, skipped_steps
from sbonnx.batch.process.cleanup import remove, sweep
from sbonnx.batch.process.step_main import Publish, Work, own_publish
from sbonnx.errors import DeviceError, SbonnxError

PATIENCE: Final = 60.0
"""Seconds to wait for a scheduler, and for its first worker."""

LOOK_EVERY: Final = 1.0
"""Seconds between two checks of the scheduler."""

SMALL: Final = 4 << 20
"""Bytes of a model and its data up to which sharding a calibration does not pay off."""

GONE: Final = ("lost", "cancelled")
"""States of a future that its scheduler does not know any more."""

LOST: Final = "its worker was lost"


@final
class DaskEngine:
    """Runs steps as tasks of a Dask cluster, each in a separate process on a worker.

    A crashed step affects neither its worker nor other steps. It is retried on any free worker, like the steps of a
    lost worker. If there are more workers than models to calibrate, the calibration of a model is sharded over several
    workers.

        outcomes = DaskEngine("tcp://host:8786").run(steps, Places(folder), watch)

    Workers that see the folder of the batch under the same path work in it. If some worker does not, outputs of steps
    are transferred through the cluster; then all workers must see the inputs of jobs, or these must be URLs.

    Args:
        scheduler: its address, a `distributed.Client`, or a cluster object (of dask-jobqueue, dask-kubernetes or
            distributed itself).
        shards: number of shards of a calibration; None: as many as there are workers for, unless it is small.
        patience: seconds to wait for the scheduler, and for its first worker.
        work, publish: see `step_main.Errand`; None: sbonnx's own. Workers must be able to import them.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        shards: int | None = None,
        patience: float = PATIENCE,
        work: Work | None = None,
        publish: Publish | None = None,
    ) -> None:
        if shards is not None and shards < 1:
            raise DeviceError(f"a calibration has at least one shard, got shards={shards}")
        self._scheduler = scheduler
        self._shards = shards
        self._patience = patience
        self._work = work
        self._publish = publish

    def run(self, steps: Sequence[Step], places: Places, watch: Watch) -> dict[str, Outcome]:
        """Run `steps`, like `LocalEngine.run`.

        Raises:
            DeviceError: no cluster or no worker is available, a worker has other versions of sbonnx or onnxruntime or
                does not see an input of a job, or the connection to the scheduler is lost.
            OutputError: the folder is not writable.
        """
        unique = {step.key: replace(step, jobs=tuple(map(absolute, step.jobs))) for step in steps}
        places = Places(places.output.absolute())
        places.made("").mkdir(parents=True, exist_ok=True)
        sweep(places, unique.values())
        with ExitStack() as stack:
            client = stack.enter_context(connected(self._scheduler, self._patience))
            resources = cluster_resources(client, self._patience)
            shared = is_shared(client, places)
            check_paths(client, (job for step in unique.values() for job in step.jobs), shared=shared)
            topic = f"sbonnx-{uuid4().hex}"
            errand = partial(
                ClusterErrand,
                places=places,
                topic=topic,
                shared=shared,
                slots=dict(resources.slots),
                versions=installed(),
            )
            run = _ClusterRun(unique, places, watch, client, topic, shared, self._publish)
            stack.callback(sweep, places, unique.values())
            stack.callback(run.end)
            for step in unique.values():
                run.submit(
                    step, self._errands(step, errand, resources, places, unique), needed(step, resources, places.state)
                )
            run.go()
        return run.outcomes

    def _errands(
        self, step: Step, errand: Any, resources: ClusterResources, places: Places, steps: Mapping[str, Step]
    ) -> tuple[ClusterErrand, ...]:
        """Return the tasks of a step: its shards, if any, and finally the step itself."""
        parts = self._parts(step, resources, places, steps)
        pieces = tuple(
            errand(
                step=replace(step, key=key, title=f"{step.title} ({number + 1}/{len(parts)})"),
                part=True,
                work=partial(run_part, shard=Shard(number, len(parts))),
            )
            for number, key in enumerate(parts)
        )
        return (*pieces, errand(step=step, parts=parts, work=self._work, publish=self._publish))

    def _parts(
        self, step: Step, resources: ClusterResources, places: Places, steps: Mapping[str, Step]
    ) -> tuple[str, ...]:
        """Return the keys of the shards of a step; empty if it is not sharded."""
        if step.kind != "calibrate" or read_made(places, step.key) is not None:
            return ()
        count = self._shards
        if count is None:
            alike = sum(other.kind == "calibrate" for other in steps.values())
            count = resources.total // alike if size_of(step.jobs[0]) > SMALL else 1
        return part_keys(step.key, count) if count > 1 and can_be_sharded(step, places.state) else ()


@dataclass
class _Task:
    """A task of the cluster.

    Attributes:
        step: the step, or a shard of one.
        future: its result, a `Parcel`.
        own: whether `step` is a step of the batch, not a shard.
        attempt: number of started attempts.
        running: whether it has started and not ended, according to its messages.
    """

    step: Step
    future: Any
    own: bool
    attempt: int = 0
    running: bool = False
    parts: list[str] = field(default_factory=list)


@dataclass
class _ClusterRun:
    """One run of an engine.

    Attributes:
        outcomes: outcomes of the batch's finished steps, by key.
    """

    steps: dict[str, Step]
    places: Places
    watch: Watch
    client: Any
    topic: str
    shared: bool
    publish: Publish | None
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tasks: dict[str, _Task] = {}
        self.heard: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.refused: dict[str, str] = {}
        self.client.subscribe_topic(self.topic, lambda event: self.heard.put(("said", event[1])))

    def submit(self, step: Step, errands: Sequence[ClusterErrand], need: tuple[dict[str, float], str | None]) -> None:
        """Submit the tasks of a step to the scheduler. Its dependencies must have been submitted before."""
        resources, refusal = need
        if refusal is not None:
            self.refused[step.key] = refusal
            return
        if any(key in self.refused for key in step.after):
            return  # `_skip` handles it
        before = [self.tasks[key].future for key in step.after if key in self.tasks]
        parts: list[str] = []
        for errand in errands:
            own = errand.step.key == step.key
            key = errand.step.key
            future = self.client.submit(
                carry_out,
                errand,
                *before,
                *[self.tasks[part].future for part in parts],
                key=f"{step.kind}-{key}-{self.topic[-8:]}",
                resources=resources or None,
                retries=step.limits.retries,
                priority=len(self.steps) - len(self.tasks),
                pure=False,
            )
            self.tasks[key] = _Task(errand.step, future, own, parts=list(parts) if own else [])
            future.add_done_callback(lambda _, key=key: self.heard.put(("ended", key)))
            if not own:
                parts.append(key)

    def go(self) -> None:
        """Run until all steps have ended."""
        for key, why in self.refused.items():
            self._settle(key, Outcome(key, "refused", reason=why, attempts=0, finished=now(), error="DeviceError"))
        self._skip()
        looked = time.monotonic()
        while len(self.outcomes) < len(self.steps):
            try:
                kind, what = self.heard.get(timeout=LOOK_EVERY)
            except Empty:
                kind, what = "", None
            if kind == "said":
                self._hear(what)
            elif kind == "ended":
                self._ended(self.tasks[what])
            if time.monotonic() - looked > LOOK_EVERY:
                looked = time.monotonic()
                self._check()

    def end(self) -> None:
        """Cancel all unfinished tasks."""
        open_ = [task.future for task in self.tasks.values() if not task.future.done()]
        if open_ and self.client.status == "running":
            self.client.cancel(open_, force=True)
        for task in self.tasks.values():
            task.future.release()
        if self.client.status == "running":
            self.client.unsubscribe_topic(self.topic)
        if open_:
            return
        for task in self.tasks.values():
            if not task.own:  # a shard, which is merged into the statistics of its step by now
                shard_output: Path = self.places.made(task.step.key)
                shutil.rmtree(shard_output, ignore_errors=True)
                remove(shard_output.with_name(f"{shard_output.name}.lock"))

    def _hear(self, said: Mapping[str, Any]) -> None:
        task = self.tasks[said["key"]]
        if not task.own:
            if said["what"] == "told":
                self._hear_part(task, said)
            return
        if task.step.key in self.outcomes:
            return
        if said["what"] == "began":
            if task.running:  # restarted without an end: its worker was lost
                lost = Outcome(task.step.key, "crashed", reason=LOST, attempts=task.attempt, finished=now())
                self.watch.ended(task.step, lost, again=True)
            task.attempt += 1
            task.running = True
            self.watch.started(task.step, task.attempt, said["worker"])
        elif said["what"] == "died":
            if task.attempt <= task.step.limits.retries:
                task.running = False
                died = replace(from_json(said["outcome"]), attempts=task.attempt)
                self.watch.ended(task.step, died, again=True)
        else:
            self.watch.told(task.step, said["stage"], said["done"], said["total"], 0)

    def _hear_part(self, part: _Task, said: Mapping[str, Any]) -> None:
        """Forward the progress of a shard as that of its step."""
        for task in self.tasks.values():
            if part.step.key in task.parts and task.step.key not in self.outcomes:
                number = task.parts.index(part.step.key) + 1
                stage = f"{said['stage']} ({number}/{len(task.parts)})"
                self.watch.told(task.step, stage, said["done"], said["total"], 0)

    def _ended(self, task: _Task) -> None:
        key = task.step.key
        if not task.own or key in self.outcomes:
            return
        if task.future.status in GONE:
            self._check()
            return
        outcome = self._outcome(task)
        if outcome.status == "skipped":  # `_skip` handles it when the failed dependency is known
            return
        self._settle(key, outcome)
        self._skip()

    def _outcome(self, task: _Task) -> Outcome:
        error = task.future.exception()
        attempts = max(1, task.attempt)
        if error is None:
            parcel: Parcel = task.future.result()
            if parcel.outcome.status == "skipped":
                return parcel.outcome
            try:
                unpack(parcel.files, self.places)
            except DeviceError as wrong:
                return outcome_of(task.step.key, wrong)
            return replace(self._published(task.step, parcel.outcome), attempts=attempts)
        if isinstance(error, StepDied):
            with suppress(DeviceError):  # its files are only useful for the next attempt
                unpack(error.parcel.files, self.places)
            if error.parcel.outcome.key == task.step.key:
                return replace(error.parcel.outcome, attempts=attempts)
        if any(key in self.tasks and self.tasks[key].future.status == "error" for key in task.step.after):
            return Outcome(task.step.key, "skipped", finished=now())
        if isinstance(error, SbonnxError):
            return outcome_of(task.step.key, error)
        if type(error).__name__ == "KilledWorker":
            return Outcome(task.step.key, "crashed", f"{LOST} each time", attempts=attempts, finished=now())
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome(task.step.key, "failed", reason, attempts=attempts, finished=now())

    def _published(self, step: Step, outcome: Outcome) -> Outcome:
        """Publish a worker's output from here, if workers do not share the folder."""
        if self.shared or step.kind != "quantize" or read_made(self.places, step.key) is None:
            return outcome
        try:
            (self.publish or own_publish())(step, self.places)
        except SbonnxError as error:
            return outcome_of(step.key, error)
        return outcome

    def _settle(self, key: str, outcome: Outcome) -> None:
        self.outcomes[key] = outcome
        self.watch.ended(self.steps[key], outcome, again=False)

    def _skip(self) -> None:
        """Skip steps whose dependencies failed, transitively."""
        while skipped := skipped_steps(
            self.steps, [key for key in self.steps if key not in self.outcomes], self.outcomes
        ):
            for key, outcome in skipped:
                self._settle(key, outcome)

    def _check(self) -> None:
        """Check that the scheduler is still available.

        Raises:
            DeviceError: it is not, or has lost the tasks.
        """
        lost = any(
            task.future.status in GONE
            for task in self.tasks.values()
            if task.own and task.step.key not in self.outcomes
        )
        if lost or self.client.status in ("closing", "closed"):
            raise DeviceError("the scheduler was lost: start it and run the batch again; finished steps are kept")
