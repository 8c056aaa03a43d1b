"""Bias absorption: moves the part of a bias that a Relu never clips into the bias of the next layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from sbonnx.equalize.scale_trace import ConstantEditor, Traced, Weight
from sbonnx.graph import Graph, Node
from sbonnx.graph.query import output_names, readers, shape
from sbonnx.linear.im2col import reads_padding
from sbonnx.ops import LINEAR
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Array

WHAT: Final = "absorb bias"


def before_relus(traced: Traced) -> dict[str, int]:
    """Return tensors whose minimum per channel is needed, with their channel axis: outputs read only by a Relu."""
    axes = {}
    for weight in traced.weights:
        tensor = weight.node.outputs[0]
        uses = readers(tensor)
        if len(uses) == 1 and uses[0][0].op == "Relu" and shape(tensor) is not None and _has_bias(weight):
            axes[tensor.name] = 1
    return axes


def _has_bias(weight: Weight) -> bool:
    return LINEAR[weight.node.op].bias is not None


def absorb(graph: Graph, traced: Traced, lows: Mapping[str, Array]) -> tuple[tuple[str, ...], tuple[Refusal, ...]]:
    """Lower the output of each layer before a Relu by its minimum, if that is positive, in place.

        c = max(0, low);   relu(W x + b) = relu(W x + b - c) + c   wherever W x + b >= c
        b = b - c  in the layer;   b = b + V c  in each layer with the weight V that reads it

    Only possible if the next layers have a bias and read c at every position, so not with zero padding. The function is
    unchanged for all values within `lows`. The paper takes them from batch norms (mean - 3 std); measured values are
    more reliable: on a MobileNetV2 with inputs of another size than in training, batch norms cost 3 points of top-1.

    Args:
        traced: of this graph in its current state.
        lows: by tensor before the Relu, float64 (channels,).

    Returns:
        names of the layers whose bias was lowered, and refusals for others with a positive minimum.

    Source: Nagel et al. 2019, Data-Free Quantization Through Weight Equalization and Bias Correction, section 4.1.3.
    """
    by_node = {id(weight.node): weight for weight in traced.weights}
    held = output_names(graph)
    editor = ConstantEditor(graph)
    done: list[str] = []
    refused: list[Refusal] = []
    for weight in traced.weights:
        tensor = weight.node.outputs[0]
        low = lows.get(tensor.name)
        if low is None or low.shape != (weight.layer.out_channels,) or not (low > 0).any():
            continue
        uses = readers(tensor)
        relu = uses[0][0] if len(uses) == 1 and uses[0][0].op == "Relu" and tensor.name not in held else None
        if relu is None:
            continue  # nothing is clipped at 0, so there is nothing to gain
        why = _why_not(weight, relu, by_node, held)
        if why is not None:
            refused.append(Refusal(WHAT, weight.node.name, why))
            continue
        _move(graph, weight, [by_node[id(node)] for node, _ in readers(relu.outputs[0])], np.maximum(low, 0.0), editor)
        done.append(weight.node.name)
    return tuple(done), tuple(refused)


def _why_not(weight: Weight, relu: Node, by_node: Mapping[int, Weight], held: set[str]) -> Reason | None:
    if not _has_bias(weight):
        return Reason("no-bias", f"{weight.node.op} has no bias")
    if relu.outputs[0].name in held:
        return Reason("is-output", f"'{relu.outputs[0].name}' is an output")
    for node, index in readers(relu.outputs[0]):
        reader = by_node.get(id(node))
        if reader is None or index != 0 or reader.layer.in_channels != weight.layer.out_channels:
            return Reason("reader-without-bias", f"{node.op} '{node.name}' reads it and cannot absorb a bias")
        if not _has_bias(reader):
            return Reason("no-bias", f"{node.op} '{node.name}' has no bias")
        if reads_padding(reader.layer, node.attrs):
            return Reason("pads-zeros", f"{node.op} '{node.name}' pads with zeros")
    return None


def _move(graph: Graph, weight: Weight, after: list[Weight], c: Array, editor: ConstantEditor) -> None:
    """Subtract c from one bias, and add its effect to the biases of the next layers, in place."""
    weight.set_bias(_wide(weight) - c / weight.layer.beta, editor)
    for reader in after:
        through = reader.layer.through(reader.values, c)
        reader.set_bias(_wide(reader) + reader.layer.alpha * through / reader.layer.beta, editor)
    normal = graph.info.normals.get(weight.node.outputs[0].name)
    if normal is not None:
        graph.info.normals[weight.node.outputs[0].name] = replace(normal, mean=normal.mean - c)


def _wide(weight: Weight) -> Array:
    """Return the bias broadcast to all output channels, float64."""
    bias = weight.bias
    if bias is None:
        return np.zeros(weight.layer.out_channels)
    wide = np.broadcast_to(bias, np.broadcast_shapes(bias.shape, (weight.layer.out_channels,)))
    return wide.astype(np.float64)
