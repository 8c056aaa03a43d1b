"""Costs of a network as functions of the channels that are removed: multiplications, bytes of constants, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from sbonnx.graph import Graph
from sbonnx.graph.query import constant_bytes, shape
from sbonnx.ops import CONVOLUTIONS, LINEAR
from sbonnx.pruning.groups.dimensions import Dependencies, Dimension
from sbonnx.pruning.groups.removal_trace import LinearSides, ProductSides
from sbonnx.spec import Array

Budget = Literal["macs", "size", "latency"]
"""Multiplications of one sample (of linear layers, and of products of activations with channels, as in attention),
bytes of all constants, or estimated time of one sample."""


class Cost(Protocol):
    """Cost of a network, by the number of removed groups of each dimension, (dimensions,)."""

    def __call__(self, removed: Array) -> float:
        """Return the cost of the network."""

    def change(self, removed: Array, place: int, counts: Array) -> Array:
        """Return how much less the network costs with other numbers of removed groups of one dimension, (counts,)."""


@dataclass(frozen=True)
class LayerSize:
    """Size of a linear layer.

    Attributes:
        sides: the layer.
        positions: output positions of one sample (rows of its matrix product).
        inputs, outputs: channels that each group of each dimension has on its sides, float64 (dimensions,).
        bytes_a_value: of its weight; 0 if an earlier layer stores the same weight.
    """

    sides: LinearSides
    positions: float
    inputs: Array
    outputs: Array
    bytes_a_value: int


@dataclass(frozen=True)
class NetworkSize:
    """Size of a network for any number of removed groups of each dimension.

    Attributes:
        layers: linear layers.
        other: bytes of all other constants, which are counted as unchanged: an upper limit, as biases shrink as well.
        products: multiplications of each product of two activations, float64 (products,), and the share of them that
            goes with each group of each dimension, float64 (products, dimensions).
    """

    layers: tuple[LayerSize, ...]
    other: int
    products: tuple[Array, Array]

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
            np.array([layer.sides.passes_on for layer in self.layers]),
            np.array(taps) * matrices,
            np.array([layer.positions for layer in self.layers]),
            np.array([layer.bytes_a_value for layer in self.layers], np.float64),
        )

    def total(self, budget: Literal["macs", "size"], removed: Array) -> Array:
        """Return the total with `removed` groups of each dimension, (..., dimensions) to (...)."""
        outputs, out_of, inputs, in_of, group, passes_on, taps, positions, bytes_a_value = self._arrays
        group_inputs = np.where(passes_on, inputs, inputs - removed @ in_of.T) / group
        weights = (outputs - removed @ out_of.T) * group_inputs * taps
        if budget == "size":
            return np.asarray(self.other + weights @ bytes_a_value)
        whole, shares = self.products
        return np.asarray(weights @ positions + (1.0 - removed @ shares.T) @ whole)


@dataclass(frozen=True)
class SizeCost:
    """Multiplications or bytes as a `Cost`."""

    size: NetworkSize
    budget: Literal["macs", "size"]

    def __call__(self, removed: Array) -> float:
        """Return the total."""
        return float(self.size.total(self.budget, removed))

    def change(self, removed: Array, place: int, counts: Array) -> Array:
        """Return the differences of the totals."""
        tried = np.repeat(removed[None], len(counts), axis=0)
        tried[:, place] = counts
        return np.asarray(self(removed) - self.size.total(self.budget, tried))


def network_size(
    graph: Graph, found: Dependencies, dimensions: Sequence[Dimension], measured: Mapping[str, float]
) -> NetworkSize:
    """Return the size of a network.

    Args:
        measured: see `sbonnx.pruning.float_pass.measured_sizes`. Sizes that were not measured follow from the shapes,
            where dynamic dimensions count as 1; products of activations with a dynamic size count nothing.
    """
    number = {}
    for place, dimension in enumerate(dimensions):
        for side, channels in dimension.channels.items():
            for group in np.unique(found.groups.of[found.sides[side][channels.reshape(-1)]]).tolist():
                number[group] = place
    sizes = np.array([dimension.groups for dimension in dimensions], np.float64)

    def members(ids: Array) -> Array:
        counts = np.zeros(len(dimensions))
        for group in found.groups.of[ids].tolist():
            if group in number:
                counts[number[group]] += 1
        return counts / sizes if len(sizes) else counts

    layers, seen = [], set()
    for sides in found.linears:
        positions = measured.get(sides.node.name) or _positions(sides)
        weight = sides.node.inputs[LINEAR[sides.node.op].weight]
        itemsize = 0 if id(weight) in seen else np.dtype(weight.dtype).itemsize
        seen.add(id(weight))
        layers.append(LayerSize(sides, positions, members(sides.inputs), members(sides.outputs), itemsize))
    linear = sum(int(np.prod(layer.sides.layer.shape, dtype=np.int64)) * layer.bytes_a_value for layer in layers)
    counted = [
        (
            measured.get(product.node.name) or _multiplications(product),
            members(product.ids.reshape(-1)) / product.ids.size,
        )
        for product in found.products
    ]
    counted_products = [(float(count), shares) for count, shares in counted if count is not None]
    products = (
        np.array([count for count, _ in counted_products]),
        np.array([s for _, s in counted_products]).reshape(-1, len(sizes)),
    )
    return NetworkSize(tuple(layers), constant_bytes(graph) - linear, products)


def _multiplications(product: ProductSides) -> int | None:
    """Return the multiplications of a product of activations for one sample; None if a size is dynamic."""
    a, y = (shape(tensor) or () for tensor in (product.node.inputs[0], product.node.outputs[0]))
    dims = [*y[0 if product.ids.shape[0] > 1 else 1 :], *a[-1:]]  # the first axis is the batch if nothing is removed
    sizes = [dim for dim in dims if isinstance(dim, int)]
    return int(np.prod(sizes, dtype=np.int64)) if len(sizes) == len(dims) else None


def _positions(sides: LinearSides) -> float:
    """Return the rows of a layer from the shape of its output: all axes but the channels and the batch."""
    size = list(shape(sides.node.outputs[0]) or ())
    axis = 1 if sides.node.op in CONVOLUTIONS or len(size) < 2 else len(size) - 1
    dims = [dim for place, dim in enumerate(size) if place not in (0, axis)]
    return float(np.prod([dim if isinstance(dim, int) and dim > 0 else 1 for dim in dims], dtype=np.float64))
