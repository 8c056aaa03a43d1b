"""Error of the other operand where the output of a layer is added to a skip connection, for the layer to compensate.

The refit of a layer whose output y is added to a tensor z has the target y + (z - z'), with z' in the pruned network:
it compensates the error of the sum instead of that of y alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.graph import Graph, Node
from sbonnx.graph.query import constant, node_by_name, rank
from sbonnx.moments import LEAST_ROWS, is_held
from sbonnx.moments.sums import picked_rows
from sbonnx.ops import ADDS, CONVOLUTIONS
from sbonnx.pruning.fit_layers import FitLayer
from sbonnx.spec import Array

MORE_ROWS: Final = 4
"""Rows of products with the error of a skip connection, over those of other moments: they are not summed by lags."""


def skip_of(graph_nodes: dict[str, Node], layer: FitLayer) -> str | None:
    """Return the name of the tensor that the output of a layer is added to; None if it is not.

    A constant that is added first (the bias of a MatMul) is passed over.
    """
    if layer.layout.groups != 1:
        return None
    tensor = graph_nodes[layer.name].outputs[0]
    for _ in range(2):
        uses = tensor.outputs
        if len(uses) != 1 or uses[0].op not in ADDS or len(uses[0].inputs) != 2:
            return None
        other = uses[0].inputs[1] if uses[0].inputs[0] is tensor else uses[0].inputs[0]
        if constant(other) is None:
            return str(other.name) if other is not tensor and rank(other) == rank(tensor) else None
        tensor = uses[0].outputs[0]
    return None


def skips_of(graph: Graph, layers: Sequence[FitLayer]) -> dict[str, str]:
    """Return the skip tensor by layer, for layers that have one."""
    nodes = node_by_name(graph)
    skips = {layer.name: skip_of(nodes, layer) for layer in layers}
    return {name: skip for name, skip in skips.items() if skip is not None}


@dataclass(frozen=True)
class SkipProducts:
    """Sums, or means, over rows of products with d = z - z', for a layer with one matrix.

    Attributes:
        rows: number of rows.
        with_float: of d x^T, float64 (O, K).
        with_pruned: of d x'^T, float64 (O, K).
        squares: of d^2, (O,).
        mean: sum of d / n, (O,).
    """

    rows: float
    with_float: Array
    with_pruned: Array
    squares: Array
    mean: Array

    def of(self, outputs: Array) -> SkipProducts:
        """Return the products of some outputs, bool (O,)."""
        return SkipProducts(
            self.rows, self.with_float[outputs], self.with_pruned[outputs], self.squares[outputs], self.mean[outputs]
        )

    def merged(self, other: SkipProducts) -> SkipProducts:
        """Return the means over the rows of both, of means over rows."""
        rows = self.rows + other.rows
        mine, theirs = self.rows / (rows or 1.0), other.rows / (rows or 1.0)
        return SkipProducts(
            rows,
            mine * self.with_float + theirs * other.with_float,
            mine * self.with_pruned + theirs * other.with_pruned,
            mine * self.squares + theirs * other.squares,
            mine * self.mean + theirs * other.mean,
        )


class SkipSums:
    """Accumulates `SkipProducts` of a layer, on fit and on hold-out samples.

    Args:
        layer: with one matrix.
        samples: number of samples.
        seed: of the picks of rows.
    """

    def __init__(self, layer: FitLayer, samples: int, seed: int = 0) -> None:
        self._layer, self._seed = layer, seed
        self._wanted = -(-MORE_ROWS * LEAST_ROWS // max(samples, 1))
        outputs, inputs = layer.layout.out_channels, layer.layout.inputs
        wide, line = np.zeros((outputs, inputs)), np.zeros(outputs)
        self._sums = [SkipProducts(0, wide, wide, line, line)] * 2

    def add(self, x: Array, pruned: Array, error: Array, samples: Sequence[int]) -> None:
        """Add samples stacked along the leading axis: inputs in both networks and d, in the shape of the output."""
        geometry, count = self._layer.geometry, self._layer.geometry.count(x.shape)
        axis = 1 if self._layer.node.op in CONVOLUTIONS else -1
        d = np.moveaxis(error, axis, -1).reshape(-1, error.shape[axis])
        if len(d) != count:
            return
        rows_a_sample = count // len(samples)
        for place, sample in enumerate(samples):
            picks = (
                np.arange(rows_a_sample)
                if rows_a_sample <= self._wanted
                else picked_rows(rows_a_sample, self._wanted, self._seed, sample)
            )
            rows = picks + place * rows_a_sample
            float_rows, pruned_rows = (geometry.rows(value, rows)[0] for value in (x, pruned))
            part = d[rows]
            now = self._sums[is_held(sample)]
            self._sums[is_held(sample)] = SkipProducts(
                now.rows + len(rows),
                now.with_float + part.T @ float_rows,
                now.with_pruned + part.T @ pruned_rows,
                now.squares + np.square(part, dtype=np.float64).sum(axis=0),
                now.mean + part.sum(axis=0, dtype=np.float64),
            )

    def products(self) -> tuple[SkipProducts, SkipProducts] | None:
        """Return the means over rows on fit and on hold-out samples; None if nothing finite was added."""
        if not self._sums[0].rows or not all(np.isfinite(sums.squares).all() for sums in self._sums):
            return None
        means = [_means(sums) for sums in self._sums]
        return means[0], means[1]


def _means(sums: SkipProducts) -> SkipProducts:
    rows = sums.rows or 1.0
    return SkipProducts(
        sums.rows, sums.with_float / rows, sums.with_pruned / rows, sums.squares / rows, sums.mean / rows
    )
