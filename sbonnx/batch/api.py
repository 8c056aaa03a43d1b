"""`batch`: many models for many targets, at once, whatever happens to some of them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, final

from sbonnx.batch.accept import READS
from sbonnx.batch.digests import Digests
from sbonnx.batch.engine import LocalEngine
from sbonnx.batch.jobs.job import FINE, BatchReport, Job, JobResult, Outcome, Places, Step, Watch, encodable
from sbonnx.batch.jobs.plan import Todo, Wish, todo, wish
from sbonnx.batch.outcomes import now
from sbonnx.batch.process.cleanup import prune, remove, sweep, unmake, used
from sbonnx.batch.process.sockets import claim_socket_folder
from sbonnx.batch.process.step_main import Publish, own_publish
from sbonnx.batch.redaction import revealed
from sbonnx.batch.state import State, past, peek
from sbonnx.batch.storage.urls import local_path
from sbonnx.batch.watch import Quiet
from sbonnx.errors import RecipeError, SbonnxError
from sbonnx.version import __version__

REPORTS: Final = ("report.json", "report.html", "report.xml")
"""What is written into the output folder at the end."""

BYTES_A_SECOND: Final = 1e6
"""Of a model: see `guess`."""

WOULD: Final = "it would be run now"
"""Reason of a job that a dry run found to be done."""


class Engine(Protocol):
    """What runs steps: `LocalEngine`, or `cluster.DaskEngine`."""

    def run(self, steps: Sequence[Step], places: Places, watch: Watch) -> dict[str, Outcome]:
        """See `LocalEngine.run`."""


def batch(
    jobs: str | os.PathLike[str] | Iterable[Job],
    *,
    workers: int | None = None,
    only: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    scheduler: str | None = None,
    cluster: Any = None,
    watch: Watch | None = None,
    output: str | os.PathLike[str] | None = None,
) -> BatchReport:
    """Quantize all that a job file asks for, and report it.

    What was done before and has not changed (model, data, recipe, acceptance, versions) is not done again; what was
    refused is not tried again. Ended at any moment, by whatever means, the same call goes on.

    Args:
        jobs: a job file, or jobs.
        workers: jobs at a time on this machine; None: one for every two processors, two at least where there are two.
        only: glob of the names of jobs; others are left as they are, and out of the report.
        force: do again what is done.
        dry_run: find out only what is to be done: such rows are "skipped", with the reason `WOULD`.
        scheduler: address of a Dask scheduler on which to run.
        cluster: a Dask client, or a cluster as dask-jobqueue and dask-kubernetes make them.
        watch: told as it goes; see `watch.make_watch`.
        output: folder of the batch, where `jobs` are no file.

    Returns:
        The report, which was also written to the output folder as `REPORTS`. ``report.ok``: all jobs are done.

    Raises:
        RecipeError: the jobs cannot be used as they are.
        OutputError: the output folder cannot be used, or another batch is at work in it.
        DeviceError: there is no such cluster, or its packages are not installed.
        KeyboardInterrupt: with what was done until then. What was begun has been ended.
    """
    wished = wish(jobs, only=only, output=output)
    if dry_run:
        return _report(wished, look(wished, force=force), {}, now())
    return fulfil(wished, workers=workers, force=force, scheduler=scheduler, cluster=cluster, watch=watch)


def fulfil(
    wished: Wish,
    *,
    workers: int | None = None,
    force: bool = False,
    scheduler: str | None = None,
    cluster: Any = None,
    watch: Watch | None = None,
    engine: Engine | None = None,
    publish: Publish | None = None,
) -> BatchReport:
    """`batch`, of a wish.

    Args:
        engine: what runs the steps; None: one of sbonnx's, as `workers`, `scheduler` and `cluster` say.
        publish: puts what was made before where it is wanted; None: sbonnx's own.
    """
    if scheduler is not None and cluster is not None:
        raise RecipeError("a batch runs on one cluster: give scheduler or cluster, not both")
    claim_socket_folder()
    began = now()
    with State(wished.places) as state:
        left = _left(wished, state, publish, force=force)
        if engine is None:
            engine = _engine(workers, scheduler if cluster is None else cluster, state)
        outcomes = _run(engine, wished, left, Recorder(state, watch or Quiet()))
        report = _report(wished, left, outcomes, began)
        write_reports(report, wished.places)
        prune(wished.places)
    return report


def _engine(workers: int | None, cluster: Any, state: State) -> Engine:
    """On this machine, or on a cluster where there is one."""
    if cluster is None:
        return LocalEngine(workers, expected=lambda step: state.expected(step) or guess(step))
    from sbonnx.batch.dask.cluster import DaskEngine

    return DaskEngine(cluster)


def guess(step: Step) -> float | None:
    """Seconds for a step that never ran, by the size of its model: they are right for no machine, and tell long ones
    from short ones. None where the model is not on this machine."""
    try:
        path = local_path(revealed(step.jobs[0].model))
        return None if path is None else 1.0 + path.stat().st_size / BYTES_A_SECOND
    except (OSError, SbonnxError):  # the step says what is wrong
        return None


def look(wished: Wish, *, force: bool = False) -> Todo:
    """What is to be done for a wish, without doing any of it. A batch that is at work there does not mind."""
    settled: dict[str, Outcome] = {}
    if wished.places.database.is_file() and not force:
        settled = peek(wished.places, wished.steps)
    return todo(wished, settled, past(wished.places))


def write_reports(report: BatchReport, places: Places) -> None:
    """Write `REPORTS`; each appears whole.

    Raises:
        OutputError: they cannot be written there.
    """
    from sbonnx import graph as graphs
    from sbonnx.html_report import batch_page, junit

    values = plain(report)
    texts = (
        json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        batch_page(values),
        junit(values),
    )
    for name, text in zip(REPORTS, texts, strict=True):
        graphs.write_text(places.output / name, text)


def plain(report: BatchReport) -> dict[str, Any]:
    """A report as JSON holds it, with "ok" and "exit_code" before all; numbers that are not finite are texts."""
    values = {"ok": report.ok, "exit_code": report.exit_code, **dataclasses.asdict(report)}
    found: dict[str, Any] = _plain(values)
    return found


@final
class Recorder:
    """A watch that keeps the state of the batch, and passes on what it is told.

    Attributes:
        finished: keys of the quantize steps that were done under its eyes.
    """

    def __init__(self, state: State, watch: Watch) -> None:
        self._state = state
        self._watch = watch
        self.finished: set[str] = set()

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        """See `Watch`."""
        self._watch.begin(steps, settled)

    def started(self, step: Step, attempt: int, where: str) -> None:
        """See `Watch`."""
        self._state.started(step, attempt, where)
        self._watch.started(step, attempt, where)

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        """See `Watch`."""
        self._watch.told(step, stage, done, total, memory)

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        """See `Watch`."""
        self._state.ended(step, outcome)
        if step.kind == "quantize" and outcome.status in FINE:
            self.finished.add(step.key)
        self._watch.ended(step, outcome, again=again)

    def close(self) -> None:
        """See `Watch`."""
        self._watch.close()


def _left(wished: Wish, state: State, publish: Publish | None, *, force: bool) -> Todo:
    """What is to be done. What is done already lies where it is wanted afterwards."""
    places = wished.places
    sweep(places, wished.steps)  # of all: who was killed while it published has left no step to be run
    if force:
        for step in wished.steps:
            for key in {step.key, step.work}:
                unmake(places, key)
            state.forget(step.key)
        if wished.chosen == wished.jobs:  # with what was measured
            remove(places.state / "sketches")
        for path in places.metrics.glob("*.json"):
            if not path.name.startswith(READS):  # verdicts of other jobs refer to those
                remove(path)
    settled = state.settled(wished.steps)
    digests = Digests(places.state)
    put = publish or partial(own_publish(), digests=digests)
    for step in wished.steps:
        if settled.get(step.key) is not None and places.made(step.key).is_dir():
            try:
                put(step, places)
            except SbonnxError:  # its process tries as well, and says what is wrong
                del settled[step.key]
            for key in {step.key, step.work}:
                used(places.made(key))
    digests.save()
    return todo(wished, settled, past(places))


def _run(engine: Engine, wished: Wish, left: Todo, recorder: Recorder) -> dict[str, Outcome]:
    """Run what is left; whatever happens, the watch is closed."""
    settled = {step.key: left.settled[step.key] for step in wished.steps if step.key in left.settled}
    known = {step.key for step in left.steps} | settled.keys()
    recorder.begin([step for step in wished.steps if step.key in known], settled)
    try:
        return engine.run(left.steps, wished.places, recorder) if left.steps else {}
    except KeyboardInterrupt as error:
        done = _jobs_of(wished, recorder.finished | {k for k, one in settled.items() if one.status in FINE})
        raise KeyboardInterrupt(
            f"{done} of {len(wished.chosen)} jobs are done, and the same command goes on from there"
        ) from error
    finally:
        recorder.close()


def _jobs_of(wished: Wish, keys: Iterable[str]) -> int:
    """How many of the chosen jobs have these steps."""
    held = set(keys)
    return sum(len(step.jobs) for step in wished.steps if step.kind == "quantize" and step.key in held)


def _report(wished: Wish, left: Todo, outcomes: Mapping[str, Outcome], began: str) -> BatchReport:
    """All of it, in the order of the jobs."""
    steps = {job.name: step for step in wished.steps if step.kind == "quantize" for job in step.jobs}
    all_outcomes = {**left.settled, **outcomes}
    rows = []
    for job in wished.chosen:
        step = steps[job.name]
        outcome = all_outcomes.get(step.key)
        if outcome is None:
            outcome = Outcome(step.key, "skipped", reason=WOULD, attempts=0)
        elif outcome.status == "skipped":
            lost = [all_outcomes[need] for need in step.after if need in all_outcomes]
            outcome = next((one for one in lost if one.status not in FINE), outcome)
        rows.append(JobResult(job, outcome, up_to_date=step.key in left.settled))
    known = {step.key: all_outcomes[step.key] for step in wished.steps if step.key in all_outcomes}
    return BatchReport(
        title=wished.title,
        version=__version__,
        started=began,
        finished=now(),
        rows=tuple(rows),
        steps=known,
        titles={step.key: step.title for step in wished.steps if step.key in known},
    )


def _plain(value: Any) -> Any:
    """Values as JSON holds them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (str, Path)):
        return encodable(str(value))
    if isinstance(value, Mapping):
        return {encodable(str(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


__all__ = ["REPORTS", "WOULD", "Engine", "Recorder", "batch", "fulfil", "look", "plain", "write_reports"]
