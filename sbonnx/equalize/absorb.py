"""Bias absorption: shifts channels by constants that move into the biases of the next layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sbonnx.correct.biases import bias_reader
from sbonnx.equalize.scale_trace import ConstantEditor, Traced, Weight
from sbonnx.graph import Graph, Node, Tensor
from sbonnx.graph.constant_edits import ConstantEdit
from sbonnx.graph.query import constant, output_names, readers, shape
from sbonnx.linear.im2col import reads_padding
from sbonnx.ops import LINEAR, READS_SHAPE
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Array, Bounds

WHAT: Final = "absorb bias"

SHIFT_OF_NORM: Final = 2
"""Index of the shift among the inputs of a normalization."""


@dataclass(frozen=True)
class Shift:
    """A constant that is added to a tensor whose channels can be shifted.

    Attributes:
        node, index: the constant input of the node, without a factor; `index` is None for the bias of `weight`.
        weight: a layer before a Relu, or None.
        moved: the tensor that the next layers read.
    """

    node: Node
    index: int | None
    weight: Weight | None
    moved: Tensor

    @property
    def tensor(self) -> Tensor:
        """The tensor whose range is measured."""
        return self.node.outputs[0]

    def amount(self, bounds: Bounds) -> Array:
        """Return what is subtracted from each channel, (channels,): the center of its range, or what no Relu clips."""
        lo, hi = bounds.lo.astype(np.float64), bounds.hi.astype(np.float64)
        return (lo + hi) / 2 if self.weight is None else np.maximum(lo, 0.0)


def shifts(traced: Traced) -> tuple[Shift, ...]:
    """Return the shifts of a graph: layers before a Relu, and norms and additions of constants before layers."""
    relus = []
    for weight in traced.weights:
        uses = readers(weight.node.outputs[0])
        if len(uses) == 1 and uses[0][0].op == "Relu" and _has_bias(weight):
            relus.append(Shift(weight.node, None, weight, uses[0][0].outputs[0]))
    sources = {id(weight.node.inputs[0]) for weight in traced.weights}
    added = [
        Shift(vector.node, vector.index, None, vector.node.outputs[0])
        for vector in traced.vectors
        if id(vector.node.outputs[0]) in sources and (vector.node.op == "Add" or vector.index == SHIFT_OF_NORM)
    ]
    return (*relus, *added)


def wanted(traced: Traced) -> dict[str, int]:
    """Return tensors whose range per channel is needed, with their channel axis."""
    axes = {}
    for shift in shifts(traced):
        size = shape(shift.tensor)
        if size is not None:
            axes[shift.tensor.name] = 1 if shift.weight is not None else len(size) - 1
    return axes


def _has_bias(weight: Weight) -> bool:
    return _bias_place(weight) is not None


def _bias_place(weight: Weight) -> tuple[Node, int] | None:
    """Return the input that has or can have the bias of a layer; that of a MatMul is added by the next node."""
    place = bias_reader(weight.node)
    if place is None or LINEAR[weight.node.op].bias is not None:
        return place
    values = constant(place[0].inputs[place[1]])
    fits = values is not None and values.ndim and values.size == values.shape[-1] == weight.layer.out_channels
    return place if fits else None


def absorb(
    graph: Graph, traced: Traced, ranges: Mapping[str, Bounds]
) -> tuple[dict[str, Array], tuple[str, ...], tuple[Refusal, ...]]:
    """Shift channels by a constant that the next layers add again, in place.

        c = max(0, low);   relu(W x + b) = relu(W x + b - c) + c   wherever W x + b >= c
        c = (low + high) / 2   for the shift of a norm, and a constant that is added, before layers
        b = b - c  in the layer, norm or Add;   b = b + V c  in each layer with the weight V that reads it

    Only possible if the next layers have a bias and read c at every position, so not with zero padding. The function is
    unchanged, with a Relu for all values within `ranges`. The paper takes them from batch norms (mean - 3 std);
    measured values are more reliable: on a MobileNetV2 with inputs of another size than in training, batch norms cost 3
    points of top-1. Centered channels have the smallest range that scales can give them: a scale for each channel and
    these shifts let one scale and zero point serve all channels.

    Args:
        traced: of this graph in its current state.
        ranges: by tensor, (channels,).

    Returns:
        what was subtracted, by tensor that layers read; names of the nodes whose constants were changed; refusals of
        others that could be shifted.

    Source: Nagel et al. 2019, Data-Free Quantization Through Weight Equalization and Bias Correction, section 4.1.3; Li
    et al. 2023, RepQ-ViT, equations 12 to 15 (zero points after LayerNorm); Wei et al. 2023, Outlier Suppression+.
    """
    by_node = {id(weight.node): weight for weight in traced.weights}
    held = output_names(graph)
    editor = ConstantEditor(graph)
    done: dict[str, Array] = {}
    nodes: list[str] = []
    refused: list[Refusal] = []
    for shift in shifts(traced):
        bounds = ranges.get(shift.tensor.name)
        if bounds is None or shift.tensor.name in held:
            continue
        amount = shift.amount(bounds)
        if not amount.any():
            continue
        why = _why_not(shift, amount, by_node, held)
        if why is not None:
            refused.append(Refusal(WHAT, shift.node.name, why))
            continue
        _move(graph, shift, [by_node[id(node)] for node, _ in _reading(shift.moved)], amount, editor)
        done[shift.moved.name] = amount
        nodes.append(shift.node.name)
    return done, tuple(nodes), tuple(refused)


def _reading(tensor: Tensor) -> list[tuple[Node, int]]:
    """Return the readers of the values of a tensor."""
    return [(node, index) for node, index in readers(tensor) if node.op not in READS_SHAPE]


def _why_not(shift: Shift, amount: Array, by_node: Mapping[int, Weight], held: set[str]) -> Reason | None:
    if shift.moved.name in held:
        return Reason("is-output", f"'{shift.moved.name}' is an output")
    for node, index in _reading(shift.moved):
        reader = by_node.get(id(node))
        if reader is None or index != 0 or reader.layer.in_channels != amount.size:
            return Reason("reader-without-bias", f"{node.op} '{node.name}' reads it and cannot absorb a bias")
        if not _has_bias(reader):
            return Reason("no-bias", f"{node.op} '{node.name}' has no bias")
        if reads_padding(reader.layer, node.attrs):
            return Reason("pads-zeros", f"{node.op} '{node.name}' pads with zeros")
    return None


def _move(graph: Graph, shift: Shift, after: list[Weight], c: Array, editor: ConstantEditor) -> None:
    """Subtract c from one constant, and add its effect to the biases of the next layers, in place."""
    if shift.weight is not None:
        shift.weight.set_bias(_wide(shift.weight) - c / shift.weight.layer.beta, editor)
    else:
        assert shift.index is not None
        _add(shift.node, shift.index, -c, editor)
    for reader in after:
        through = reader.layer.alpha * reader.layer.through(reader.values, c) / reader.layer.beta
        if LINEAR[reader.node.op].bias is not None:
            reader.set_bias(_wide(reader) + through, editor)
        else:
            place = _bias_place(reader)
            assert place is not None
            _add(*place, through, editor)
    normal = graph.info.normals.get(shift.tensor.name)
    if normal is not None:
        graph.info.normals[shift.tensor.name] = replace(normal, mean=normal.mean - c)


def _add(node: Node, index: int, c: Array, editor: ConstantEditor) -> None:
    """Add to a constant with the channels along its last axis, in place."""
    old = constant(node.inputs[index])
    assert old is not None
    values = (old + c).astype(old.dtype)
    editor.replace(node, index, values, ConstantEdit("is", values))


def _wide(weight: Weight) -> Array:
    """Return the bias broadcast to all output channels, float64."""
    bias = weight.bias
    if bias is None:
        return np.zeros(weight.layer.out_channels)
    wide = np.broadcast_to(bias, np.broadcast_shapes(bias.shape, (weight.layer.out_channels,)))
    return wide.astype(np.float64)
