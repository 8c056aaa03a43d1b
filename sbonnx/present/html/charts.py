"""Geometry of charts: axes in dB on which longer is worse, bars, strips of layers, histograms, shades of loss.

Horizontal positions are percentages of the width of the drawing: charts fit any screen, and texts are not scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sbonnx.present.html.formatting import count, decibel, percent, plain, text
from sbonnx.report.details import TensorHistogram

STEP_DB: Final = 10
HIGHEST_DB: Final = 80.0
"""Upper limit of an axis. Higher values mean no visible loss, and would only compress the others."""

LOWEST_DB: Final = -30.0

SHADES: Final = (10.0, 15.0, 20.0, 25.0, 30.0, 40.0)
"""SQNR in dB at which the shade changes: below the first is the strongest."""

FEW_BARS: Final = 8
"""Number of layers of a bar chart that are shown at once."""

STRIP_HEIGHT: Final = 130
HOVERED: Final = 400
"""Maximum number of layers of a strip with tooltips; more are too narrow to hover over."""

HISTOGRAM_HEIGHT: Final = 90
FEW_LEVELS: Final = 16
"""Number of quantized values up to which a histogram marks each."""

LEAST_SHARE: Final = 1e-4
"""Smallest share that is printed as a figure."""

NEAR_BORDER: Final = 12.0
"""Distance from a border, in percent, within which the label of a mark is aligned with the border."""


def shade(value: float | None) -> int | None:
    """Return the shade of an SQNR in dB: 0 (lowest) to 6; None if there is none."""
    return None if value is None or math.isnan(value) else sum(value >= limit for limit in SHADES)


@dataclass(frozen=True)
class Tick:
    """A grid line: position in percent, or pixels on a vertical axis, and label."""

    at: float
    label: str


@dataclass(frozen=True)
class LossAxis:
    """Linear map from dB to lengths: `best` is 0, `worst` is `full`."""

    best: float
    worst: float
    full: float = 100.0

    def at(self, value: float) -> float:
        """Return the length of a value, which is cut at the ends of the axis."""
        inside = min(max(value, self.worst), self.best)
        return round(self.full * (self.best - inside) / (self.best - self.worst), 2)

    def ticks(self) -> tuple[Tick, ...]:
        """Return grid lines in whole steps, from the best value to the worst."""
        step = 2 * STEP_DB if self.best - self.worst > 5 * STEP_DB else STEP_DB
        first = math.floor(self.best / step) * step
        return tuple(Tick(self.at(value), count(value)) for value in range(first, int(self.worst) - 1, -step))


def loss_axis(values: Sequence[float | None], full: float = 100.0, *, limit: float | None = None) -> LossAxis:
    """Build an axis that covers all finite values, and a limit, in whole steps."""
    finite = [min(value, HIGHEST_DB) for value in (*values, limit) if value is not None and math.isfinite(value)]
    best = math.ceil(max(finite, default=STEP_DB) / STEP_DB) * STEP_DB
    worst = math.floor(min(finite, default=0.0) / STEP_DB) * STEP_DB
    lowest = max(min(float(worst), best - STEP_DB), LOWEST_DB)
    return LossAxis(max(best, lowest + STEP_DB), lowest, full)


@dataclass(frozen=True)
class BarPart:
    """Part of a bar: class of its colour, begin and length in percent."""

    kind: str
    begin: float
    length: float


@dataclass(frozen=True)
class LayerBar:
    """The bar of one layer, split by cause.

    Attributes:
        label: the value in dB.
        told: the causes with their values, for those who cannot see the colours.
        children: the bars of its layers, if it is a block.
    """

    name: str
    label: str
    segments: tuple[BarPart, ...]
    told: str = ""
    children: tuple[LayerBar, ...] = ()


@dataclass(frozen=True)
class Bars:
    """A bar chart, worst first.

    Attributes:
        series: (class, title) of the causes that occur.
        ticks: grid lines.
        rows: one bar a layer.
        limit: position of the limit of the outputs; None without one.
        few: number of bars that are shown at once.
    """

    series: tuple[tuple[str, str], ...]
    ticks: tuple[Tick, ...]
    rows: tuple[LayerBar, ...]
    limit: Tick | None = None
    few: int = FEW_BARS


@dataclass(frozen=True)
class Loss:
    """Isolated SQNR of a layer in dB, and of its parts by the class of their colour, where they were measured."""

    name: str
    value: float | None
    parts: Mapping[str, float | None]


KINDS: Final = {"weights": "by weights", "inputs": "by inputs", "isolated": "isolated"}
"""Titles of the colours of bars."""


def bar_chart(losses: Sequence[Loss], limit: float | None = None) -> Bars:
    """Build a bar chart of layers in the given order: a longer bar is a larger loss.

    Args:
        limit: SQNR in dB that outputs must reach.
    """
    axis = loss_axis([row.value for row in losses], limit=limit)
    rows = tuple(_bar(row, axis) for row in losses)
    used = {segment.kind for row in rows for segment in row.segments}
    line = None if limit is None or not losses else Tick(axis.at(limit), f"limit of the outputs, {decibel(limit)}")
    return Bars(tuple((kind, title) for kind, title in KINDS.items() if kind in used), axis.ticks(), rows, line)


def _bar(row: Loss, axis: LossAxis) -> LayerBar:
    """Draw a bar whose segments are the shares of the error energy."""
    noise = {
        kind: 10 ** (-min(max(value, LOWEST_DB), HIGHEST_DB) / 10)
        for kind, value in row.parts.items()
        if value is not None and not math.isnan(value)
    } or {"isolated": 1.0}
    length = 0.0 if row.value is None or math.isnan(row.value) else axis.at(row.value)
    segments, begin = [], 0.0
    for kind, energy in noise.items():
        share = round(length * energy / sum(noise.values()), 2)
        segments.append(BarPart(kind, round(begin, 2), share))
        begin += share
    told = ", ".join(f"{decibel(value)} {KINDS[kind]}" for kind, value in row.parts.items() if value is not None)
    return LayerBar(row.name, decibel(row.value), tuple(part for part in segments if part.length), told)


@dataclass(frozen=True)
class Hit:
    """Hover area of one layer in the strip, in units of the strip, and its tooltip text."""

    x: float
    width: float
    tooltip: str


@dataclass(frozen=True)
class Strip:
    """All layers of a network side by side: columns for the accumulated, marks for the isolated SQNR.

    Attributes:
        width: number of layers; the drawing is stretched to the width of the page.
        height: in pixels, which are the unit of vertical positions.
        limit: vertical position of the limit of the outputs; None without one.
    """

    width: int
    height: int
    ticks: tuple[Tick, ...]
    columns: str
    marks: str
    hits: tuple[Hit, ...]
    limit: float | None = None


def strip_chart(
    names: Sequence[str],
    isolated: Sequence[float | None],
    accumulated: Sequence[float | None],
    *,
    hovered: int,
    limit: float | None = None,
) -> Strip:
    """Build a strip of all layers as columns, in the given order. Columns and marks are one SVG path each.

    Args:
        hovered: maximum number of layers for which tooltips are added.
        limit: SQNR in dB that outputs must reach.
    """
    axis = loss_axis([*isolated, *accumulated], STRIP_HEIGHT - 12, limit=limit)
    bottom = STRIP_HEIGHT - 2

    def y(value: float) -> str:
        return f"{bottom - axis.at(value):.1f}"

    columns, marks, hits = [], [], []
    for x, (name, alone, gathered) in enumerate(zip(names, isolated, accumulated, strict=True)):
        if gathered is not None and not math.isnan(gathered):
            columns.append(f"M{x}.1 {bottom}h.8V{y(gathered)}h-.8z")
        if alone is not None and not math.isnan(alone):
            marks.append(f"M{x}.1 {y(alone)}h.8")
        if len(names) <= hovered:
            hits.append(Hit(x, 1, f"{name}: {decibel(gathered)} dB, isolated {decibel(alone)} dB"))
    ticks = tuple(Tick(round(bottom - tick.at, 1), tick.label) for tick in axis.ticks())
    line = None if limit is None else float(y(limit))
    return Strip(max(len(names), 1), STRIP_HEIGHT, ticks, "".join(columns), "".join(marks), tuple(hits), line)


@dataclass(frozen=True)
class Mark:
    """A labelled position of a histogram: in percent of its width, with the SVG text-anchor of the label."""

    at: float
    label: str
    anchor: str


@dataclass(frozen=True)
class HistogramChart:
    """Histogram of one tensor, in percent of its width and in pixels of its height.

    Attributes:
        title: the tensor.
        more: role and quantized type.
        bars: SVG path of the bars, whose heights are logarithms of the counts.
        covered: (left, right) ends of the range that the quantized values cover.
        levels: SVG path of the quantized values if there are few; "" otherwise.
        marks: smallest and largest value, and the ends of the range.
        sentence: how much is clipped, and how the range relates to the values.
    """

    title: str
    more: str
    height: int
    bars: str
    covered: tuple[float, float]
    levels: str
    marks: tuple[Mark, ...]
    sentence: str


def histogram_chart(row: TensorHistogram) -> HistogramChart | None:
    """Draw the histogram of a tensor; None if all values are equal."""
    low, high, step, counts = row.low, row.high, row.step, row.counts
    first, last = row.covered
    if not counts or high <= low:
        return None
    left, right = min(low, first), max(high, last)

    def at(value: float) -> float:
        return round(100 * (value - left) / (right - left), 2)

    most = math.log1p(max(counts)) or 1.0
    wide = (high - low) / len(counts)
    bars = []
    for index, times in enumerate(counts):
        if times:
            x, up = at(low + index * wide), (HISTOGRAM_HEIGHT - 8) * math.log1p(times) / most
            bars.append(f"M{x} {HISTOGRAM_HEIGHT}v-{up:.1f}H{at(low + (index + 1) * wide)}V{HISTOGRAM_HEIGHT}z")
    levels = round((last - first) / step) + 1 if step > 0 else 0
    drawn = [at(first + index * step) for index in range(levels)] if levels <= FEW_LEVELS else []
    marks = {at(value): value for value in (low, high, first, last)}
    return HistogramChart(
        title=text(row.tensor),
        more=f"{text(row.role)}, {text(row.label)}",
        height=HISTOGRAM_HEIGHT,
        bars="".join(bars),
        covered=(at(first), at(last)),
        levels="".join(f"M{x} 0V{HISTOGRAM_HEIGHT}" for x in drawn),
        marks=tuple(
            Mark(x, plain(value, 3), "start" if x < NEAR_BORDER else "end" if x > 100 - NEAR_BORDER else "middle")
            for x, value in sorted(_apart(marks).items())
        ),
        sentence=_histogram_sentence(row, (low, high), (first, last)),
    )


def _apart(marks: Mapping[float, float]) -> dict[float, float]:
    """Leave out marks whose labels would overlap with one before."""
    kept: dict[float, float] = {}
    for x, value in marks.items():
        if all(abs(x - other) > 2 * NEAR_BORDER for other in kept):
            kept[x] = value
    return kept


def _histogram_sentence(row: TensorHistogram, values: tuple[float, float], covered: tuple[float, float]) -> str:
    share = row.clipped
    unit = " steps of the channel's scale" if row.unit == "step" else ""
    beyond = values[0] < covered[0] or values[1] > covered[1]
    none = "no value is more than half a step outside" if beyond else "no value is clipped"
    shown = percent(share) if share >= LEAST_SHARE else "less than 0.01 %"
    clipped = f"{shown} of the values are clipped" if share else none
    used = (min(values[1], covered[1]) - max(values[0], covered[0])) / (covered[1] - covered[0])
    unused = f"; the values use {percent(max(used, 0.0))} of the range" if used < 0.75 else ""
    return f"values {plain(values[0], 3)} to {plain(values[1], 3)}, range {plain(covered[0], 3)} to " + (
        f"{plain(covered[1], 3)}{unit}: {clipped}{unused}"
    )
