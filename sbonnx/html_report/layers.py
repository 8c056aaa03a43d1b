"""Rows of a network's layers: what the loss of each is, and which integers its tensors become."""

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
"""Layers that a chart with names shows all of; of a larger network it shows the worst."""

WORST: Final = 20

HOVERED: Final = 400
"""Layers of a strip that say their name under the mouse; more are too narrow to hit."""


@dataclass(frozen=True)
class LayerRow:
    """A quantized activation, and the weights of the layer that reads it.

    Attributes:
        order: place in the network, from 1; None where the report does not say.
        node, tensor: names; the tensor is what is quantized, the node its first reader. "" for the tensor where it is
            another layer's row that has it.
        activation, weights: types; "" where there is none.
        alone, gathered: signal to noise in dB of rounding the tensor, and of it in the quantized network.
        scale: of the first channel.
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
    """How many tensors of each role became a type."""

    label: str
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Layers:
    """All that a page says of the layers of one network.

    Attributes:
        rows: worst first, and no more than the page has room for.
        total: how many there are.
        ordered: whether the strip stands in the order of the network; else worst first.
        bars, strip: charts; None where nothing was measured, or (strip) where the bars show all.
        widths: types with counts by `ROLES`; without weights where the report does not name these.
        complete: whether weights and biases are among them.
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
        """Whether any row has types of weights to show."""
        return any(row.weights for row in self.rows)

    @property
    def with_order(self) -> bool:
        """Whether any row has a place in the network to show."""
        return any(row.order is not None for row in self.rows)


def layers_of(report: Mapping[str, Any], most: int) -> Layers:
    """The layers of one report, at most so many of them as rows."""
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
    """Layers with names that tell them apart: of a node that reads several, the tensor is named too."""
    times = Counter(row.node for row in rows)
    return [
        chart.Layer(row.node if times[row.node] == 1 else f"{row.node} ← {row.tensor}", row.alone, row.gathered)
        for row in rows
    ]


def _rows(layers: Sequence[Mapping[str, Any]], sites: Sequence[Mapping[str, Any]]) -> list[LayerRow]:
    """A row an activation, worst first; then layers of which only the weights are quantized."""
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
    """What tells an activation or a weight from others, in the rows of layers and of sites alike."""
    return f"{site.get('role')}\n{site.get('tensor')}\n{site.get('node')}"


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(labels))


def _or_last(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _widths(report: Mapping[str, Any], sites: Sequence[Mapping[str, Any]]) -> tuple[Widths, ...]:
    """Types by how often they are used, most first."""
    rows = sites or [{"role": "activation", "label": row.get("label")} for row in report.get("layers") or ()]
    counts: Counter[tuple[str, str]] = Counter((text(row.get("label")), text(row.get("role"))) for row in rows)
    labels = dict.fromkeys(label for label, _ in counts)
    found = [Widths(label, tuple(counts[label, role] for role in ROLES)) for label in labels]
    return tuple(sorted(found, key=lambda one: (-sum(one.counts), one.label)))
