"""View model of a batch page: one table row and one section per job, and the shared steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sbonnx.present.html import formatting
from sbonnx.present.html.batch_charts import HeatMap, Scatter, Sparkline, heat_map, scatter, sparkline
from sbonnx.present.html.formatting import number, text
from sbonnx.present.html.network import Network, bits_of, least, network_of
from sbonnx.report.verdict import runtime_of

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


@dataclass(frozen=True)
class AcceptanceRow:
    """One value compared with its threshold.

    Attributes:
        name, measured, threshold: display texts.
        met: whether the threshold is met.
        value: value to sort by; None if it could not be measured.
        column: column of the overview: sqnr, agreement, size, latency, or metric.
    """

    name: str
    measured: str
    threshold: str
    met: bool
    value: float | None
    column: str

    def __str__(self) -> str:
        return f"{self.name} {self.measured}, required {self.threshold}"


@dataclass(frozen=True)
class Cell:
    """A cell of the overview: text, value to sort by, threshold, and whether it is met (None: no threshold)."""

    text: str
    value: float | None
    threshold: str = ""
    met: bool | None = None


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
    "size ratio",
    "latency ratio",
    "time",
    "peak memory",
)

RESULT_COLUMNS: Final = 5
"""Number of columns that describe the result; without a result, the reason is shown there."""


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
    heat: HeatMap | None = None
    scatter: Scatter | None = None

    @property
    def with_history(self) -> bool:
        """Whether any job has values of earlier runs."""
        return any(job.spark is not None for job in self.jobs)


def overview_of(report: Mapping[str, Any]) -> Overview:
    """Build the view from `dataclasses.asdict` of a `BatchReport`, also after a round trip through JSON."""
    rows = report.get("rows") or ()
    reports = [row["outcome"]["report"] for row in rows if row["outcome"].get("report")]
    common = _common(reports)
    room = max(FEWEST, MOST_ROWS // max(len(reports), 1)), max(FEWEST, MOST_PLACES // max(len(reports), 1))
    anchors = _anchors([text(row["job"].get("name")) for row in rows])
    history = report.get("history") or {}
    in_order = tuple(
        _job(row, anchor, common, room, history.get(row["job"].get("name")) or ())
        for row, anchor in zip(rows, anchors, strict=True)
    )
    jobs = tuple(sorted(in_order, key=lambda job: URGENCY.get(job.tone, 0)))
    counts = Counter(job.status for job in jobs)
    order = [*STATUSES, *(status for status in counts if status not in STATUSES)]
    return Overview(
        title=text(report.get("title")),
        version=text(report.get("version")),
        started=_moment(report.get("started")),
        finished=_moment(report.get("finished")),
        took=_between(report.get("started"), report.get("finished")),
        counts=tuple((status, STATUSES.get(status, "bad"), counts[status]) for status in order if counts[status]),
        ok=all(job.status == "done" for job in jobs),
        jobs=jobs,
        steps=tuple(_steps(report)),
        common=tuple(sorted(common)),
        heat=heat_map(in_order),
        scatter=scatter(in_order, COLUMNS.index("latency ratio")),
    )


def _job(
    row: Mapping[str, Any],
    anchor: str,
    common: frozenset[tuple[str, str]],
    room: tuple[int, int],
    runs: Sequence[Mapping[str, Any]],
) -> JobRow:
    job, outcome = row["job"], row["outcome"]
    report = outcome.get("report") or {}
    acceptance = acceptance_of(outcome)
    status, advice = text(outcome.get("status")), row.get("advice") or {}
    requested = {text(key).lower(): text(value) for key, value in job.get("overrides") or ()}
    network = network_of(report, rows=room[0], places=room[1], without=common) if report else None
    return JobRow(
        anchor=anchor,
        name=text(job.get("name")),
        model=formatting.address(job.get("model")).rstrip("/").rpartition("/")[2].removesuffix(".onnx"),
        target=text(job.get("backend")),
        bits=bits_of(report) or requested.get("bits", ""),
        status=status,
        tone=STATUSES.get(status, "bad"),
        reason=formatting.address(outcome.get("reason")),
        up_to_date=bool(row.get("up_to_date")),
        cells=tuple(_cells(outcome, _own_metrics(report), acceptance)),
        acceptance=acceptance,
        facts=tuple((name, value) for name, value in _facts(job, outcome) if value),
        network=network,
        advice=(text(advice.get("text")), formatting.address(advice.get("command"))),
        spark=sparkline(runs),
    )


def _own_metrics(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metrics without the latency if it is that of another runtime."""
    metrics = report.get("metrics") or {}
    return metrics if text(report.get("backend")) in (runtime_of(metrics), "") else {**metrics, "latency_ratio": None}


def acceptance_of(outcome: Mapping[str, Any]) -> tuple[AcceptanceRow, ...]:
    """Read the acceptance rows (key, value, threshold, met) of an outcome. Values that were not measured are None."""
    reason = text(outcome.get("reason"))
    rows = []
    for what, measured, threshold, met in outcome.get("accepted") or ():
        key = text(what)
        name = NAMES.get(key, key.removeprefix(OWN))
        column = "metric" if key.startswith(OWN) else COLUMN_OF.get(name, "metric")
        value = None if f"accept.{key} cannot be judged" in reason else number(measured)
        display = ABSENT if value is None else _display(column, value)
        limit = f"{'≤' if key.startswith(AT_MOST) else '≥'} {_display(column, number(threshold))}"
        rows.append(AcceptanceRow(name, display, limit, bool(met), value, column))
    return tuple(rows)


