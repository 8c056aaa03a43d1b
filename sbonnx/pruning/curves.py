"""Sensitivity curves: the error of the outputs when a part of one dimension is removed and its readers are refitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx import graph as graphs
from sbonnx.graph import Graph
from sbonnx.pruning.criteria import CRITERIA, DimensionData, ReaderMoments, checked
from sbonnx.pruning.fit_layers import FitLayer, MomentPair
from sbonnx.pruning.float_pass import OutputErrors
from sbonnx.pruning.groups.dimensions import Dependencies, Dimension
from sbonnx.pruning.ridge import KeptColumns, RefitWeight, mean_products, refit
from sbonnx.pruning.weight_editor import WeightEditor
from sbonnx.spec import Array

SHARES: Final = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of a dimension that are removed on a curve."""

MIDDLE: Final = 3
"""Index of the share at which the strength of the refit is chosen for the whole curve."""


@dataclass(frozen=True)
class SensitivityCurve:
    """Error of the outputs by the number of removed groups of one dimension.

    Attributes:
        counts: ascending, from the number that is removed already.
        errors: relative error energy of the outputs on hold-out samples, not descending.
    """

    counts: tuple[int, ...]
    errors: tuple[float, ...]

    def at(self, count: float) -> float:
        """Return the error at a number of removed groups: linear between and beyond the measured numbers."""
        if count <= self.counts[-1]:
            return float(np.interp(count, self.counts, self.errors))
        if len(self.counts) == 1:
            return self.errors[0]
        (before, last), (low, high) = self.counts[-2:], self.errors[-2:]
        return high + (high - low) / (last - before) * (count - last)


@dataclass(frozen=True)
class RemovedBefore:
    """Channels that an earlier round removed.

    Attributes:
        counts: groups of each dimension, (dimensions,).
        kept: columns that remain, by layer, bool (G, K).
    """

    counts: Array
    kept: Mapping[str, Array]


def data_of(
    dimension: Dimension,
    layers: Mapping[str, FitLayer],
    pairs: Mapping[str, MomentPair],
    seed: int = 0,
    kept: Mapping[str, Array] | None = None,
) -> DimensionData:
    """Collect the weights that write a dimension and the moments of the layers that read it.

    Args:
        kept: columns of layers that were not removed before, bool (G, K); moments of others are 0, so that nothing is
            compensated by them.
    """
    written, read, readers = [], [], []
    for side, channels in dimension.channels.items():
        layer = layers.get(side.layer)
        if layer is None:
            continue
        if side.direction == "out":
            wide = layer.weight()
            rows = wide.reshape(-1, wide.shape[-1]) if layer.layout.kernel else np.concatenate(list(wide), axis=1)
            written.append(rows[channels].reshape(len(channels), -1))
            continue
        weight, columns = layer.weight(), layer.columns(channels)
        read.append(np.stack([_columns(weight, side_columns).reshape(-1) for side_columns in columns]))
        if side.layer in pairs:
            fit = pairs[side.layer].fit
            a = mean_products(fit, fit, centred=layer.bias is not None).a
            if kept is not None:
                a = a * (kept[side.layer][:, :, None] & kept[side.layer][:, None, :])
            readers.append(ReaderMoments(weight, a, columns))
    return DimensionData(dimension.groups, tuple(written or read), tuple(readers), seed)


def _columns(weight: Array, columns: Array) -> Array:
    return np.take_along_axis(weight, np.broadcast_to(columns[:, None], (*weight.shape[:2], columns.shape[1])), axis=2)


def removal_order(strategy: str, data: DimensionData) -> tuple[int, ...]:
    """Return the order in which the groups of a dimension are removed by a criterion of `CRITERIA`."""
    return tuple(checked(CRITERIA[strategy](data), data.size).tolist())


def kept_columns(layer: FitLayer, channels: Array) -> Array:
    """Return the columns of a layer that remain without these input channels (groups, channels), bool (G, K)."""
    kept = np.ones((layer.layout.groups, layer.layout.inputs), bool)
    for columns in layer.columns(channels):
        np.put_along_axis(kept, columns, False, axis=1)
    return kept


def curves(
    graph: Graph,
    found: Dependencies,
    orders: Sequence[Sequence[int]],
    layers: Mapping[str, FitLayer],
    pairs: Mapping[str, MomentPair],
    judge: OutputErrors,
    before: RemovedBefore | None = None,
) -> list[SensitivityCurve]:
    """Measure the curve of each dimension of `found`, alone, with one-stream refits of the layers that read it.

    Args:
        graph: the float graph, or a masked and refitted one; not changed.
        orders: groups that can be removed, in the order of removal, by dimension.
        layers, pairs: layers of the graph that can be refitted, and their moments; others get zero columns.
        judge: hold-out samples, and outputs of the float graph.
        before: what is removed already.
    """
    starts = [0] * len(orders) if before is None else before.counts.tolist()
    error = 0.0 if before is None else judge.error(graph)
    trial = WeightEditor(graphs.copy(graph), layers)
    progress = judge.options.progress
    progress.start("sensitivity of dimensions", len(found.dimensions))
    measured = []
    for dimension, order, start in zip(found.dimensions, orders, starts, strict=True):
        readers = [(side, channels) for side, channels in dimension.channels.items() if side.direction == "in"]
        stored = {side.layer: trial.stored(side.layer) for side, _ in readers if side.layer in layers}
        strengths: dict[str, float | None] = {}
        counts, errors = [start], [error]
        left = dimension.groups - start
        sizes = sorted({min(start + round(share * left), len(order)) for share in SHARES} - {start})
        middle = sizes[min(MIDDLE, len(sizes) - 1)] if sizes else 0
        for count in [middle, *(size for size in sizes if size != middle)] if sizes else []:
            gone = sorted(order[:count])
            for side, channels in readers:
                layer = layers.get(side.layer)
                if layer is None:
                    continue
                kept = kept_columns(layer, channels[gone])
                if before is not None:
                    kept = kept & before.kept[side.layer]
                refit = _refitted(layer, pairs.get(side.layer), kept, strengths.get(side.layer))
                strengths.setdefault(side.layer, refit.strength if np.isfinite(refit.strength) else None)
                trial.put(side.layer, *stored[side.layer])
                trial.set(side.layer, refit)
            counts.append(count)
            errors.append(judge.error(trial.graph))
        for name, arrays in stored.items():
            trial.put(name, *arrays)
        order_of = np.argsort(counts)
        rising = np.maximum.accumulate(np.array(errors)[order_of])
        measured.append(SensitivityCurve(tuple(np.array(counts)[order_of].tolist()), tuple(rising.tolist())))
        progress.advance(1)
    return measured


def _refitted(layer: FitLayer, pair: MomentPair | None, kept: Array, strength: float | None) -> RefitWeight:
    weight = layer.weight()
    if pair is None:
        return masked_weight(weight, kept)
    return refit(weight, pair, KeptColumns(kept), centred=layer.bias is not None, strength=strength, use_held=False)


def masked_weight(weight: Array, kept: Array) -> RefitWeight:
    """Return a weight with removed columns set to zero and no refit."""
    return RefitWeight(weight * kept[:, None, :], np.zeros(weight.shape[0] * weight.shape[1]), np.inf, 0.0, 0.0)
