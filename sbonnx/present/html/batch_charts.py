"""Charts of a batch page: heat map of models and targets, sparklines of earlier runs, loss against time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sbonnx.present.html.charts import Tick, shade
from sbonnx.present.html.formatting import count, decibel, plain, text

if TYPE_CHECKING:
    from sbonnx.batch.jobs.job import HistoryRow

SPARK_WIDTH: Final = 84
SPARK_HEIGHT: Final = 22
"""Size of a sparkline in SVG units, which are pixels."""

FEWEST_RUNS: Final = 2
"""Number of values from which a sparkline is drawn."""

FEWEST_PAIRS: Final = 2
"""Number of pairs of model and target from which a heat map is drawn."""

SCATTER_HEIGHT: Final = 260
SCATTER_BOTTOM: Final = 34
"""Height of the scatter chart and of its horizontal axis in pixels."""

DONE: Final = "done"

MOST_LABELS: Final = 16
"""Number of points of a scatter chart up to which each has its name beside it."""

LABEL_HEIGHT: Final = 14
"""Vertical distance of two points in pixels from which both have a label."""

HIGHEST_DB: Final = 60.0
"""Upper limit of the axis of the SQNR, for files that equal float."""


USED: Final = (4.0, 2.0, 1.0, 0.75, 0.5, 0.25)
"""Shares of the allowed loss at which the shade of a job with a limit changes: above the first is the strongest."""


@dataclass(frozen=True)
class HeatCell:
    """One job in the heat map: its section, text, shade (0: largest loss, to 6; None: no figure) and tone."""

    anchor: str
    text: str
    label: str
    shade: int | None
    tone: str


@dataclass(frozen=True)
class HeatMap:
    """Models in rows, targets in columns. A cell has all jobs of its pair.

    Attributes:
        limited: whether colours are those of the loss in the metric against its limit; else of the SQNR.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[HeatCell, ...], ...]], ...]
    limited: bool = False


def heat_map(jobs: Sequence[Any], column: int = 0) -> HeatMap | None:
    """Build the heat map of a figure of jobs; None for a single model and target.

    Args:
        jobs: `sbonnx.present.html.overview.JobRow`.
        column: index of the cell of the figure: 0, the SQNR of the worst output, or that of the metric. Without limits
            of the metric, the SQNR gives the colours.
    """
    columns = tuple(dict.fromkeys(job.target for job in jobs))
    models = tuple(dict.fromkeys(job.model for job in jobs))
    if len(columns) * len(models) < FEWEST_PAIRS:
        return None
    pairs: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for job in jobs:
        pairs[job.model, job.target].append(job)
    measured = [cell for job in jobs if job.cells and (cell := job.cells[column]).value is not None]
    limited = bool(measured) and all(cell.used is not None for cell in measured)

    def cells_of(pair: Sequence[Any]) -> tuple[HeatCell, ...]:
        return tuple(_cell(job, column, several=len(pair) > 1, limited=limited) for job in pair)

    rows = ((model, tuple(cells_of(pairs[model, target]) for target in columns)) for model in models)
    return HeatMap(columns, tuple(rows), limited)


def _cell(job: Any, column: int, *, several: bool, limited: bool) -> HeatCell:
    """Return the cell of a job, with its bits if the pair has several jobs."""
    shown, value = (job.cells[column].text, job.cells[0].value) if job.cells else ("", None)
    named = f", {job.metric} {shown}" if column and job.cells[column].value is not None else ""
    named += f", before {job.before}" if job.before else ""
    label = f"{job.name}: {job.status}{named}" + ("" if value is None else f", SQNR {decibel(value)} dB")
    if job.cells[column].value is None:
        shown = job.status if value is None else f"{decibel(value)} dB"
    figure = f"{shown}{'' if job.status in (DONE, shown) else ' ✗'}"
    colour = shade(value)
    if limited:
        used = job.cells[column].used if job.cells else None
        colour = None if used is None else sum(used <= share for share in USED)
    return HeatCell(job.anchor, f"{job.bits}: {figure}" if several and job.bits else figure, label, colour, job.tone)


