"""``sbonnx batch``: quantize many models for many targets from one job file."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.present.text.printer import Printer
from sbonnx.present.text.tables import metric_text
from sbonnx.system.terminal import BELOW_QUALITY, DONE, LINE_LENGTH, one_line, relative_paths

if TYPE_CHECKING:
    from sbonnx.batch.jobs.batch_plan import BatchRequest
    from sbonnx.batch.jobs.job import HistoryRow, JobResult
    from sbonnx.report.figures import Evaluation

HELP: Final = "Quantize many models for many targets. Finished jobs are not repeated; a crash affects a single job."

COLUMNS: Final = ("job", "status", "metric", "lowest SQNR, dB", "size", "seconds")
"""Of the table on stdout; the reasons of jobs that are not done are on stderr."""

JOBS: Final = options.argument("jobs", "JOBS", "The job file: YAML.")
WORKERS: Final = options.option(
    "--workers N", int, "Number of parallel jobs; default: one for every two processors, at least two."
)
ONLY: Final = options.option("--only GLOB", str, "Run only the jobs whose names match.")
DRY_RUN: Final = options.switch(
    "--dry-run",
    "Open models and first samples, run nothing: show what is up to date, what cannot run, and the expected time.",
)
FORCE: Final = options.switch("--force", "Repeat finished jobs.")
SCHEDULER: Final = options.option("--scheduler ADDRESS", str, "Run on the workers of this Dask scheduler.", typed=True)

OPTIONS: Final = (JOBS, WORKERS, ONLY, DRY_RUN, FORCE, SCHEDULER, options.ORT_LIBRARY, *options.COMMON_WITH_PROGRESS)


def run(given: Arguments) -> int:
    from sbonnx.batch.api import fulfil, plain
    from sbonnx.batch.database import past
    from sbonnx.batch.jobs.batch_plan import request_of
    from sbonnx.batch.step_progress import make_watch

    printer, workers, force = given.printer(), given[WORKERS], given[FORCE]
    quiet, json_progress = given[options.QUIET], given[options.JSON_PROGRESS]
    wished = request_of(given[JOBS], only=given[ONLY])
    if given[DRY_RUN]:
        return _preview(printer, wished, workers, force=force)
    watch = make_watch(quiet=quiet, as_json=json_progress, expected=past(wished.places))
    report = fulfil(wished, workers=workers, force=force, scheduler=given[SCHEDULER], watch=watch)
    for row in report.rows:
        # failures of this run were printed by the watch; with --json-progress stderr carries only JSON lines
        if row.outcome.status != "done" and (quiet or row.up_to_date) and not json_progress:
            line = f"{row.job.name}: {row.outcome.status}: {relative_paths(row.outcome.reason)}"
            print(one_line(line, LINE_LENGTH), file=sys.stderr)
    printer.value("batch", plain(report))
    printer.table(f"{report.title}", COLUMNS, [_row(row, report.runs_of(row.job.name)) for row in report.rows])
    counts = Counter(row.outcome.status for row in report.rows)
    ends = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    printer.line(f"{len(report.rows)} jobs: {ends}; {sum(not row.up_to_date for row in report.rows)} of them run now")
    commands = sum(bool(row.advice) for row in report.rows)
    tries = f", with commands to try for {commands} of them" if commands else ""
    printer.line(f"report: {relative_paths(str(wished.places.output / 'report.html'))}{tries}")
    return report.exit_code


def _preview(printer: Printer, wished: BatchRequest, workers: int | None, *, force: bool) -> int:
    from sbonnx.batch.api import look
    from sbonnx.batch.engine import default_workers
    from sbonnx.batch.preview import BatchPreview, PlannedJob, PlannedStep, faults_of
    from sbonnx.batch.step_progress import clock

    left = look(wished, force=force)
    run, judged = {step.key for step in left.steps}, {step.key for step in left.judged}
    waiting = [job for step in left.steps if step.kind == "quantize" for job in step.jobs]
    faults = {name: relative_paths(text) for name, text in faults_of(waiting, wished.places.state).items()}
    rows = []
    for step in wished.steps:
        if step.kind == "calibrate":
            if step.key in run:
                rows.append((step.title, f"for {len(step.jobs)} jobs", "to be run", left.seconds.get(step.key), ""))
            continue
        for job in step.jobs:
            if job.name in faults:
                state = "cannot run"
            elif step.key in run:
                state = "to be run"
            elif step.key in judged:
                state = "acceptance to be checked"
            else:
                state = f"up to date ({left.settled[step.key].status})"
            rows.append((job.name, job.backend, state, left.seconds.get(step.key), relative_paths(job.output)))
    wall = left.wall(default_workers() if workers is None else workers)
    steps = tuple(
        PlannedStep(
            key=step.key,
            kind=step.kind,
            title=step.title,
            jobs=tuple(job.name for job in step.jobs),
            to_be_run=step.key in run or step.key in judged,
            seconds=left.seconds.get(step.key),
        )
        for step in wished.steps
        if step.key in run or step.kind == "quantize"
    )
    jobs = tuple(PlannedJob(job.name, job.model, job.backend, job.output) for job in wished.chosen)
    printer.value("batch-dry-run", BatchPreview(wished.title, jobs, steps, wall, faults))
    for name, reason in faults.items():
        print(one_line(f"{name}: cannot run: {reason}", LINE_LENGTH), file=sys.stderr)
    columns = ("job", "for", "state", "seconds, about", "output")
    printer.table(f"{wished.title}: {len(wished.chosen)} jobs", columns, rows)
    took = "" if wall is None else f", about {clock(wall)} judging by earlier runs"
    cannot = f", {len(faults)} jobs cannot run" if faults else ""
    printer.line(f"{len(run) + len(judged)} steps to be run{took}{cannot}")
    return BELOW_QUALITY if faults else DONE


def _metric(evaluation: Evaluation | None, runs: Sequence[HistoryRow]) -> str | None:
    """Return the metric on labelled data: name, value, difference from float, value of the run before; None without."""
    from sbonnx.present.html.overview import metric_before

    if evaluation is None or not evaluation.rows:
        return None
    row = evaluation.rows[-1]
    change = ""
    if row.difference is not None:
        change = f" ({metric_text(row.difference, evaluation, sign=True).partition(' (')[0]})"
    before = metric_before(runs, evaluation.metric)
    since = (
        ""
        if before is None
        else f"; before {metric_text(replace(row.metric, value=before), evaluation).partition(' (')[0]}"
    )
    return f"{evaluation.metric} {metric_text(row.metric, evaluation).partition(' (')[0]}{change}{since}"


def _row(row: JobResult, runs: Sequence[HistoryRow]) -> tuple[object, ...]:
    from sbonnx.report.comparison import Comparison
    from sbonnx.system.sizes import size_text

    report = row.outcome.result
    metrics = Comparison() if report is None or report.metrics is None else report.metrics
    return (
        row.job.name,
        f"{row.outcome.status}{', up to date' if row.up_to_date else ''}",
        _metric(metrics.evaluation, runs),
        min((row.sqnr_db for row in metrics.outputs if math.isfinite(row.sqnr_db)), default=None),
        size_text(metrics.bytes_quantized) if metrics.bytes_quantized else None,
        None if row.up_to_date else round(row.outcome.seconds, 1),
    )
