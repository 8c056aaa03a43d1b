"""Outlier channel splitting: splits the largest columns of a weight in two halves, each with a copy of the channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.equalize.scale_trace import ConstantEditor, Traced, Weight
from sbonnx.graph import Graph, Node, Tensor
from sbonnx.graph.constant_edits import ConstantEdit
from sbonnx.graph.query import output_names, readers, shape
from sbonnx.ops import CONVOLUTIONS
from sbonnx.report import Refusal
from sbonnx.spec import Array

WHAT: Final = "split channels"

PAYS: Final = 0.9
"""Maximum expected squared error of the weights after a split, relative to the error before."""

TWICE: Final = 4.0
"""Squared error of a split column relative to a single one: both equal halves have the same rounding error."""

PASSES: Final = ("Relu", "LeakyRelu")
"""Ops between two layers that treat all channels alike and work with any number of channels."""


@dataclass(frozen=True)
class _Chain:
    """A layer, the tensors that its channels pass through, and the layers that read them.

    Attributes:
        refusal: the reason why its channels cannot be split, or None.
    """

    maker: Weight
    tensors: tuple[Tensor, ...]
    after: tuple[Weight, ...]
    refusal: str | None = None


def split_channels(
    graph: Graph, traced: Traced, share: float, *, per_channel: bool
) -> tuple[tuple[str, ...], tuple[Refusal, ...]]:
    """Duplicate the channels with the largest weights and halve their weights, if this lowers the error, in place.

        sum_j W_oj x_j = sum_(j not split) W_oj x_j + sum_(j split) (W_oj / 2) x_j + (W_oj / 2) x_j

    A smaller maximum gives a smaller step for all weights that share its scale. A split is applied if the expected
    squared error of the weights (squared step, summed over columns) falls to `PAYS`.

    Args:
        share: maximum number of channels to add, as a share of the channels of a layer.
        per_channel: whether each row has its own scale.

    Returns:
        names of the layers whose inputs were split, and refusals for the others.

    Source: Zhao et al. 2019, Improving Neural Network Quantization without Retraining using Outlier Channel Splitting.
    """
    by_node = {id(weight.node): weight for weight in traced.weights}
    held = output_names(graph)
    editor = ConstantEditor(graph)
    done: list[str] = []
    refused: list[Refusal] = []
    for maker in traced.weights:
        chain = _chain(maker, by_node, held)
        if chain.refusal is None:
            picked = _picked(chain.after, share, per_channel=per_channel)
        else:
            picked = np.zeros(0, np.int64)
        if not len(picked):
            refused.append(
                Refusal(WHAT, maker.node.name, chain.refusal or "the error of the next weights would not fall")
            )
            continue
        _split(chain, picked, editor)
        done += [weight.node.name for weight in chain.after]
    return tuple(done), tuple(refused)


def _chain(maker: Weight, by_node: Mapping[int, Weight], held: set[str]) -> _Chain:
    """Follow the output of a layer to the layers that read it."""
    tensor = maker.node.outputs[0]
    tensors = [tensor]
    while tensor.name not in held:
        uses = readers(tensor)
        if len(uses) == 1 and uses[0][0].op in PASSES:
            tensor = uses[0][0].outputs[0]
            tensors.append(tensor)
            continue
        after = tuple(by_node[id(node)] for node, index in uses if id(node) in by_node and index == 0)
        why = _why_not(maker, after, len(uses), [node for node, _ in uses])
        return _Chain(maker, tuple(tensors), after, why)
    return _Chain(maker, tuple(tensors), (), f"'{tensor.name}' is an output")


def _why_not(maker: Weight, after: Sequence[Weight], uses: int, nodes: Sequence[Node]) -> str | None:
    if len(after) < uses or not after:
        other = next((node for node in nodes if all(node is not weight.node for weight in after)), None)
        return "nothing reads it" if other is None else f"{other.op} '{other.name}' reads it"
    grouped = next((weight for weight in (maker, *after) if weight.layer.group > 1), None)
    if grouped is not None:
        return f"'{grouped.node.name}' works on groups of channels"
    if any(weight.layer.in_channels != maker.layer.out_channels for weight in after):
        return "its readers have another number of channels"
    return None


def _error(matrix: Array, doubled: Array, *, per_channel: bool) -> float:
    """Return the expected squared error of a weight: squared step of each row, times the weighted number of columns.

    Args:
        matrix: absolute weights (outputs, inputs, kernel), float64.
        doubled: inputs that are split.
    """
    count = matrix.shape[1] - len(doubled) + TWICE * len(doubled)
    scaled = matrix.copy()
    scaled[:, doubled] /= 2
    top = scaled.max((1, 2))
    rows = top if per_channel else np.full(len(top), top.max())
    return float((rows**2).sum() * count)


def _picked(after: Sequence[Weight], share: float, *, per_channel: bool) -> Array:
    """Select the channels to split, those with the largest weights; none if the error does not fall enough."""
    matrices = [weight.layer.by_channel(np.abs(weight.values.astype(np.float64)))[0] for weight in after]
    channels = matrices[0].shape[1]
    most = int(share * channels)
    top = np.max([m.max((0, 2)) / max(float(m.max()), np.finfo(np.float64).tiny) for m in matrices], axis=0)
    order = np.argsort(-top, kind="stable")[:most]
    best, least = order[:0], 1.0
    before = [_error(m, order[:0], per_channel=per_channel) for m in matrices]
    for count in range(1, len(order) + 1):
        now = [_error(m, order[:count], per_channel=per_channel) for m in matrices]
        rest = max(a / b if b else 1.0 for a, b in zip(now, before, strict=True))
        if rest < least:
            best, least = order[:count], rest
    return np.sort(best) if least <= PAYS else order[:0]


def _split(chain: _Chain, picked: Array, editor: ConstantEditor) -> None:
    """Append copies of the `picked` channels, in place: rows of the maker are copied, columns of its readers halved."""
    maker = chain.maker
    twice = np.concatenate([np.arange(maker.layer.out_channels), picked])
    bias = maker.bias
    axis = maker.layer.out_axis
    maker.set_values(np.take(maker.values, twice, axis), editor, ConstantEdit("repeat", twice, axis))
    if bias is not None and bias.ndim and bias.shape[-1] > 1:
        maker.set_bias(np.take(bias, twice, bias.ndim - 1), editor)
    for weight in chain.after:
        axis = weight.layer.in_axis
        factor = np.ones(len(twice))
        factor[picked] = factor[maker.layer.out_channels :] = 0.5
        wide = factor.reshape([-1 if place == axis else 1 for place in range(weight.values.ndim)])
        repeated = np.take(weight.values, twice, axis)
        weight.set_values(repeated, editor, ConstantEdit("repeat", twice, axis))
        weight.set_values(repeated * wide, editor, ConstantEdit("times", wide))
    for tensor in chain.tensors:
        size = shape(tensor)
        if size is not None:
            place = 1 if maker.node.op in CONVOLUTIONS else len(size) - 1
            tensor.shape = [*size[:place], len(twice), *size[place + 1 :]]
