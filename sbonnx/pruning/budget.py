"""Multiplications and weights of a network as functions of the channels that are removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from sbonnx.graph import Constant, Graph
from sbonnx.graph.query import all_tensors, shape
from sbonnx.ops import CONVOLUTIONS
from sbonnx.pruning.groups.dimensions import Dependencies, Dimension
from sbonnx.pruning.groups.removal_trace import LinearSides
from sbonnx.spec import Array

Budget = Literal["macs", "weights"]
"""Multiplications of the linear layers of one sample, or the number of stored values."""


@dataclass(frozen=True)
class LayerSize:
    """Size of a linear layer.

    Attributes:
        sides: the layer.
        positions: output positions of one sample (rows of its matrix product).
        inputs, outputs: channels that each group of each dimension has on its sides, float64 (dimensions,).
    """

    sides: LinearSides
    positions: float
    inputs: Array
    outputs: Array


@dataclass(frozen=True)
class NetworkSize:
    """Size of a network for any number of removed groups of each dimension.

    Attributes:
        layers: linear layers.
        other: values in all other constants, which are counted as unchanged.
    """

    layers: tuple[LayerSize, ...]
    other: int

    @cached_property
    def _arrays(self) -> tuple[Array, ...]:
        """Channels, members and factors of all layers, one row each."""
        linears = [layer.sides.layer for layer in self.layers]
        matrices = [1 if layer.op in CONVOLUTIONS else layer.groups for layer in linears]
        taps = [
            float(np.prod(layer.kernel, dtype=np.int64)) * count for layer, count in zip(linears, matrices, strict=True)
        ]
        return (
            np.array([layer.out_channels for layer in linears], np.float64),
            np.array([layer.outputs for layer in self.layers]),
            np.array([layer.in_channels for layer in linears], np.float64),
            np.array([layer.inputs for layer in self.layers]),
            np.array([layer.group for layer in linears], np.float64),
            np.array([layer.sides.is_depthwise for layer in self.layers]),
            np.array(taps) * matrices,
            np.array([layer.positions for layer in self.layers]),
        )

    def total(self, budget: Budget, removed: Array) -> float:
        """Return the total with `removed` groups of each dimension, (dimensions,)."""
        outputs, out_of, inputs, in_of, group, depthwise, taps, positions = self._arrays
        each = np.where(depthwise, 1.0, (inputs - in_of @ removed) / group)
        weights = (outputs - out_of @ removed) * each * taps
        return float(self.other + weights.sum() if budget == "weights" else weights @ positions)


def network_size(
    graph: Graph, found: Dependencies, dimensions: Sequence[Dimension], rows: Mapping[str, float]
) -> NetworkSize:
    """Return the size of a network.

    Args:
        rows: measured output positions of a sample by layer; otherwise they follow from the shapes, where dynamic
            dimensions count as 1.
    """
    number = {}
    for place, dimension in enumerate(dimensions):
        for side, channels in dimension.channels.items():
            for group in np.unique(found.groups.of[found.sides[side][channels.reshape(-1)]]).tolist():
                number[group] = place
    sizes = np.array([dimension.size for dimension in dimensions], np.float64)

    def members(ids: Array) -> Array:
        counts = np.zeros(len(dimensions))
        for group in found.groups.of[ids].tolist():
            if group in number:
                counts[number[group]] += 1
        return counts / sizes if len(sizes) else counts

    layers = []
    for sides in found.linears:
        positions = rows.get(sides.node.name) or _positions(sides)
        layers.append(LayerSize(sides, positions, members(sides.inputs), members(sides.outputs)))
    every = sum(int(np.prod(t.shape, dtype=np.int64)) for t in all_tensors(graph) if isinstance(t, Constant))
    linear = sum(int(np.prod(sides.layer.shape, dtype=np.int64)) for sides in found.linears)
    return NetworkSize(tuple(layers), every - linear)


def _positions(sides: LinearSides) -> float:
    """Return the rows of a layer from the shape of its output: all axes but the channels and the batch."""
    size = list(shape(sides.node.outputs[0]) or ())
    axis = 1 if sides.node.op in CONVOLUTIONS or len(size) < 2 else len(size) - 1
    dims = [dim for place, dim in enumerate(size) if place not in (0, axis)]
    return float(np.prod([dim if isinstance(dim, int) and dim > 0 else 1 for dim in dims], dtype=np.float64))
