"""Geometry of the charts that the templates draw as inline SVG. Colours are defined in the style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sbonnx.html_report.figures import count, decibel, shortened

WIDTH: Final = 1080
"""Width of the drawing in SVG units; the page scales it."""

NAMES: Final = 320
"""Width of the label column, for names of `NAME_MOST` characters of monospaced text."""

NAME_MOST: Final = 44
VALUES: Final = 46
"""Space right of the bars, for the value of a bar that fills the axis."""

ROW: Final = 30
BAR: Final = 10
TOP: Final = 22
STRIP_HEIGHT: Final = 150
STRIP_LEFT: Final = 34

STEP_DB: Final = 10
HIGHEST_DB: Final = 80.0
"""Upper limit of the axis. Higher values mean no visible loss, and longer bars would only compress the others."""

LOWEST_DB: Final = -30.0


@dataclass(frozen=True)
class Layer:
    """Chart data of one layer: name, isolated and accumulated SQNR in dB; None: unknown."""

    name: str
    alone: float | None
    gathered: float | None


@dataclass(frozen=True)
class Bar:
    """A horizontal bar: x and width; `said` is the label at its end. cut: the value is outside the axis."""

    x: float
    width: float
    y: float
    said: str
    at: float
    cut: bool


@dataclass(frozen=True)
class Row:
    """One row of the bar chart: label, position and two bars (None: no value)."""

    name: str
    label: str
    y: float
    alone: Bar | None
    gathered: Bar | None


@dataclass(frozen=True)
class Tick:
    """One grid line of the axis: position and label."""

    at: float
    said: str


@dataclass(frozen=True)
class Bars:
    """A bar chart with layer names: the worst layers, or all layers of a small network."""

    width: int
    height: float
    top: int
    names: int
    zero: float
    ticks: tuple[Tick, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Hit:
    """Hover area of one layer in the strip, and its tooltip text."""

    x: float
    width: float
    said: str


@dataclass(frozen=True)
class Strip:
    """All layers of a network side by side: columns for the accumulated, marks for the isolated SQNR."""

    width: int
    height: float
    left: int
    bottom: float
    ticks: tuple[Tick, ...]
    columns: str
    marks: str
    hits: tuple[Hit, ...]


@dataclass(frozen=True)
class _Axis:
    """Linear map from dB to SVG units: `low` is at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return round(self.start + (self.end - self.start) * (inside - self.low) / (self.high - self.low), 1)

    def ticks(self) -> tuple[Tick, ...]:
        step = 2 * STEP_DB if self.high - self.low > 5 * STEP_DB else STEP_DB
        first = math.ceil(self.low / step) * step
        return tuple(Tick(self.at(value), count(value)) for value in range(first, int(self.high) + 1, step))


def _axis(layers: Sequence[Layer], start: float, end: float) -> _Axis:
    """Build an axis that covers all finite values in whole steps, and 0."""
    values = [value for layer in layers for value in (layer.alone, layer.gathered) if value is not None]
    finite = [value for value in values if math.isfinite(value)]
    high = math.ceil(max([*finite, STEP_DB]) / STEP_DB) * STEP_DB
    low = math.floor(min([*finite, 0.0]) / STEP_DB) * STEP_DB
    return _Axis(max(low, LOWEST_DB), min(high, HIGHEST_DB), start, end)


def bars(layers: Sequence[Layer]) -> Bars:
    """Build a bar chart with one row per layer, in the given order."""
    axis = _axis(layers, NAMES, WIDTH - VALUES)
    rows = []
    for index, layer in enumerate(layers):
        y = TOP + index * ROW
        rows.append(
            Row(
                name=layer.name,
                label=shortened(layer.name, NAME_MOST),
                y=y + ROW / 2,
                alone=_bar(axis, layer.alone, y + 4),
                gathered=_bar(axis, layer.gathered, y + 5 + BAR),
            )
        )
    return Bars(WIDTH, TOP + len(layers) * ROW + 4, TOP, NAMES - 10, axis.at(0), axis.ticks(), tuple(rows))


def _bar(axis: _Axis, value: float | None, y: float) -> Bar | None:
    if value is None or math.isnan(value):
        return None
    zero, end = axis.at(0), axis.at(value)
    return Bar(
        x=min(zero, end),
        width=max(round(abs(end - zero), 1), 1.0),
        y=y,
        said=decibel(value),
        at=max(zero, end) + 5,
        cut=not axis.low <= value <= axis.high,
    )


def strip(layers: Sequence[Layer], *, hovered: int) -> Strip:
    """Build a strip of all layers as columns, in the given order. Columns and marks are one SVG path each.

    Args:
        hovered: maximum number of layers for which tooltips are added.
    """
    bottom = float(STRIP_HEIGHT - 8)
    axis = _axis(layers, bottom, 12)
    pitch = (WIDTH - STRIP_LEFT - 4) / max(len(layers), 1)
    gap = 2 if pitch > 6 else pitch * 0.2
    wide = _short(max(pitch - gap, 0.4))
    columns, marks, hits = [], [], []
    zero = axis.at(0)
    for index, layer in enumerate(layers):
        x = STRIP_LEFT + index * pitch + gap / 2
        if layer.gathered is not None and not math.isnan(layer.gathered):
            columns.append(f"M{_short(x)} {_short(zero)}h{wide}V{_short(axis.at(layer.gathered))}h-{wide}z")
        if layer.alone is not None and not math.isnan(layer.alone):
            marks.append(f"M{_short(x)} {_short(axis.at(layer.alone))}h{wide}")
        if len(layers) <= hovered:
            said = f"{layer.name}: {decibel(layer.gathered)} dB, alone {decibel(layer.alone)} dB"
            hits.append(Hit(round(x - gap / 2, 1), round(pitch, 1), said))
    return Strip(WIDTH, STRIP_HEIGHT, STRIP_LEFT, bottom, axis.ticks(), "".join(columns), "".join(marks), tuple(hits))


def _short(value: float) -> str:
    """Format a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
