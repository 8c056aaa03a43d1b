"""Work of a step's process: calibration statistics for all targets of a model, or one quantized file."""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from sbonnx.api.arguments import evaluation_data
from sbonnx.api.create import quantize
from sbonnx.backends import backend_for
from sbonnx.batch.accept import judge, metric_values
from sbonnx.batch.file_digests import Digests
from sbonnx.batch.jobs.job import Job, Outcome, Places, Step, Tell
from sbonnx.batch.jobs.outputs import file_name, publish
from sbonnx.batch.jobs.steps import (
    JobInputs,
    calibrate_key,
    job_inputs,
    quantize_key,
    recipe_of,
    sketches_digest,
    work_key,
)
from sbonnx.batch.outcomes import FILE, FILES, JUDGED_ALONE, Intact, made_before, now, outcome_of, to_json
from sbonnx.batch.process.cleanup import clear, used
from sbonnx.batch.process.locks import lock_path, take_when_free
from sbonnx.batch.redaction import Redactor, reveal_job, revealed
from sbonnx.batch.remote import localized
from sbonnx.batch.step_progress import StepProgress
from sbonnx.calib.data import with_preprocess
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.shared_calibration import CalibrationTask, CalibrationTasks, Walk, observe_tasks
from sbonnx.errors import DataError, SbonnxError
from sbonnx.graph import Graph
from sbonnx.graph.digests import combined, file_digest, text
from sbonnx.graph.storage.output_files import write_bytes
from sbonnx.pipeline import measure_pruning, prepare
from sbonnx.progress import Progress
from sbonnx.recipe import Recipe, load
from sbonnx.report import Report
from sbonnx.report.comparison import Comparison
from sbonnx.stages.measure import divided, equalizes_by_data
from sbonnx.stages.state import Prepared, Request, run_options
from sbonnx.system.terminal import escaped, map_strings
from sbonnx.values import json_values
from sbonnx.verify import EvaluationData, libraries_of
from sbonnx.version import __version__

PLANS: Final = "plans"
"""Subfolder of a model's statistics: one file per measured plan, with the name of its graph's cache folder."""

CHANGED: Final = "was changed while the batch ran: run the batch again"


@dataclass(frozen=True)
class ResolvedJob:
    """A job as seen by its step's process.

    Attributes:
        job: the job as written in the job file.
        real: the job with local paths and environment variables substituted.
        given: digests of its files, and its recipe.
        key, work: keys of its quantize step, see `Step`.
        shared: see `sketches_digest`.
    """

    job: Job
    real: Job
    given: JobInputs
    key: str
    work: str
    shared: str | None

    @property
    def prunes(self) -> bool:
        """Whether its recipe has SPARSE."""
        return self.given.recipe is not None and self.given.recipe.sparse.wanted

    @property
    def plan(self) -> str:
        """Name of its plan. Equal names mean equal graphs and equal measurements."""
        return text(
            combined("plan", __version__.encode(), self.job.backend.encode(), self.given.recipe_digest.encode())
        )


def run_step(step: Step, places: Places, tell: Tell, threads: int = 1, *, walk: Walk | None = None) -> Outcome:
    """Run a step in this process. Its output appears as `places.made(step.key)`, its file at the jobs' outputs.

    A refused step leaves no output. An exception other than `SbonnxError` gives the outcome "failed", with the
    traceback on stderr. Values of ${NAME} are redacted in outcomes and in the log.

    Args:
        step: a step of `steps_of`.
        tell: receives progress.
        threads: number of samples to run concurrently, unless the recipe sets it.
        walk: of a calibrate step, see `observe_tasks`.
    """
    began = time.monotonic()
    redactor = Redactor.of(step.jobs)
    try:
        outcome = made_before(step, places)
        if outcome is None:
            work = partial(_calibrate, walk=walk) if step.kind == "calibrate" else _quantize
            keep = partial(_create_output, step=step, places=places, redactor=redactor)
            with libraries_of(map(revealed, step.jobs[0].ort_libraries)):
                outcome = work(step, places, tell, threads, keep)
        publish(step, places)
    except Exception as error:
        if not isinstance(error, SbonnxError):
            print(escaped(redactor.text(traceback.format_exc()), keep="\n"), file=sys.stderr)
        outcome = replace(outcome_of(step.key, error), seconds=time.monotonic() - began)
    redactor.log(places.log(step.key))
    return redactor.outcome(outcome)


