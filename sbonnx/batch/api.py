"""`batch`: quantize many models for many targets in parallel, with isolated failures and resumable state."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, final

from sbonnx.batch.accept import READS
from sbonnx.batch.database import State, past, peek
from sbonnx.batch.engine import LocalEngine
from sbonnx.batch.file_digests import Digests
from sbonnx.batch.jobs.batch_plan import BatchRequest, Todo, request_of, todo
from sbonnx.batch.jobs.job import FINE, BatchReport, Job, JobResult, Outcome, Places, Step, Watch, encodable
from sbonnx.batch.outcomes import Intact, now
from sbonnx.batch.process.cleanup import prune, remove, sweep, unmake, used
from sbonnx.batch.process.starting import claim_socket_folder
from sbonnx.batch.process.step_main import Publish, own_publish
from sbonnx.batch.redaction import revealed
from sbonnx.batch.remote import local_path
from sbonnx.batch.repair_command import advice_of, with_commands
from sbonnx.batch.step_progress import Quiet
from sbonnx.errors import Interrupted, RecipeError, SbonnxError
from sbonnx.plugins import ENGINES, optional_part
from sbonnx.report.reading import read
from sbonnx.system.terminal import map_strings, relative_paths, versioned
from sbonnx.values import json_values
from sbonnx.version import __version__

REPORTS: Final = ("report.json", "report.html", "report.xml")
"""Files written into the output folder at the end."""

BYTES_A_SECOND: Final = 1e6
"""Assumed throughput in bytes of a model per second, see `guess`."""

WOULD: Final = "it would be run now"
"""Reason of a job that a dry run would execute."""


class Engine(Protocol):
    """Interface of engines that run steps: `LocalEngine`, and those of the group `sbonnx.plugins.ENGINES`."""

    def run(self, steps: Sequence[Step], places: Places, watch: Watch) -> dict[str, Outcome]:
        """Run steps as specified by `LocalEngine.run`."""


def batch(  # noqa: PLR0913 - public entry point
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
    """Quantize all jobs of a job file, and report the results.

    Up-to-date results are skipped: a job runs again only if its model, data, recipe, acceptance or versions changed.
    Refused jobs are not retried. After any kind of interruption, the same call resumes the batch.

    Args:
        jobs: a job file, or jobs.
        workers: concurrent jobs on this machine; None: one per two processors, at least two if there are two.
        only: glob of job names; other jobs are left unchanged and omitted from the report.
        force: run up-to-date jobs again.
        dry_run: only determine what has to run: such rows are "skipped", with the reason `WOULD`.
        scheduler: address of a Dask scheduler on which to run.
        cluster: a Dask client, or a cluster object of dask-jobqueue or dask-kubernetes.
        watch: receives progress; see `watch.make_watch`.
        output: folder of the batch, if `jobs` is not a file.

    Returns:
        The report, which is also written to the output folder as `REPORTS`. ``report.ok``: all jobs are done.

    Raises:
        RecipeError: the jobs are invalid.
        OutputError: the output folder cannot be used, or another batch is running in it.
        DeviceError: the cluster cannot be reached, or its packages are not installed.
        Interrupted: on interruption, with the number of finished jobs. Running steps are terminated.
    """
    wished = request_of(jobs, only=only, output=output)
    if dry_run:
        return _report(wished, look(wished, force=force), {}, now())
    return fulfil(wished, workers=workers, force=force, scheduler=scheduler, cluster=cluster, watch=watch)


def fulfil(
    wished: BatchRequest,
    *,
    workers: int | None = None,
    force: bool = False,
    scheduler: str | None = None,
    cluster: Any = None,
    watch: Watch | None = None,
    engine: Engine | None = None,
    publish: Publish | None = None,
) -> BatchReport:
    """Run a parsed batch, see `batch`.

    Args:
        engine: runs the steps; None: one of sbonnx's, depending on `workers`, `scheduler` and `cluster`.
        publish: copies existing results to the outputs; None: sbonnx's own.
    """
    if scheduler is not None and cluster is not None:
        raise RecipeError("a batch runs on one cluster: give scheduler or cluster, not both")
    claim_socket_folder()
    began = now()
    with State(wished.places) as state:
        left = _left(wished, state, publish, force=force)
        if engine is None:
            if scheduler is None and cluster is None:
                engine = LocalEngine(workers, expected=lambda step: state.expected(step) or guess(step))
            else:
                engine = optional_part(ENGINES, "dask")(scheduler if cluster is None else cluster)
        outcomes = _run(engine, wished, left, Recorder(state, watch or Quiet()))
        report = _report(wished, left, outcomes, began)
        state.record(report.rows, report.finished)
        report = replace(report, history=state.history(row.job.name for row in report.rows))
        write_reports(report, wished.places, wished.folder)
        prune(wished.places)
    return report


def guess(step: Step) -> float | None:
    """Estimate the seconds of a step that never ran, from the size of its model; None if the model is not local.

    The absolute value is not accurate on any machine; it only separates long steps from short ones.
    """
    try:
        path = local_path(revealed(step.jobs[0].model))
        return None if path is None else 1.0 + path.stat().st_size / BYTES_A_SECOND
    except (OSError, SbonnxError):  # the step reports the error
        return None


def look(wished: BatchRequest, *, force: bool = False) -> Todo:
    """Determine the remaining steps without running any. Safe while another batch runs in the folder."""
    settled: dict[str, Outcome] = {}
    if wished.places.database.is_file() and not force:
        settled = peek(wished.places, wished.steps)
    before = past(wished.places)
    left = todo(wished, settled, before, () if force else only_judged(wished, settled))
    return replace(left, seconds=estimates(left.steps, left.seconds))


def only_judged(wished: BatchRequest, settled: Mapping[str, Outcome]) -> tuple[Step, ...]:
    """Return the steps with intact files of which only the acceptance thresholds changed.

    Steps with a metric are not among them: its code is the user's and runs in a separate process.
    """
    intact = Intact(wished.places)
    open_steps = (step for step in wished.steps if step.kind == "quantize" and step.key not in settled)
    own = (step for step in open_steps if step.work != step.key and step.jobs[0].accept.metric is None)
    return tuple(step for step in own if intact.files(step.work, step.work) is not None)


def estimates(steps: Sequence[Step], known: Mapping[str, float]) -> dict[str, float]:
    """Return the expected seconds of steps: of the last run, or else by the size of the model.

    The throughput is the median of the steps that ran before; without any, steps that never ran have no estimate.
    """
    guesses = {step.key: seconds for step in steps if (seconds := guess(step)) is not None}
    rates = sorted(known[key] / guesses[key] for key in known if key in guesses)
    if not rates:
        return dict(known)
    return {key: known.get(key, seconds * rates[len(rates) // 2]) for key, seconds in guesses.items()} | dict(known)


def write_reports(report: BatchReport, places: Places, folder: Path | None = None) -> None:
    """Write `REPORTS`, each atomically. Page and XML have paths relative to the working folder, or else to `folder`.

    Raises:
        OutputError: they cannot be written.
    """
    from sbonnx import graph as graphs
    from sbonnx.present.html import batch_page
    from sbonnx.present.junit import junit

    folders = () if folder is None else (folder,)
    values = plain(report)
    readable = read(BatchReport, map_strings(lambda text: relative_paths(text, *folders), values))
    plain_text = json.dumps(versioned("batch", values), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    for name, text in zip(REPORTS, (plain_text, batch_page(readable), junit(readable)), strict=True):
        graphs.write_text(places.output / name, text)


def plain(report: BatchReport) -> dict[str, Any]:
    """Convert a report to JSON values; non-finite numbers become strings."""
    return encodable(json_values(report))  # type: ignore[no-any-return]


@final
class Recorder(Watch):
    """Watch that updates the state of the batch and forwards all events.

    Attributes:
        finished: keys of the quantize steps that succeeded in this run.
    """

    def __init__(self, state: State, watch: Watch) -> None:
        self._state = state
        self._watch = watch
        self.finished: set[str] = set()

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        self._watch.begin(steps, settled)

    def started(self, step: Step, attempt: int, where: str) -> None:
        self._state.started(step, attempt, where)
        self._watch.started(step, attempt, where)

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        self._watch.told(step, stage, done, total, memory)

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        self._state.ended(step, outcome)
        if step.kind == "quantize" and outcome.status in FINE:
            self.finished.add(step.key)
        self._watch.ended(step, outcome, again=again)

    def close(self) -> None:
        self._watch.close()


def _left(wished: BatchRequest, state: State, publish: Publish | None, *, force: bool) -> Todo:
    """Determine the remaining steps, after results of finished steps are published to their outputs."""
    places = wished.places
    sweep(places, wished.steps)  # all steps: one killed while publishing is settled, and would not be swept later
    if force:
        for step in wished.steps:
            for key in {step.key, step.work}:
                unmake(places, key)
            state.forget(step.key)
        if wished.chosen == wished.jobs:  # also discard the measurements
            remove(places.state / "sketches")
        for path in places.metrics.glob("*.json"):
            if not path.name.startswith(READS):  # outcomes of other jobs refer to these lists
                remove(path)
    settled = state.settled(wished.steps)
    digests = Digests(places.state)
    put = publish or partial(own_publish(), digests=digests)
    for step in wished.steps:
        if settled.get(step.key) is not None and places.made(step.key).is_dir():
            try:
                put(step, places)
            except SbonnxError:  # run the step again: its process publishes too, and reports the error
                del settled[step.key]
            for key in {step.key, step.work}:
                used(places.made(key))
    digests.save()
    return todo(wished, settled, past(places), () if force else only_judged(wished, settled))


def _run(engine: Engine, wished: BatchRequest, left: Todo, recorder: Recorder) -> dict[str, Outcome]:
    """Run the remaining steps; always closes the watch."""
    settled = {step.key: left.settled[step.key] for step in wished.steps if step.key in left.settled}
    planned = {step.key for step in (*left.steps, *left.judged)} | settled.keys()
    recorder.begin([step for step in wished.steps if step.key in planned], settled)
    try:
        judged = {step.key: _judge(step, wished.places, recorder) for step in left.judged}
        return judged | (engine.run(left.steps, wished.places, recorder) if left.steps else {})
    except KeyboardInterrupt as error:
        fine = recorder.finished | {key for key, outcome in settled.items() if outcome.status in FINE}
        done = sum(len(step.jobs) for step in wished.steps if step.kind == "quantize" and step.key in fine)
        raise Interrupted(
            f"{done} of {len(wished.chosen)} jobs are done; the same command continues from there"
        ) from error
    finally:
        recorder.close()


def _judge(step: Step, places: Places, watch: Watch) -> Outcome:
    """Check the acceptance of a step with intact files, in this process."""
    from sbonnx.batch.work import run_step

    watch.started(step, 1, "this process")
    outcome = run_step(step, places, lambda stage, done=0, total=None: None)
    watch.ended(step, outcome, again=False)
    return outcome


def _report(wished: BatchRequest, left: Todo, outcomes: Mapping[str, Outcome], began: str) -> BatchReport:
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
            outcome = next((cause for cause in lost if cause.status not in FINE), outcome)
        advice = advice_of(job, outcome)
        rows.append(JobResult(job, with_commands(job, outcome), step.key in left.settled, advice))
    outcomes_by_key = {step.key: all_outcomes[step.key] for step in wished.steps if step.key in all_outcomes}
    return BatchReport(
        title=wished.title,
        version=__version__,
        started=began,
        finished=now(),
        rows=tuple(rows),
        steps=outcomes_by_key,
        titles={step.key: step.title for step in wished.steps if step.key in outcomes_by_key},
    )
