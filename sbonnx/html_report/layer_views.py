"""Layers of a report page: table rows, and the geometry of the charts that the templates draw as inline SVG."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sbonnx.html_report.formatting import count, decibel, number, shortened, text

ROLES: Final = ("activation", "weight", "bias")

ALL_NAMED: Final = 24
"""Maximum number of layers for which a chart with names shows all of them; for larger networks it shows the worst."""

WORST: Final = 20

HOVERED: Final = 400
"""Maximum number of layers of a strip with tooltips; more are too narrow to hover over."""

WIDTH: Final = 1080
"""Width of the drawing in SVG units; the page scales it."""

NAMES_WIDTH: Final = 320
"""Width of the label column, for names of `NAME_LENGTH` characters of monospaced text."""

NAME_LENGTH: Final = 44
VALUES_WIDTH: Final = 46
"""Space right of the bars, for the value of a bar that fills the axis."""

ROW_HEIGHT: Final = 30
BAR_HEIGHT: Final = 10
TOP: Final = 22
STRIP_HEIGHT: Final = 150
STRIP_LEFT: Final = 34

STEP_DB: Final = 10
HIGHEST_DB: Final = 80.0
"""Upper limit of the axis. Higher values mean no visible loss, and longer bars would only compress the others."""

LOWEST_DB: Final = -30.0


@dataclass(frozen=True)
class LayerRow:
    """A quantized activation, and the weights of the layer that reads it.

    Attributes:
        order: position in the network, from 1; None if the report does not contain it.
        node, tensor: names of the first reader and of the quantized tensor. The tensor is "" if the row is only about
            weights: the input is not quantized, or in the row of its first reader.
        activation, weights: types; "" if not quantized.
        isolated, accumulated: isolated and accumulated SQNR of the tensor in dB.
        scale: scale of the first channel.
    """

    order: int | None
    node: str
    tensor: str
    activation: str
    weights: str
    isolated: float | None
    accumulated: float | None
    scale: float | None


@dataclass(frozen=True)
class Widths:
    """Number of tensors of each role with a type."""

    label: str
    counts: tuple[int, ...]


@dataclass(frozen=True)
class ChartBar:
    """A horizontal bar: x and width; `label` is the value as text, at its end. cut: the value is outside the axis."""

    x: float
    width: float
    y: float
    label: str
    at: float
    cut: bool


@dataclass(frozen=True)
class BarRow:
    """One row of the bar chart: label, position and two bars (None: no value)."""

    name: str
    label: str
    y: float
    isolated: ChartBar | None
    accumulated: ChartBar | None


@dataclass(frozen=True)
class Tick:
    """One grid line of the axis: position and label."""

    at: float
    label: str


@dataclass(frozen=True)
class Bars:
    """A bar chart with layer names: the worst layers, or all layers of a small network."""

    width: int
    height: float
    top: int
    names: int
    zero: float
    ticks: tuple[Tick, ...]
    rows: tuple[BarRow, ...]


@dataclass(frozen=True)
class Hit:
    """Hover area of one layer in the strip, and its tooltip text."""

    x: float
    width: float
    tooltip: str


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
class Layers:
    """View model of the layers of one network.

    Attributes:
        rows: worst first, truncated to the maximum of the page.
        total: number of rows before truncation.
        ordered: whether the strip is in network order; else worst first.
        bars, strip: charts; None if nothing was measured, or (strip) if the bars already show all layers.
        widths: types with counts by `ROLES`; without weights if the report does not contain them.
        complete: whether weights and biases are included.
    """

    rows: tuple[LayerRow, ...]
    total: int
    ordered: bool
    bars: Bars | None
    strip: Strip | None
    widths: tuple[Widths, ...]
    complete: bool

    @property
    def with_weights(self) -> bool:
        return any(row.weights for row in self.rows)

    @property
    def with_order(self) -> bool:
        return any(row.order is not None for row in self.rows)


def layers_of(report: Mapping[str, Any], most: int) -> Layers:
    """Build the view of the layers of one report, with at most `most` rows."""
    sites = report.get("sites") or ()
    rows = _rows(report.get("layers") or (), sites)
    measured = [row for row in rows if row.isolated is not None or row.accumulated is not None]
    ordered = bool(measured) and all(row.order is not None for row in measured)
    in_order = sorted(measured, key=lambda row: row.order or 0) if ordered else measured
    small = len(measured) <= ALL_NAMED
    shown = in_order if small else measured[: min(WORST, most)]
    return Layers(
        rows=tuple(rows[:most]),
        total=len(rows),
        ordered=ordered,
        bars=bar_chart(_labelled(shown)) if shown else None,
        strip=None if small else strip_chart(_labelled(in_order), hovered=min(most, HOVERED)),
        widths=_widths(report, sites),
        complete=bool(sites),
    )


def _labelled(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Make the node names unique: if a node reads several tensors, the tensor is named too."""
    times = Counter(row.node for row in rows)
    return [row if times[row.node] == 1 else replace(row, node=f"{row.node} ← {row.tensor}") for row in rows]