Keep = Callable[[str, Callable[[Path], Outcome]], Outcome]
"""Creates an output under a key in the state folder, see `_create_output`."""


def _create_output(
    key: str, make: Callable[[Path], Outcome], *, step: Step, places: Places, redactor: Redactor
) -> Outcome:
    """Create an output in a hidden folder, and publish it with its outcome by an atomic rename.

    An exception leaves nothing. If another process was faster, its output is returned.
    """
    began = time.monotonic()
    output = places.made(key)
    folder = output.with_name(f".{key}.{os.getpid()}")
    output.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        outcome = make(folder)
        outcome = replace(outcome, key=key, seconds=time.monotonic() - began, finished=now())
        outcome = redactor.outcome(outcome)
        (folder / FILE).write_text(to_json(outcome))
        try:
            os.rename(folder, output)
        except OSError:
            earlier = Intact(places).files(key, step.work)
            if earlier is None:
                raise
            return earlier
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _resolve(job: Job, places: Places) -> ResolvedJob:
    digests = Digests(places.state)
    real = localized(reveal_job(job), places.state / "remote")
    given = job_inputs(job, digests, places.state)
    key = quantize_key(job, given, digests)
    return ResolvedJob(job, real, given, key, work_key(job, given), sketches_digest(job, given))


# --- calibrate ----------------------------------------------------------------------------------------


def _calibrate(
    step: Step, places: Places, tell: Tell, threads: int, keep: Keep, *, walk: Walk | None = None
) -> Outcome:
    """Measure all statistics that the plans of the step's jobs require.

    A job that cannot be prepared or measured is skipped; its own step reports the reason.
    """
    rows = [_resolve(job, places) for job in step.jobs]
    shared = rows[0].shared
    if shared is None or calibrate_key(shared, [(row.job, row.given) for row in rows]) != step.key:
        raise DataError(f"the model, the data or a recipe of '{rows[0].job.name}' {CHANGED}")
    root = places.sketches(shared)
    root.mkdir(parents=True, exist_ok=True)
    used(root)
    if rows[0].prunes:
        progress = StepProgress(tell)
        _measure_for_pruning(rows, places, root, threads, progress)
        return keep(step.key, lambda _: Outcome(step.key, "done", counters={"runs": progress.samples}))
    tasks = CalibrationTasks()
    by_graph: dict[int, Prepared] = {}
    names: dict[str, str] = {}
    for number, row in enumerate(rows):
        if row.plan in names or (places.made(row.work).exists() and (root / PLANS / row.plan).exists()):
            continue  # measured together with an equal plan, or not needed any more
        tell("prepare", number, len(rows))
        prepared = _prepared(row)
        if prepared is not None:
            names[row.plan] = tasks.add(prepared.graph, prepared.plan)
            by_graph.setdefault(id(tasks.found[names[row.plan]].graph), prepared)
    progress = StepProgress(tell)
    chosen, real = list(tasks.found.values()), rows[0].real
    lost = _fill_caches(chosen, by_graph, real, root, threads=threads, progress=progress, walk=walk) if names else {}
    (root / PLANS).mkdir(exist_ok=True)
    for plan, name in names.items():
        if name not in lost:
            write_bytes(root / PLANS / plan, name.encode())
    counters = {"runs": progress.samples, "graphs": len(tasks.found) - len(lost)}
    return keep(step.key, lambda _: Outcome(step.key, "done", counters=counters))


