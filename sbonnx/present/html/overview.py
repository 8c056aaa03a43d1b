"""View model of a batch page: one table row and one section per job, and the shared steps."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from sbonnx.present.html import formatting
from sbonnx.present.html.batch_charts import HeatMap, Scatter, Sparkline, heat_map, scatter, sparkline
from sbonnx.present.html.formatting import text
from sbonnx.present.html.network import Network, bits_of, is_own_runtime, least, network_of
from sbonnx.report import Report
from sbonnx.report.comparison import Comparison

if TYPE_CHECKING:
    from sbonnx.batch.jobs.job import BatchReport, HistoryRow, Job, JobResult, Outcome

STATUSES: Final = {
    "done": "good",
    "unaccepted": "warn",
    "refused": "bad",
    "failed": "bad",
    "crashed": "bad",
    "out of memory": "bad",
    "timed out": "bad",
    "skipped": "idle",
}
"""CSS class by status, in display order."""

URGENCY: Final = {"bad": 0, "warn": 1, "idle": 2, "good": 3}
"""Order of jobs by tone: failures first."""

MOST_ROWS: Final = 4000
"""Maximum number of layer rows on a batch page, over all jobs."""

MOST_PLACES: Final = 6000
"""Maximum number of node names listed with refusals and patterns on a batch page, over all jobs."""

FEWEST: Final = 12
"""Minimum number of rows per job, however many jobs there are."""

AT_MOST: Final = "max_"
"""Prefix of the keys with an upper limit; all others have a lower limit."""

LOSS: Final = "loss"
"""Name of the loss in the metric of `eval`, which `max_loss` limits."""

OWN: Final = "min_metric."
"""Prefix of the keys of a job's own metrics."""

NAMES: Final = {
    "min_sqnr": "SQNR",
    "min_agreement": "agreement",
    "max_size_ratio": "size ratio",
    "max_loss": LOSS,
    "max_latency_ratio": "latency ratio",
}
"""Display names of the keys of a job file."""

COLUMN_OF: Final = {"SQNR": "sqnr", "size ratio": "size", "latency ratio": "latency", "agreement": "agreement"}

ABSENT: Final = "not measured"


def tone_of(status: str) -> str:
    """Return the CSS class of a status; one of a later version is bad."""
    return STATUSES.get(status, "bad")


@dataclass(frozen=True)
class AcceptanceRow:
    """One value compared with its threshold.

    Attributes:
        name, measured, threshold: display texts.
        met: whether the threshold is met.
        value: value to sort by; None if it could not be measured.
        column: column of the overview: sqnr, agreement, size, latency, or metric.
        limit: the threshold.
    """

    name: str
    measured: str
    threshold: str
    met: bool
    value: float | None
    column: str
    limit: float = math.nan

    def __str__(self) -> str:
        return f"{self.name} {self.measured}, required {self.threshold}"


@dataclass(frozen=True)
class Cell:
    """A cell of the overview: text, value to sort by, threshold, and whether it is met (None: no threshold).

    Attributes:
        used: loss in the metric over its limit (1: at the limit); None without a limit.
    """

    text: str
    value: float | None
    threshold: str = ""
    met: bool | None = None
    used: float | None = None


@dataclass(frozen=True)
class JobRow:
    """One job: texts and cells of the overview, and its section.

    Attributes:
        anchor: HTML id of its section.
        tone: CSS class of its status.
        cells: SQNR, agreement, metric, size, latency, seconds, peak memory, in the order of `COLUMNS`.
        facts: (name, text) of the job's settings and resource usage.
        network: None if there is no report.
        advice: what to try, and the command; "" if nothing is advised.
        metric, before: name of the metric that was asked for, and its value in the run before; "" without.
        spark: SQNR of the last runs; None without earlier ones.
    """

    anchor: str
    name: str
    model: str
    target: str
    bits: str
    status: str
    tone: str
    reason: str
    up_to_date: bool
    cells: tuple[Cell, ...]
    acceptance: tuple[AcceptanceRow, ...]
    facts: tuple[tuple[str, str], ...]
    network: Network | None
    advice: tuple[str, str] = ("", "")
    metric: str = ""
    before: str = ""
    spark: Sparkline | None = None

    @property
    def accepted(self) -> str:
        """Number of met thresholds: ``2 of 3 met``."""
        met = sum(row.met for row in self.acceptance)
        return f"{formatting.count(met)} of {formatting.count(len(self.acceptance))} met"


