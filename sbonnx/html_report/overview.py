"""What a page says of a batch: a row a job, a section a job, what was shared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sbonnx.html_report import figures
from sbonnx.html_report.accepted import Held, held_of
from sbonnx.html_report.figures import number, text
from sbonnx.html_report.network import Network, bits_of, least, network_of

STATUSES: Final = {
    "done": "good",
    "unaccepted": "warn",
    "refused": "warn",
    "failed": "bad",
    "crashed": "bad",
    "out of memory": "bad",
    "timed out": "bad",
    "skipped": "idle",
}
"""Every way to end, in the order in which they are counted, with the class that the style sheet colours."""

MOST_ROWS: Final = 4000
"""Layers listed on a page of many jobs, all together."""

MOST_PLACES: Final = 6000
"""Names of nodes listed with refusals and patterns, likewise."""

FEWEST: Final = 12
"""Rows that each job gets however many there are."""


@dataclass(frozen=True)
class Cell:
    """A figure in the overview: text, the value to sort by, and how it stands to what was wanted (None: nothing)."""

    said: str
    value: float | None
    wanted: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class JobRow:
    """A job: texts and cells of the overview, and its section.

    Attributes:
        anchor: id of its section.
        tone: class of its status.
        cells: SQNR, agreement, metric, size, latency, seconds, peak memory, in the order of `COLUMNS`.
        facts: (name, text) of what was asked for and what it took.
        network: None where there is no report.
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
    held: tuple[Held, ...]
    facts: tuple[tuple[str, str], ...]
    network: Network | None


COLUMNS: Final = (
    "SQNR, dB",
    "agreement",
    "metric",
    "size ratio",
    "latency ratio",
    "time",
    "peak memory",
)

FIGURES: Final = 5
"""How many of them are of the result: where there is none, the reason stands in their place."""


@dataclass(frozen=True)
class StepRow:
    """A step, those that jobs share among them."""

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
    """A batch, ready for the template."""

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


def overview_of(report: Mapping[str, Any]) -> Overview:
    """The view of `dataclasses.asdict` of a `sbonnx.batch.jobs.job.BatchReport`, or of that read back from JSON."""
    rows = report.get("rows") or ()
    reports = [row["outcome"]["report"] for row in rows if row["outcome"].get("report")]
    common = _common(reports)
    room = max(FEWEST, MOST_ROWS // max(len(reports), 1)), max(FEWEST, MOST_PLACES // max(len(reports), 1))
    anchors = _anchors([text(row["job"].get("name")) for row in rows])
    jobs = tuple(_job(row, anchor, common, room) for row, anchor in zip(rows, anchors, strict=True))
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
    )


def _job(row: Mapping[str, Any], anchor: str, common: frozenset[tuple[str, str]], room: tuple[int, int]) -> JobRow:
    job, outcome = row["job"], row["outcome"]
    report = outcome.get("report") or {}
    held = held_of(outcome)
    status = text(outcome.get("status"))
    network = network_of(report, rows=room[0], places=room[1], without=common) if report else None
    return JobRow(
        anchor=anchor,
        name=text(job.get("name")),
        model=figures.address(job.get("model")).rstrip("/").rpartition("/")[2].removesuffix(".onnx"),
        target=text(job.get("backend")),
        bits=_bits(job, report),
        status=status,
        tone=STATUSES.get(status, "bad"),
        reason=figures.address(outcome.get("reason")),
        up_to_date=bool(row.get("up_to_date")),
        cells=tuple(_cells(outcome, report.get("metrics") or {}, held)),
        held=held,
        facts=tuple((name, said) for name, said in _facts(job, outcome) if said),
        network=network,
    )


def _bits(job: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Widths that were run; those that were asked for, where it did not get so far."""
    asked = {text(key).lower(): text(value) for key, value in job.get("overrides") or ()}
    return bits_of(report) or asked.get("bits", "")


def _cells(outcome: Mapping[str, Any], metrics: Mapping[str, Any], held: Sequence[Held]) -> Iterable[Cell]:
    wanted: dict[str, Held] = {}
    for one in held:
        if one.column not in wanted or not one.met:  # what was not met is what one looks for
            wanted[one.column] = one
    outputs = metrics.get("outputs") or ()
    own: Mapping[str, Any] = next(iter(metrics.get("own") or ()), {})
    measured = {
        "sqnr": (least(outputs, "sqnr_db"), figures.decibel),
        "agreement": (least(outputs, "agreement"), figures.percent),
        "metric": (number(own.get("quantized")) if "metric" not in wanted else None, figures.plain),
        "size": (number(metrics.get("size_ratio")), figures.ratio),
        "latency": (number(metrics.get("latency_ratio")), figures.ratio),
    }
    for column, (value, said) in measured.items():
        judged = wanted.get(column)
        value = judged.value if judged is not None and (value is None or not judged.met) else value
        if judged is not None:
            yield Cell(
                said(value),
                value,
                f"{judged.what} {judged.wanted}" if column == "metric" else judged.wanted,
                judged.met,
            )
        else:
            yield Cell(said(value), value, text(own.get("name")) if column == "metric" else "")
    yield from _costs(outcome)


def _costs(outcome: Mapping[str, Any]) -> Iterable[Cell]:
    took, peak = number(outcome.get("seconds")), number(outcome.get("peak_bytes"))
    yield Cell(figures.seconds(took or None), took)
    yield Cell(figures.size(peak or None), peak or None)


def _facts(job: Mapping[str, Any], outcome: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    limits = job.get("limits") or {}
    yield "model", figures.address(job.get("model"))
    yield "data", figures.address(job.get("data"))
    yield "split", text(job.get("split"))
    yield "target", text(job.get("backend"))
    yield "recipe", figures.address(job.get("recipe"))
    yield "overrides", ", ".join(f"{text(key)}={figures.address(value)}" for key, value in job.get("overrides") or ())
    yield "output", figures.address(job.get("output"))
    yield "took", figures.seconds(outcome.get("seconds") or None) if outcome.get("seconds") else ""
    yield "peak memory", figures.size(outcome["peak_bytes"]) if outcome.get("peak_bytes") else ""
    yield "memory limit", figures.size(limits["memory"]) if limits.get("memory") else ""
    yield "time limit", figures.seconds(limits["seconds"]) if limits.get("seconds") else ""
    yield "attempts", figures.count(outcome.get("attempts")) if (outcome.get("attempts") or 1) > 1 else ""
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
            reason=figures.address(outcome.get("reason")),
            took=took,
            peak=peak,
            attempts=figures.count(outcome.get("attempts")),
            counters=", ".join(
                f"{text(name)} {figures.count(n)}" for name, n in (outcome.get("counters") or {}).items()
            ),
        )


def _common(reports: Sequence[Mapping[str, Any]]) -> frozenset[tuple[str, str]]:
    """Settings that all jobs have: said once, where there are several jobs."""
    if len(reports) < 2:  # nothing to share
        return frozenset()
    each = [frozenset(figures.flat(report.get("settings") or {})) for report in reports]
    return frozenset.intersection(*each)


def _anchors(names: Sequence[str]) -> list[str]:
    """An id a job, readable in a link and unique."""
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
    """A point in time (UTC) without its fractions; what is no time stays as it is."""
    when = _when(value)
    return text(value) if when is None else f"{when:%Y-%m-%d %H:%M:%S} UTC"


def _between(start: object, end: object) -> str:
    began, ended = _when(start), _when(end)
    if began is None or ended is None or (began.tzinfo is None) != (ended.tzinfo is None):
        return ""
    return figures.seconds((ended - began).total_seconds())