@dataclass(frozen=True)
class Sparkline:
    """Values of the last runs: an SVG path, the last point, and a sentence with all values."""

    path: str
    x: float
    y: float
    label: str
    change: float | None


def sparkline(runs: Sequence[HistoryRow]) -> Sparkline | None:
    """Draw the SQNR of the last runs, oldest first; None with fewer than two. Runs without a value leave a gap."""
    values = [run.sqnr_db for run in runs]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) < FEWEST_RUNS:
        return None
    low, high = min(finite), max(finite)
    low, high = (low - 1, high + 1) if high - low < 1 else (low, high)  # chance is not a jump
    parts, down, last = [], False, (0.0, 0.0)
    for index, value in enumerate(values):
        if value is None or not math.isfinite(value):
            down = False
            continue
        x = 3 + (SPARK_WIDTH - 6) * index / max(len(values) - 1, 1)
        y = SPARK_HEIGHT - 4 - (SPARK_HEIGHT - 8) * (value - low) / (high - low)
        parts.append(f"{'L' if down else 'M'}{x:.1f} {y:.1f}")
        down, last = True, (round(x, 1), round(y, 1))
    label = f"SQNR of the last {len(values)} runs, dB: {', '.join(decibel(value) for value in values)}"
    return Sparkline("".join(parts), *last, label, finite[-1] - finite[-2])


@dataclass(frozen=True)
class ScatterPoint:
    """One job: position, percent of the width and pixels from the top; tone, section, tooltip and name."""

    x: float
    y: float
    tone: str
    anchor: str
    label: str
    name: str


@dataclass(frozen=True)
class Scatter:
    """SQNR against time relative to float, one point a job. Horizontal positions are percentages of the width."""

    height: int
    bottom: float
    one: float
    xs: tuple[Tick, ...]
    ys: tuple[Tick, ...]
    points: tuple[ScatterPoint, ...]


def scatter(jobs: Sequence[Any], latency: int, sqnr: int = 0) -> Scatter | None:
    """Build the chart of jobs that have both figures; None for fewer than two.

    Args:
        jobs: `sbonnx.present.html.overview.JobRow`.
        latency, sqnr: index of the figures in the cells.
    """
    measured: list[tuple[Any, float, float]] = [
        (job, job.cells[latency].value, min(job.cells[sqnr].value, HIGHEST_DB))
        for job in jobs
        if job.cells[latency].value is not None
        and job.cells[sqnr].value is not None
        and math.isfinite(job.cells[latency].value)
        and not math.isnan(job.cells[sqnr].value)
    ]
    if len(measured) < 2:
        return None
    left = 0.9 * min(1.0, *(time for _, time, _ in measured))
    right = max(1.2, *(time * 1.05 for _, time, _ in measured))
    low = math.floor(min(value for _, _, value in measured) / 10) * 10.0
    high = max(low + 10.0, *(value + 2 for _, _, value in measured))
    bottom = SCATTER_HEIGHT - SCATTER_BOTTOM

    def x(time: float) -> float:
        return round(100 * (time - left) / (right - left), 2)

    def y(value: float) -> float:
        return round(bottom - (bottom - 12) * (value - low) / (high - low), 1)

    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 50, 1000) if (right - left) / step <= 8 or step == 1000)
    first = math.ceil(left / step)
    xs = tuple(Tick(x(step * index), plain(step * index, 2)) for index in range(first, int(right / step) + 1))
    ys = tuple(Tick(y(value), count(value)) for value in range(int(low), int(high) + 1, 10))
    points: list[ScatterPoint] = []
    for job, time, value in measured:
        free = len(measured) <= MOST_LABELS and all(abs(y(value) - p.y) >= LABEL_HEIGHT for p in points if p.name)
        told = f"{text(job.name)}: {decibel(value)} dB, {time:.2f} of the time"
        points.append(ScatterPoint(x(time), y(value), job.tone, job.anchor, told, text(job.name) if free else ""))
    return Scatter(SCATTER_HEIGHT, bottom, x(1.0), xs, ys, tuple(points))