def _display(column: str, value: float | None) -> str:
    if column == "metric":
        return formatting.plain(value)
    if column == "sqnr":
        return f"{formatting.decibel(value)} dB"
    return formatting.percent(value) if column == "agreement" else formatting.ratio(value)


def _cells(
    outcome: Mapping[str, Any], metrics: Mapping[str, Any], acceptance: Sequence[AcceptanceRow]
) -> Iterable[Cell]:
    thresholds: dict[str, AcceptanceRow] = {}
    for row in acceptance:
        if row.column not in thresholds or not row.met:  # an unmet threshold takes precedence
            thresholds[row.column] = row
    outputs = metrics.get("outputs") or ()
    own: Mapping[str, Any] = next(iter(metrics.get("own") or ()), {}) or _labelled(metrics.get("evaluation") or {})
    limited = bool(metrics.get("evaluation")) and "metric" in thresholds and thresholds["metric"].name == LOSS
    measured = {
        "sqnr": (least(outputs, "sqnr_db"), formatting.decibel),
        "agreement": (least(outputs, "agreement"), formatting.percent),
        "metric": (number(own.get("quantized")) if "metric" not in thresholds or limited else None, formatting.plain),
        "size": (number(metrics.get("size_ratio")), formatting.ratio),
        "latency": (number(metrics.get("latency_ratio")), formatting.ratio),
    }
    for column, (value, display) in measured.items():
        judged = thresholds.get(column)
        if column == "metric" and judged is not None and limited:
            limit = f"{text(own.get('name'))}, {judged.name} {judged.measured} {judged.threshold}"
            yield Cell(display(value), value, limit, judged.met)
            continue
        value = judged.value if judged is not None and (value is None or not judged.met) else value
        if judged is not None:
            yield Cell(
                display(value),
                value,
                f"{judged.name} {judged.threshold}" if column == "metric" else judged.threshold,
                judged.met,
            )
        else:
            yield Cell(display(value), value, text(own.get("name")) if column == "metric" else "")
    yield from _costs(outcome)


def _labelled(evaluation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return name and value of the metric on labelled data, as those of a job's own metric."""
    rows = evaluation.get("rows") or ()
    return {"name": evaluation["metric"], "quantized": rows[-1]["metric"]["value"]} if rows else {}


def _costs(outcome: Mapping[str, Any]) -> Iterable[Cell]:
    took, peak = number(outcome.get("seconds")), number(outcome.get("peak_bytes"))
    yield Cell(formatting.seconds(took or None), took)
    yield Cell(formatting.size(peak or None), peak or None)


def _facts(job: Mapping[str, Any], outcome: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    limits = job.get("limits") or {}
    yield "model", formatting.address(job.get("model"))
    yield "data", formatting.address(job.get("data"))
    yield "split", text(job.get("split"))
    yield "target", text(job.get("backend"))
    yield "recipe", formatting.address(job.get("recipe"))
    yield (
        "overrides",
        ", ".join(f"{text(key)}={formatting.address(value)}" for key, value in job.get("overrides") or ()),
    )
    yield "output", formatting.address(job.get("output"))
    yield "took", formatting.seconds(outcome.get("seconds") or None) if outcome.get("seconds") else ""
    yield "peak memory", formatting.size(outcome["peak_bytes"]) if outcome.get("peak_bytes") else ""
    yield "memory limit", formatting.size(limits["memory"]) if limits.get("memory") else ""
    yield "time limit", formatting.seconds(limits["seconds"]) if limits.get("seconds") else ""
    yield "attempts", formatting.count(outcome.get("attempts")) if (outcome.get("attempts") or 1) > 1 else ""
    yield "finished", _moment(outcome.get("finished"))


def _steps(report: Mapping[str, Any]) -> Iterable[StepRow]:
    titles = report.get("titles") or {}
    for key, outcome in (report.get("steps") or {}).items():
        status = text(outcome.get("status"))
        took, peak = _costs(outcome)
        yield StepRow(
            title=text(titles.get(key) or key),
            status=status,
            tone=STATUSES.get(status, "bad"),
            reason=formatting.address(outcome.get("reason")),
            took=took,
            peak=peak,
            attempts=formatting.count(outcome.get("attempts")),
            counters=", ".join(
                f"{text(name)} {formatting.count(n)}" for name, n in (outcome.get("counters") or {}).items()
            ),
        )


def _common(reports: Sequence[Mapping[str, Any]]) -> frozenset[tuple[str, str]]:
    """Return the settings that all jobs share, to be shown once; empty for a single job."""
    if len(reports) < 2:  # a single report has nothing to share
        return frozenset()
    each = [frozenset(formatting.flat(report.get("settings") or {})) for report in reports]
    return frozenset.intersection(*each)


def _anchors(names: Sequence[str]) -> list[str]:
    """Return one readable and unique HTML id per job."""
    found: list[str] = []
    taken: set[str] = set()
    for name in names:
        stem = "job-" + (re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "x")
        anchor, again = stem, 1
        while anchor in taken:
            again += 1
            anchor = f"{stem}-{again}"
        taken.add(anchor)
        found.append(anchor)
    return found


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
