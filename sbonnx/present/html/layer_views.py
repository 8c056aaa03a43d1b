"""Layers of a report page: table rows, the worst layers with the cause of their loss, and their charts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from sbonnx.present.html.charts import (
    HOVERED,
    Bars,
    HistogramChart,
    Strip,
    bar_chart,
    histogram_chart,
    strip_chart,
)
from sbonnx.present.html.formatting import decibel, text
from sbonnx.report.details import Details, LayerLoss
from sbonnx.report.outcome import LayerError, QuantizedTensor, Report

ROLES: Final = ("activation", "weight", "bias")

ALL_NAMED: Final = 24
"""Maximum number of layers for which a chart with names shows all of them; for larger networks it shows the worst."""

WORST: Final = 20

EXPLAINED: Final = 3
"""Number of layers that are named with the cause of their loss."""

MOSTLY: Final = 0.75
"""Share of the error energy from which weights or inputs are called the cause."""

VISIBLE_DB: Final = 40.0
"""SQNR of a layer's outputs above which its loss needs no explanation."""


@dataclass(frozen=True)
class LayerRow:
    """A quantized layer: with details, one row for each node; without, one for each quantized activation.

    Attributes:
        order: position in the network, from 1; None if the report does not contain it.
        node, op, tensor: the layer, its operator ("" if unknown), and the quantized tensor. The tensor is "" if the row
            is about a node with several, or about weights only.
        activation, weights: types; "" if not quantized.
        isolated, accumulated: isolated and accumulated SQNR in dB, of the tensor, or with details of the layer's
            outputs.
        by_weights, by_inputs: isolated SQNR of the outputs in dB with only the weights, or only the inputs, quantized.
        scale: scale of the first channel of the tensor.
    """

    order: int | None
    node: str
    tensor: str
    activation: str
    weights: str
    isolated: float | None
    accumulated: float | None
    scale: float | None = None
    op: str = ""
    by_weights: float | None = None
    by_inputs: float | None = None