COLUMNS: Final = (
    "SQNR, dB",
    "agreement",
    "metric",
    "size, of float",
    "time, of float",
    "took",
    "peak memory",
)
"""Heads of the figures of a job; a metric that all jobs have is named instead of "metric"."""


@dataclass(frozen=True)
class StepRow:
    """One step, possibly shared by several jobs."""

    title: str
    status: str
    tone: str
    reason: str
    took: Cell
    peak: Cell
    attempts: str
    counters: str


@dataclass(frozen=True)
class Overview:
    """View model of a batch, for the template. Jobs are those that failed first, then in the order of the job file."""

    title: str
    version: str
    started: str
    finished: str
    took: str
    counts: tuple[tuple[str, str, int], ...]
    ok: bool
    jobs: tuple[JobRow, ...]
    steps: tuple[StepRow, ...]
    common: tuple[tuple[str, str], ...]
    columns: tuple[str, ...] = COLUMNS
    metric: str = ""
    heat: HeatMap | None = None
    scatter: Scatter | None = None

    @property
    def fresh(self) -> int:
        """Number of jobs that were up to date."""
        return sum(job.up_to_date for job in self.jobs)

    @property
    def with_history(self) -> bool:
        """Whether any job has values of earlier runs."""
        return any(job.spark is not None for job in self.jobs)