def _measure_for_pruning(
    rows: Sequence[ResolvedJob], places: Places, root: Path, threads: int, progress: Progress
) -> None:
    """Measure what the budgets of several jobs are met by; measurements that are cached already are not repeated.

    A job that cannot be measured is skipped; its own step reports the reason.
    """
    for row in rows:
        if places.made(row.work).exists():
            continue
        with suppress(SbonnxError):
            recipe = load(recipe_of(row.real), overrides=_free_settings(row, root, threads))
            request = Request(
                row.real.model,
                recipe,
                backend_for(recipe.backend, recipe.version),
                data=with_preprocess(row.real.data, row.real.preprocess),
                split=row.real.split,
            )
            measure_pruning(request, progress)


def _free_settings(row: ResolvedJob, cache: Path | None, threads: int) -> dict[str, Any]:
    """Return settings that do not change the resulting file, by key."""
    more: dict[str, Any] = {} if cache is None else {"CALIBRATION.CACHE": str(cache)}
    if recipe_of(row.real).calibration.threads is None:
        more["CALIBRATION.THREADS"] = threads
    return more


def _prepared(row: ResolvedJob) -> Prepared | None:
    """Prepare the graph and plan of a job; None if there is nothing to share or the preparation fails.

    Statistics are not shared if equalization changes the graph by its data, as SmoothQuant does in transformers.
    """
    try:
        recipe = recipe_of(row.real)
        prepared = prepare(row.real.model, recipe, backend_for(recipe.backend, recipe.version))
    except SbonnxError:
        return None
    return prepared if prepared.plan.of_role("activation") and not equalizes_by_data(prepared) else None


def _fill_caches(
    tasks: list[CalibrationTask],
    by_graph: Mapping[int, Prepared],
    real: Job,
    root: Path,
    *,
    threads: int,
    progress: Progress,
    walk: Walk | None,
) -> dict[str, SbonnxError]:
    """Fill the calibration caches; return the errors of those that failed, by name."""
    sets: dict[int, Samples] = {}

    def samples(graph: Graph) -> Samples:
        prepared = by_graph[id(graph)]
        if id(graph) not in sets:
            options = run_options(prepared.recipe, progress)
            options = replace(options, threads=options.threads or threads)
            parts = divided(with_preprocess(real.data, real.preprocess), prepared, real.split, options)
            if parts is None:
                raise DataError(f"'{real.name}' has no calibration data")
            sets[id(graph)] = parts.fit
        return sets[id(graph)]

    def observe(some: list[CalibrationTask]) -> None:
        observe_tasks(some, samples, root, walk)

    try:
        observe(tasks)
        return {}
    except SbonnxError as error:
        if len(tasks) == 1:
            return {tasks[0].name: error}
    lost: dict[str, SbonnxError] = {}
    for task in tasks:  # one at a time: a failure of one must not affect the others
        try:
            observe([task])
        except SbonnxError as error:
            lost[task.name] = error
    return lost


# --- quantize -----------------------------------------------------------------------------------------


def _quantize(step: Step, places: Places, tell: Tell, threads: int, keep: Keep) -> Outcome:
    """Quantize, verify and judge one file.

    Files and metrics are stored separately from the verdict, so that they are reused if only the acceptance changed.
    """
    row = _resolve(step.jobs[0], places)
    if (row.key, row.work) != (step.key, step.work):
        raise DataError(f"the model, the data, the recipe or the metric of '{row.job.name}' {CHANGED}")

    def make(folder: Path) -> Outcome:
        return _quantize_into(row, places, folder, tell, threads)

    if step.work == step.key:
        return keep(step.key, make)
    lock = take_when_free(lock_path(places, step.work), tell)  # steps with different acceptance share the work
    try:
        work = Intact(places).files(step.work, step.work)
        adopted = work is not None
        if work is None:
            clear(places, step.work)
            work = keep(step.work, make)
    finally:
        if lock is not None:
            os.close(lock)
    return keep(step.key, lambda _: _check_acceptance(row, work, places, tell, adopted=adopted))


