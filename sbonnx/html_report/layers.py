"""Layer rows of a report page: error and integer types of each layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sbonnx.html_report import chart
from sbonnx.html_report.figures import number, text

ROLES: Final = ("activation", "weight", "bias")

DRAWN: Final = 24
"""Maximum number of layers for which a chart with names shows all of them; for larger networks it shows the worst."""

WORST: Final = 20

HOVERED: Final = 400
"""Maximum number of layers of a strip with tooltips; more are too narrow to hover over."""


@dataclass(frozen=True)
class LayerRow:
    """A quantized activation, and the weights of the layer that reads it.

    Attributes:
        order: position in the network, from 1; None if the report does not contain it.
        node, tensor: names of the first reader and of the quantized tensor. The tensor is "" if the row is only about
            weights: the input is not quantized, or in the row of its first reader.
        activation, weights: types; "" if not quantized.
        alone, gathered: isolated and accumulated SQNR of the tensor in dB.
        scale: scale of the first channel.
    """

    order: int | None
    node: str
    tensor: str
    activation: str
    weights: str
    alone: float | None
    gathered: float | None
    scale: float | None


@dataclass(frozen=True)
class Widths:
    """Number of tensors of each role with a type."""

    label: str
    counts: tuple[int, ...]


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
    bars: chart.Bars | None
    strip: chart.Strip | None
    widths: tuple[Widths, ...]
    complete: bool

    @property
    def with_weights(self) -> bool:
        """Whether any row has weight types."""
        return any(row.weights for row in self.rows)

    @property
    def with_order(self) -> bool:
        """Whether any row has a position in the network."""
        return any(row.order is not None for row in self.rows)


def layers_of(report: Mapping[str, Any], most: int) -> Layers:
    """Build the view of the layers of one report, with at most `most` rows."""
    sites = report.get("sites") or ()
    rows = _rows(report.get("layers") or (), sites)
    measured = [row for row in rows if row.alone is not None or row.gathered is not None]
    ordered = bool(measured) and all(row.order is not None for row in measured)
    in_order = sorted(measured, key=lambda row: row.order or 0) if ordered else measured
    small = len(measured) <= DRAWN
    shown = in_order if small else measured[: min(WORST, most)]
    return Layers(
        rows=tuple(rows[:most]),
        total=len(rows),
        ordered=ordered,
        bars=chart.bars(_drawn(shown)) if shown else None,
        strip=None if small else chart.strip(_drawn(in_order), hovered=min(most, HOVERED)),
        widths=_widths(report, sites),
        complete=bool(sites),
    )


def _drawn(rows: Sequence[LayerRow]) -> list[chart.Layer]:
    """Return chart layers with unique labels: if a node reads several tensors, the tensor is named too."""
    times = Counter(row.node for row in rows)
    return [
        chart.Layer(row.node if times[row.node] == 1 else f"{row.node} ← {row.tensor}", row.alone, row.gathered)
        for row in rows
    ]


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
            alone=number(row.get("alone_db")),
            gathered=number(row.get("sqnr_db")),
            scale=number(row.get("scale")),
        )
        for row in layers
    ]
    rows.sort(key=lambda row: (_or_last(row.gathered), _or_last(row.alone)))
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
    found = [Widths(label, tuple(counts[label, role] for role in ROLES)) for label in labels]
    return tuple(sorted(found, key=lambda one: (-sum(one.counts), one.label)))