def _rows(layers: Sequence[Mapping[str, Any]], sites: Sequence[Mapping[str, Any]]) -> list[LayerRow]:
    """Return one row per activation, worst first, then the layers with quantized weights only."""
    weights: dict[str, list[str]] = {}
    order: dict[str, int] = {}
    for site in sites:
        if site.get("role") == "weight":
            weights.setdefault(text(site.get("node")), []).append(text(site.get("label")))
        if site.get("role") != "bias":
            order.setdefault(_place(site), len(order) + 1)
    rows = [
        LayerRow(
            order=order.get(_place({**row, "role": "activation"})),
            node=text(row.get("node")),
            tensor=text(row.get("tensor")),
            activation=text(row.get("label")),
            weights=_listed(weights.get(text(row.get("node")), ())),
            isolated=number(row.get("alone_db")),
            accumulated=number(row.get("sqnr_db")),
            scale=number(row.get("scale")),
        )
        for row in layers
    ]
    rows.sort(key=lambda row: (_or_last(row.accumulated), _or_last(row.isolated)))
    seen = {row.node for row in rows}
    for site in sites:
        node = text(site.get("node"))
        if site.get("role") == "weight" and node not in seen:
            seen.add(node)
            rows.append(LayerRow(order.get(_place(site)), node, "", "", _listed(weights[node]), None, None, None))
    rank = {place: index for index, place in enumerate(sorted({row.order for row in rows if row.order}), 1)}
    return [row if row.order is None else replace(row, order=rank[row.order]) for row in rows]


def _place(site: Mapping[str, Any]) -> str:
    """Return a key that identifies an activation or weight in both `layers` and `sites`."""
    return f"{site.get('role')}\n{site.get('tensor')}\n{site.get('node')}"


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(labels))


def _or_last(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _widths(report: Mapping[str, Any], sites: Sequence[Mapping[str, Any]]) -> tuple[Widths, ...]:
    """Count the types by role, most frequent first."""
    rows = sites or [{"role": "activation", "label": row.get("label")} for row in report.get("layers") or ()]
    counts: Counter[tuple[str, str]] = Counter((text(row.get("label")), text(row.get("role"))) for row in rows)
    labels = dict.fromkeys(label for label, _ in counts)
    widths = [Widths(label, tuple(counts[label, role] for role in ROLES)) for label in labels]
    return tuple(sorted(widths, key=lambda row: (-sum(row.counts), row.label)))


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


def _axis(layers: Sequence[LayerRow], start: float, end: float) -> _Axis:
    """Build an axis that covers all finite values in whole steps, and 0."""
    values = [value for layer in layers for value in (layer.isolated, layer.accumulated) if value is not None]
    finite = [value for value in values if math.isfinite(value)]
    high = math.ceil(max([*finite, STEP_DB]) / STEP_DB) * STEP_DB
    low = math.floor(min([*finite, 0.0]) / STEP_DB) * STEP_DB
    return _Axis(max(low, LOWEST_DB), min(high, HIGHEST_DB), start, end)


def bar_chart(layers: Sequence[LayerRow]) -> Bars:
    """Build a bar chart with one row per layer, in the given order."""
    axis = _axis(layers, NAMES_WIDTH, WIDTH - VALUES_WIDTH)
    rows = []
    for index, layer in enumerate(layers):
        y = TOP + index * ROW_HEIGHT
        rows.append(
            BarRow(
                name=layer.node,
                label=shortened(layer.node, NAME_LENGTH),
                y=y + ROW_HEIGHT / 2,
                isolated=_bar(axis, layer.isolated, y + 4),
                accumulated=_bar(axis, layer.accumulated, y + 5 + BAR_HEIGHT),
            )
        )
    return Bars(WIDTH, TOP + len(layers) * ROW_HEIGHT + 4, TOP, NAMES_WIDTH - 10, axis.at(0), axis.ticks(), tuple(rows))


def _bar(axis: _Axis, value: float | None, y: float) -> ChartBar | None:
    if value is None or math.isnan(value):
        return None
    zero, end = axis.at(0), axis.at(value)
    return ChartBar(
        x=min(zero, end),
        width=max(round(abs(end - zero), 1), 1.0),
        y=y,
        label=decibel(value),
        at=max(zero, end) + 5,
        cut=not axis.low <= value <= axis.high,
    )


def strip_chart(layers: Sequence[LayerRow], *, hovered: int) -> Strip:
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
        if layer.accumulated is not None and not math.isnan(layer.accumulated):
            columns.append(f"M{_short(x)} {_short(zero)}h{wide}V{_short(axis.at(layer.accumulated))}h-{wide}z")
        if layer.isolated is not None and not math.isnan(layer.isolated):
            marks.append(f"M{_short(x)} {_short(axis.at(layer.isolated))}h{wide}")
        if len(layers) <= hovered:
            tooltip = f"{layer.node}: {decibel(layer.accumulated)} dB, isolated {decibel(layer.isolated)} dB"
            hits.append(Hit(round(x - gap / 2, 1), round(pitch, 1), tooltip))
    return Strip(WIDTH, STRIP_HEIGHT, STRIP_LEFT, bottom, axis.ticks(), "".join(columns), "".join(marks), tuple(hits))


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
