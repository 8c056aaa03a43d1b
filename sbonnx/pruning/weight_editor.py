"""Replaces weights and biases of layers in a copy of a graph, without changing shapes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sbonnx.graph import Graph, Node
from sbonnx.graph.edit import Names, set_constant
from sbonnx.graph.query import constant, node_by_name, readers, tensors_by_name
from sbonnx.ops import LINEAR
from sbonnx.pruning.fit_layers import FitLayer
from sbonnx.pruning.ridge import RefitWeight
from sbonnx.spec import Array


class WeightEditor:
    """Sets and restores weights and biases of layers, by name.

    Args:
        graph: a copy of the graph that the layers belong to; changed in place.
        layers: the layers.
    """

    def __init__(self, graph: Graph, layers: Mapping[str, FitLayer]) -> None:
        self.graph = graph
        self._names = Names(graph)
        self._layers = layers
        self._nodes = node_by_name(graph)
        tensors = tensors_by_name(graph)
        self._biases: dict[str, tuple[Node, int]] = {
            name: readers(tensors[layer.bias])[0] for name, layer in layers.items() if layer.bias is not None
        }

    def set(self, name: str, found: RefitWeight) -> None:
        """Replace the weight of a layer, and move its bias."""
        layer, node = self._layers[name], self._nodes[name]
        weight, index = self._weight(name), LINEAR[node.op].weight
        values = layer.layout.from_matrices(found.weight).astype(weight.dtype)
        set_constant(node, index, values, self._names)
        if name in self._biases:
            reader, place = self._biases[name]
            bias = constant(reader.inputs[place])
            assert bias is not None
            moved = bias.astype(np.float64) + found.shift.reshape(bias.shape)
            set_constant(reader, place, moved.astype(bias.dtype), self._names)

    def put(self, name: str, weight: Array, bias: Array | None) -> None:
        """Set the stored arrays of a layer."""
        node = self._nodes[name]
        set_constant(node, LINEAR[node.op].weight, weight, self._names)
        if bias is not None:
            reader, place = self._biases[name]
            set_constant(reader, place, bias, self._names)

    def stored(self, name: str) -> tuple[Array, Array | None]:
        """Return weight and bias of a layer as stored."""
        if name not in self._biases:
            return self._weight(name), None
        reader, place = self._biases[name]
        return self._weight(name), constant(reader.inputs[place])

    def _weight(self, name: str) -> Array:
        node = self._nodes[name]
        values = constant(node.inputs[LINEAR[node.op].weight])
        assert values is not None
        return values