def overview_of(report: BatchReport) -> Overview:
    """Build the view of a batch."""
    rows = report.rows
    reports = [row.outcome.result for row in rows if row.outcome.result is not None]
    common = _common(reports)
    room = max(FEWEST, MOST_ROWS // max(len(reports), 1)), max(FEWEST, MOST_PLACES // max(len(reports), 1))
    names = {asked[0] for row in reports if row.metrics is not None and (asked := row.metrics.asked) is not None}
    only = text(min(names)) if len(names) == 1 else ""
    anchors = _anchors([text(row.job.name) for row in rows])
    in_order = tuple(
        _job(row, anchor, common, room, report.runs_of(row.job.name), only)
        for row, anchor in zip(rows, anchors, strict=True)
    )
    jobs = tuple(sorted(in_order, key=lambda job: URGENCY[job.tone]))
    counts = Counter(job.status for job in jobs)
    order = [*STATUSES, *(status for status in counts if status not in STATUSES)]
    return Overview(
        title=text(report.title),
        version=text(report.version),
        started=_moment(report.started),
        finished=_moment(report.finished),
        took=_between(report.started, report.finished),
        counts=tuple((status, tone_of(status), counts[status]) for status in order if counts[status]),
        ok=all(job.status == "done" for job in jobs),
        jobs=jobs,
        steps=tuple(_steps(report)),
        common=tuple(sorted(common)),
        columns=tuple(only or name if name == "metric" else name for name in COLUMNS),
        metric=only,
        heat=heat_map(in_order, COLUMNS.index("metric") if only else 0),
        scatter=scatter(in_order, COLUMNS.index("time, of float")),
    )


def _job(
    row: JobResult,
    anchor: str,
    common: frozenset[tuple[str, str]],
    room: tuple[int, int],
    runs: Sequence[HistoryRow],
    only: str,
) -> JobRow:
    job, outcome, advice = row.job, row.outcome, row.advice
    report = outcome.result
    asked = None if report is None or report.metrics is None else report.metrics.asked
    before = None if asked is None else metric_before(runs, asked[0])
    acceptance = acceptance_of(outcome)
    status = text(outcome.status)
    tone = tone_of(status)
    if report is not None and tone == "good" and report.verdict.tone in ("warn", "bad"):
        tone = "warn"  # as the bar of its section
    requested = {text(key).lower(): text(value) for key, value in job.overrides}
    bits = "" if report is None else bits_of(report)
    return JobRow(
        anchor=anchor,
        name=text(job.name),
        model=formatting.address(job.model).rstrip("/").rpartition("/")[2].removesuffix(".onnx"),
        target=text(job.backend),
        bits=bits or requested.get("bits", ""),
        status=status,
        tone=tone,
        reason=formatting.address(outcome.reason),
        up_to_date=row.up_to_date,
        cells=tuple(_cells(outcome, acceptance, before, only)),
        metric="" if asked is None else text(asked[0]),
        before=formatting.plain(before) if before is not None else "",
        acceptance=acceptance,
        facts=tuple((name, value) for name, value in _facts(job, outcome) if value),
        network=None if report is None else network_of(report, rows=room[0], places=room[1], without=common),
        advice=("", "") if advice is None else (text(advice.text), formatting.address(advice.command)),
        spark=sparkline(runs),
    )


def acceptance_of(outcome: Outcome) -> tuple[AcceptanceRow, ...]:
    """Read the acceptance rows of an outcome. Values that were not measured are None."""
    rows = []
    for key, measured, threshold, met in outcome.accepted:
        name = NAMES.get(key, key.removeprefix(OWN))
        column = "metric" if key.startswith(OWN) else COLUMN_OF.get(name, "metric")
        value = None if math.isnan(measured) else measured
        display = ABSENT if value is None else _display(column, value)
        limit = f"{'≤' if key.startswith(AT_MOST) else '≥'} {_display(column, threshold)}"
        rows.append(AcceptanceRow(text(name), display, limit, met, value, column, threshold))
    return tuple(rows)


def _display(column: str, value: float | None) -> str:
    if column == "metric":
        return formatting.plain(value)
    if column == "sqnr":
        return f"{formatting.decibel(value)} dB"
    return formatting.percent(value) if column == "agreement" else formatting.ratio(value)


def _hundredths(loss: float | None) -> str:
    return ABSENT if loss is None else formatting.plain(100 * loss, 3)


def metric_before(runs: Sequence[HistoryRow], name: str) -> float | None:
    """Return the value of a metric in the run before the last one; None if it has none."""
    return next((run.value for run in reversed(runs[:-1]) if run.metric == name and run.value is not None), None)


def _cells(outcome: Outcome, acceptance: Sequence[AcceptanceRow], before: float | None, only: str) -> Iterable[Cell]:
    """Yield the cells of a job; `only`: the name of the metric, if it is in the head of its column."""
    thresholds: dict[str, AcceptanceRow] = {}
    for row in acceptance:
        if row.column not in thresholds or not row.met:  # an unmet threshold takes precedence
            thresholds[row.column] = row
    report = outcome.result
    metrics = Comparison() if report is None or report.metrics is None else report.metrics
    name, quantized = metrics.asked or ("", None)
    name = text(name)
    named = f"{name}, " if name and name != only else ""
    since = "" if before is None else f"; before {formatting.plain(before)}"
    limited = metrics.evaluation is not None and "metric" in thresholds and thresholds["metric"].name == LOSS
    is_timed = report is not None and is_own_runtime(report)
    measured = {
        "sqnr": (least(row.sqnr_db for row in metrics.outputs), formatting.decibel),
        "agreement": (least(row.agreement for row in metrics.outputs), formatting.percent),
        "metric": (quantized if "metric" not in thresholds or limited else None, formatting.plain),
        "size": (metrics.size_ratio, formatting.ratio),
        "latency": (metrics.latency_ratio if is_timed else None, formatting.ratio),
    }
    for column, (value, display) in measured.items():
        judged = thresholds.get(column)
        if column == "metric" and judged is not None and limited:
            unit = " points" if metrics.evaluation is not None and metrics.evaluation.share else " %"
            limit = f"{_hundredths(judged.value)}{unit} lost, limit {_hundredths(judged.limit)}"
            used = judged.value / judged.limit if judged.value is not None and judged.limit > 0 else None
            yield Cell(display(value), value, f"{named}{limit}{since}", judged.met, used)
            continue
        value = judged.value if judged is not None and (value is None or not judged.met) else value
        if judged is not None:
            yield Cell(
                display(value),
                value,
                f"{judged.name} {judged.threshold}{since}" if column == "metric" else judged.threshold,
                judged.met,
            )
        else:
            yield Cell(display(value), value, f"{named}{since}".strip(" ,;") if column == "metric" else "")
    yield from _costs(outcome)


def _costs(outcome: Outcome) -> Iterable[Cell]:
    yield Cell(formatting.seconds(outcome.seconds or None), outcome.seconds)
    yield Cell(formatting.size(outcome.peak_bytes or None), outcome.peak_bytes or None)


def _facts(job: Job, outcome: Outcome) -> Iterable[tuple[str, str]]:
    limits = job.limits
    yield "model", formatting.address(job.model)
    yield "data", formatting.address(job.data)
    yield "split", text(job.split)
    yield "target", text(job.backend)
    yield "recipe", formatting.address(job.recipe)
    yield "overrides", ", ".join(f"{text(key)}={formatting.address(value)}" for key, value in job.overrides)
    yield "output", formatting.address(job.output)
    yield "took", formatting.seconds(outcome.seconds) if outcome.seconds else ""
    yield "peak memory", formatting.size(outcome.peak_bytes) if outcome.peak_bytes else ""
    yield "memory limit", formatting.size(limits.memory) if limits.memory else ""
    yield "time limit", formatting.seconds(limits.seconds) if limits.seconds else ""
    yield "attempts", formatting.count(outcome.attempts) if outcome.attempts > 1 else ""
    yield "finished", _moment(outcome.finished)


def _steps(report: BatchReport) -> Iterable[StepRow]:
    for key, outcome in report.steps.items():
        status = text(outcome.status)
        took, peak = _costs(outcome)
        yield StepRow(
            title=text(report.titles[key]),
            status=status,
            tone=tone_of(status),
            reason=formatting.address(outcome.reason),
            took=took,
            peak=peak,
            attempts=formatting.count(outcome.attempts),
            counters=", ".join(f"{text(name)} {formatting.count(n)}" for name, n in outcome.counters.items()),
        )


def _common(reports: Sequence[Report]) -> frozenset[tuple[str, str]]:
    """Return the settings that all jobs share, to be shown once; empty for a single job."""
    if len(reports) < 2:  # a single report has nothing to share
        return frozenset()
    return frozenset.intersection(*(frozenset(formatting.flat(report.settings)) for report in reports))


def _anchors(names: Sequence[str]) -> list[str]:
    """Return one readable and unique HTML id per job."""
    anchors: list[str] = []
    taken: set[str] = set()
    for name in names:
        stem = "job-" + (re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "x")
        anchor, again = stem, 1
        while anchor in taken:
            again += 1
            anchor = f"{stem}-{again}"
        taken.add(anchor)
        anchors.append(anchor)
    return anchors


def _when(value: object) -> datetime | None:
    try:
        return datetime.fromisoformat(text(value).replace("Z", "+00:00"))
    except ValueError:
        return None


def _moment(value: object) -> str:
    """Format a timestamp (UTC) without fractions; other text is returned unchanged."""
    when = _when(value)
    return text(value) if when is None else f"{when:%Y-%m-%d %H:%M:%S} UTC"


def elapsed(start: object, end: object) -> float | None:
    """Return the seconds between two timestamps; None if one is missing or only one has a time zone."""
    began, ended = _when(start), _when(end)
    if began is None or ended is None or (began.tzinfo is None) != (ended.tzinfo is None):
        return None
    return (ended - began).total_seconds()


def _between(start: object, end: object) -> str:
    seconds = elapsed(start, end)
    return "" if seconds is None else formatting.seconds(seconds)
