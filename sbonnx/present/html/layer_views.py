"""Layers of a report page: table rows, and charts of their losses."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from sbonnx.present.html.charts import (
    FEW_BARS,
    HOVERED,
    Bars,
    HistogramChart,
    Loss,
    Strip,
    bar_chart,
    histogram_chart,
    strip_chart,
)
from sbonnx.present.html.formatting import text
from sbonnx.report.details import Details, LayerLoss
from sbonnx.report.outcome import LayerError, QuantizedTensor, Report
from sbonnx.report.plots import layer_names

ROLES: Final = ("activation", "weight", "bias")

MOST_BARS: Final = 40
"""Maximum number of bars of a chart, of the worst layers."""

BLOCK: Final = re.compile(r"^(.*?[/._]?\w*?[./]\d+)[/.](.+)$")
"""Number of a block in the name of a layer of a decoder, and what follows: ``/model/layers.0/mlp/up_proj``."""


LAYERS_OF_BLOCK: Final = 3
"""Number of layers from which those of a block are shown below it."""


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
        bars, strip: charts; None if nothing was measured, or (strip) if there are few layers.
        widths: types with counts by `ROLES`; without weights if the report does not contain them.
        complete: whether weights and biases are included.
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
    limit = None if report.metrics is None else report.metrics.limit_db
    return Layers(
        rows=tuple(rows[:most]),
        total=len(rows),
        ordered=ordered,
        bars=_bars(measured[: min(MOST_BARS, most)], in_order, limit) if measured else None,
        strip=_strip(in_order, limit, hovered=min(most, HOVERED)) if len(measured) > FEW_BARS else None,
        widths=_widths(report),
        complete=bool(sites),
        histograms=tuple(chart for row in details.histograms if (chart := histogram_chart(row)) is not None),
        by_part=bool(profiled),
    )


def _bars(worst: Sequence[LayerRow], every: Sequence[LayerRow], limit: float | None) -> Bars:
    """Draw the worst layers; of decoders, the worst layer of each block, and the layers of the block below it."""
    blocks: dict[str, list[LayerRow]] = defaultdict(list)
    for row in every:
        match = BLOCK.match(row.node)
        blocks[match[1] if match else row.node].append(row)
    if len(every) <= FEW_BARS or max(map(len, blocks.values())) < LAYERS_OF_BLOCK or len(blocks) > MOST_BARS:
        return bar_chart([_loss(row, name) for row, name in zip(worst, _names(worst), strict=True)], limit)
    chart = bar_chart([_loss(row, row.node) for rows in blocks.values() for row in rows], limit)
    drawn = iter(chart.rows)
    bars = []
    for name, rows in blocks.items():
        children = tuple(
            sorted((next(drawn) for _ in rows), key=lambda bar: -sum(part.length for part in bar.segments))
        )
        if len(rows) == 1:
            bars.append(children[0])
        else:
            short = tuple(replace(bar, name=bar.name[len(name) + 1 :]) for bar in children)
            bars.append(replace(short[0], name=name, label=f"{short[0].label}", children=short))
    return replace(chart, rows=tuple(bars), few=len(bars))


def _loss(row: LayerRow, name: str) -> Loss:
    value = row.accumulated if row.isolated is None else row.isolated
    return Loss(name, value, {"weights": row.by_weights, "inputs": row.by_inputs})


def _strip(rows: Sequence[LayerRow], limit: float | None, *, hovered: int) -> Strip:
    isolated, accumulated = [row.isolated for row in rows], [row.accumulated for row in rows]
    return strip_chart(_names(rows), isolated, accumulated, hovered=hovered, limit=limit)


def _names(rows: Sequence[LayerRow]) -> list[str]:
    return layer_names([(row.node, row.tensor) for row in rows])


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