def _quantize_into(row: ResolvedJob, places: Places, folder: Path, tell: Tell, threads: int) -> Outcome:
    real = row.real
    recipe = recipe_of(real)
    target = folder / FILES / file_name(row.job)
    target.parent.mkdir()
    progress = StepProgress(tell)
    more = _free_settings(row, _sketches(row, places), threads)
    if real.accept.max_latency_ratio is not None and not recipe.verify.latency:
        more["VERIFY.LATENCY"] = True
    with _reporting_as_output(target, row.job):
        report = quantize(
            real.model,
            real.data,
            recipe=load(recipe, overrides=more) if more else recipe,
            output=target,
            split=real.split,
            preprocess=real.preprocess,
            progress=progress,
            evaluation=evaluation_of(real),
            details=True,
        )
    return Outcome(
        row.work,
        "unaccepted" if report.problems else "done",
        reason=_renamed("; ".join(report.problems), target, row.job),
        report=_report_values(report, row.job, recipe, target),
        counters={"runs": progress.samples},
        files={path.name: file_digest(path).hex() for path in sorted(target.parent.iterdir())},
    )


def evaluation_of(job: Job) -> EvaluationData | None:
    """Return the labelled data and the metric of a job, with the head of its recipe; None without them.

    Raises:
        RecipeError: there is no such metric or recipe.
    """
    wanted = job.evaluation
    if wanted is None:
        return None
    settings = {**vars(wanted), "split": wanted.split or job.split}
    return evaluation_data(**settings, preprocess=job.preprocess).with_head(recipe_of(job).verify.head)


def _check_acceptance(row: ResolvedJob, work: Outcome, places: Places, tell: Tell, *, adopted: bool) -> Outcome:
    tell("judge")
    accept, target = row.real.accept, places.made(row.work) / FILES / file_name(row.job)
    own: dict[str, dict[str, float]] | None = None
    reads: tuple[str, ...] = ()
    if accept.metric:
        with _reporting_as_output(target, row.job):
            own, reads = metric_values(accept.metric, Path(row.real.model), target, places, Redactor.of([row.job]))
    assert work.report is not None and work.result is not None and work.result.metrics is not None
    judged = judge(accept, work.result.metrics, own)
    metrics = replace(work.result.metrics, own=judged.metrics)
    reasons = [*([work.reason] if work.reason else []), *judged.reasons]
    return replace(
        work,
        status="unaccepted" if reasons else "done",
        reason="; ".join(reasons),
        report=json_values({**work.report, "model": row.job.model, "output": row.job.output, "metrics": metrics}),
        accepted=judged.rows,
        counters={"runs": 0, JUDGED_ALONE: 1} if adopted else work.counters,
        reads=reads,
    )


def _sketches(row: ResolvedJob, places: Places) -> Path | None:
    """Return the calibration cache of a plan; None if it was not measured: the step then measures it, with the same
    result.
    """
    if row.shared is None:
        return None
    root = places.sketches(row.shared)
    if row.prunes:
        return root if root.is_dir() else None
    try:
        folder = root / (root / PLANS / row.plan).read_text()
    except (OSError, ValueError):
        return None
    used(root)
    return folder if folder.is_dir() and folder.parent == root else None


@contextmanager
def _reporting_as_output(target: Path, job: Job) -> Iterator[None]:
    """Replace the temporary path of the file by its output path in error messages."""
    try:
        yield
    except SbonnxError as error:
        raise type(error)(_renamed(str(error), target, job)) from error


def _renamed(text: str, target: Path, job: Job) -> str:
    """Replace the temporary path of the file, and that of files beside it, by the output path."""
    beside = str(target.with_suffix("")), str(Path(job.output).with_suffix(""))
    return text.replace(str(target), job.output).replace(*beside)


def _report_values(report: Report, job: Job, recipe: Recipe, target: Path) -> dict[str, Any]:
    """Convert the report to JSON values, with the output path and recipe of the job."""
    final = replace(
        report.placed_at(job.output),
        model=job.model,
        settings=recipe.to_dict(),
        metrics=replace(report.metrics or Comparison(), own=()),
        # the page of a batch has no graphs: they are large
        details=None if report.details is None else replace(report.details, nodes=()),
    )
    values: dict[str, Any] = map_strings(partial(_renamed, target=target, job=job), json_values(final.to_dict()))
    return values