@dataclass(frozen=True)
class LayerCause:
    """One of the worst layers, and the cause of its loss, as texts."""

    node: str
    op: str
    loss: str
    why: str


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
        causes: the worst layers with the cause of their loss; empty without details.
        histograms: of the tensors that lose most; empty without details.
        by_part: whether rows have figures of weights and inputs, measured at the outputs of the layers.
    """

    rows: tuple[LayerRow, ...]
    total: int
    ordered: bool
    bars: Bars | None
    strip: Strip | None
    widths: tuple[Widths, ...]
    complete: bool
    causes: tuple[LayerCause, ...] = ()
    histograms: tuple[HistogramChart, ...] = ()
    by_part: bool = False

    @property
    def with_weights(self) -> bool:
        return any(row.weights for row in self.rows)

    @property
    def with_inputs(self) -> bool:
        """Whether any layer has quantized inputs; those of decoders have none."""
        return any(row.activation for row in self.rows) or not self.with_weights

    @property
    def with_order(self) -> bool:
        return any(row.order is not None for row in self.rows)


def layers_of(report: Report, most: int) -> Layers:
    """Build the view of the layers of one report, with at most `most` rows."""
    sites, details = report.sites, report.details or Details()
    profiled = () if details.profile is None else details.profile.layers
    rows = _profiled_rows(profiled, sites) if profiled else _rows(report.layers, sites)
    measured = [row for row in rows if row.isolated is not None or row.accumulated is not None]
    ordered = bool(measured) and all(row.order is not None for row in measured)
    in_order = sorted(measured, key=lambda row: row.order or 0) if ordered else measured
    small = len(measured) <= ALL_NAMED
    shown = in_order if small else measured[: min(WORST, most)]
    return Layers(
        rows=tuple(rows[:most]),
        total=len(rows),
        ordered=ordered,
        bars=_bars(shown) if shown else None,
        strip=None if small else _strip(in_order, hovered=min(most, HOVERED)),
        widths=_widths(report),
        complete=bool(sites),
        causes=_causes(measured) if profiled else (),
        histograms=tuple(chart for row in details.histograms if (chart := histogram_chart(row)) is not None),
        by_part=bool(profiled),
    )


def _bars(rows: Sequence[LayerRow]) -> Bars:
    parts = any(row.by_weights is not None or row.by_inputs is not None for row in rows)
    series: dict[tuple[str, str], list[float | None]] = {}
    if parts:
        series["weights", "weights: only the weights of the layer quantized"] = [row.by_weights for row in rows]
        series["inputs", "inputs: only its input activations quantized"] = [row.by_inputs for row in rows]
    else:
        series["weights", "isolated: only this tensor quantized"] = [row.isolated for row in rows]
    series["gathered", "accumulated: everything before it quantized too"] = [row.accumulated for row in rows]
    return bar_chart(_names(rows), series)


def _strip(rows: Sequence[LayerRow], *, hovered: int) -> Strip:
    isolated, accumulated = [row.isolated for row in rows], [row.accumulated for row in rows]
    return strip_chart(_names(rows), isolated, accumulated, hovered=hovered)


def _names(rows: Sequence[LayerRow]) -> list[str]:
    """Return unique names: if a node reads several tensors, the tensor is named too."""
    times = Counter(row.node for row in rows)
    return [row.node if times[row.node] == 1 else f"{row.node} ← {row.tensor}" for row in rows]


def _causes(rows: Sequence[LayerRow]) -> tuple[LayerCause, ...]:
    """Name the layers that lose most on their own, and say whether by their weights or by their inputs."""
    lossy = sorted((row for row in rows if _or_last(row.isolated) < VISIBLE_DB), key=lambda row: _or_last(row.isolated))
    return tuple(LayerCause(row.node, row.op, f"{decibel(row.isolated)} dB", _why(row)) for row in lossy[:EXPLAINED])


def _why(row: LayerRow) -> str:
    parts = {
        f"its weights ({row.weights})" if row.weights else "its weights": row.by_weights,
        f"its inputs ({row.activation})" if row.activation else "its inputs": row.by_inputs,
    }
    noise = {
        name: 10 ** (-value / 10)
        for name, value in parts.items()
        if value is not None and not math.isnan(value) and value > -math.inf
    }
    total = sum(noise.values())
    if not total:
        return "the cause is not known"
    (first, most), *others = sorted(noise.items(), key=lambda pair: -pair[1])
    figures = " and ".join(f"{decibel(parts[name])} dB by {name}" for name, _ in [(first, most), *others])
    if not others:
        return f"{first}, the only quantized part"
    return f"mostly {first}: {figures}" if most / total >= MOSTLY else f"weights and inputs: {figures}"


def _profiled_rows(layers: Sequence[LayerLoss], sites: Sequence[QuantizedTensor]) -> list[LayerRow]:
    """Return one row per node of a profile, in network order before sorting; worst first."""
    types: dict[tuple[str, str], list[str]] = defaultdict(list)
    for site in sites:
        types[site.node, site.role].append(text(site.label))
    rows = []
    for order, layer in enumerate(layers, 1):
        weights = types[layer.node, "weight"]
        others = [label for label in text(layer.label).split(", ") if label not in weights]
        rows.append(
            LayerRow(
                order=order,
                node=text(layer.node),
                op=text(layer.op),
                tensor=text(layer.tensor),
                activation=_listed(types[layer.node, "activation"] or others),
                weights=_listed(weights),
                isolated=layer.alone,
                accumulated=layer.gathered,
                by_weights=layer.weights,
                by_inputs=layer.activations,
            )
        )
    return sorted(rows, key=lambda row: (_or_last(row.isolated), _or_last(row.accumulated)))


def _rows(layers: Sequence[LayerError], sites: Sequence[QuantizedTensor]) -> list[LayerRow]:
    """Return one row per activation, worst first, then the layers with quantized weights only."""
    weights: dict[str, list[str]] = defaultdict(list)
    order: dict[tuple[str, str, str], int] = {}
    for site in sites:
        if site.role == "weight":
            weights[site.node].append(text(site.label))
        if site.role != "bias":
            order.setdefault((site.role, site.tensor, site.node), len(order) + 1)
    rows = [
        LayerRow(
            order=order.get(("activation", row.tensor, row.node)),
            node=text(row.node),
            tensor=text(row.tensor),
            activation=text(row.label),
            weights=_listed(weights[row.node]),
            isolated=row.alone_db,
            accumulated=row.sqnr_db,
            scale=row.scale,
        )
        for row in layers
    ]
    rows.sort(key=lambda row: (_or_last(row.accumulated), _or_last(row.isolated)))
    seen = {row.node for row in layers}
    for site in sites:
        if site.role == "weight" and site.node not in seen:
            seen.add(site.node)
            place = order[site.role, site.tensor, site.node]
            rows.append(LayerRow(place, text(site.node), "", "", _listed(weights[site.node]), None, None))
    rank = {place: index for index, place in enumerate(sorted({row.order for row in rows if row.order}), 1)}
    return [row if row.order is None else replace(row, order=rank[row.order]) for row in rows]


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(labels))


def _or_last(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _widths(report: Report) -> tuple[Widths, ...]:
    """Count the types by role, most frequent first."""
    pairs = [(text(site.label), site.role) for site in report.sites] or [
        (text(row.label), "activation") for row in report.layers
    ]
    counts = Counter[tuple[str, str]](pairs)
    labels = dict.fromkeys(label for label, _ in counts)
    widths = [Widths(label, tuple(counts[label, role] for role in ROLES)) for label in labels]
    return tuple(sorted(widths, key=lambda row: (-sum(row.counts), row.label)))
