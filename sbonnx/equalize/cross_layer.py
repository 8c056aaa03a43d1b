"""Cross-layer equalization: channels of two layers brought to the same range, by a scale that cancels between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.equalize.channel_flow.constants import Weight
from sbonnx.equalize.channel_flow.trace import Traced
from sbonnx.graph.model import Normal
from sbonnx.spec import Array

SWEEPS: Final = 50
"""Rounds over all layers at most."""

CLOSE: Final = 1e-3
"""A round that moves no scale by more than this share is the last."""

REACH: Final = 3.0
"""Standard deviations that a channel is taken to reach from its mean, as where the paper absorbs biases."""

LARGEST: Final = 1e4
"""Bound on the scales and on their inverses. Channels of almost zero range would get arbitrary scales."""


def cross_layer_scales(traced: Traced, normals: Mapping[str, Normal]) -> Array:
    """Scales that bring the channels of each layer's output and of what reads it to equal ranges.

    With p_i = r_i / max r for the range r_i of channel i of a weight, its largest absolute value:

        s_i = s_i sqrt(p_i(before) / p_i(after)),      before: rows of what computes i; after: columns of what reads it

    until nothing moves, one set of channels that meet in a layer after the other. Where several layers compute or
    read a channel (residual additions, concatenations, fires) the largest p counts. For one layer on each side it is
    the fixed point of the paper's formula but for one factor for all channels, which per-tensor scales do not see.
    Channels that are 0 on one side keep their scale.

    Ranges of activations count as rows of what computes them (this is ours): by the formula alone a channel with small
    weights and a large bias is enlarged until no other is left in the range of its tensor. The paper absorbs such
    biases into the next layer, which convolutions that pad with zeros do not allow. On MobileNetV1, where the first
    layer has such channels, one scale a tensor gives 0.044 of top-1 without and 0.53 with it (float 0.56).

    Args:
        normals: of outputs of layers, where batch norms were folded; of others the bias alone is known.

    Returns:
        by group, float64 (groups,); 1 for fixed ones.

    Source: Nagel et al. 2019, Data-Free Quantization Through Weight Equalization and Bias Correction, section 4.1.
    """
    groups = traced.groups
    log = np.zeros(len(groups.fixed))
    ceilings = np.full(len(groups.fixed), np.inf)
    for ceiling in traced.ceilings:
        np.minimum.at(ceilings, groups.of[ceiling.ids], ceiling.high)
    layers = [_layer(weight, groups.of, ceilings, normals) for weight in traced.weights if _is_free(weight, traced)]
    sets = _sets(layers, groups.fixed)
    limit = np.log(LARGEST)
    for _ in range(SWEEPS):
        before = log.copy()
        for one in sets:
            step = _step(one, log, len(log))
            log[one.free] = np.clip(log[one.free] + step, -limit, limit)
        if not len(log) or np.abs(log - before).max() < CLOSE:
            break
    return np.exp(log)


@dataclass(frozen=True)
class _Layer:
    """Ranges of a weight, and the groups of its channels.

    Attributes:
        ranges: largest absolute value over the kernel, float32, shape of the view with the kernel reduced to 1.
        inputs, outputs: groups, (in channels,) and (out channels,).
        rows, columns: the shapes that vectors over outputs and inputs take against `ranges`.
        peaks: largest absolute value of each output channel as far as it is known, float64 (out channels,).
    """

    ranges: Array
    inputs: Array
    outputs: Array
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    peaks: Array

    def reached(self, log: Array) -> Array:
        """Peaks of channels with the scales exp(`log`), as shares of the largest."""
        return _shares(self.peaks / np.exp(log[self.outputs]))

    def over(self, shape: tuple[int, ...], log: Array) -> Array:
        """Ranges of channels with the scales exp(`log`), as shares of the largest."""
        factor = np.exp(log[self.inputs]).reshape(self.columns) / np.exp(log[self.outputs]).reshape(self.rows)
        scaled = self.ranges * factor
        axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
        return _shares(scaled.max(axes).reshape(-1))


def _shares(values: Array) -> Array:
    """Numbers of 0 or above as shares of the largest."""
    top = float(values.max(initial=0.0))
    return values / top if top > 0 else values


@dataclass(frozen=True)
class _Set:
    """Channels that meet in a layer, with the layers that compute them and those that read them.

    Attributes:
        free: their groups, those that may be scaled.
    """

    free: Array
    makers: tuple[_Layer, ...]
    readers: tuple[_Layer, ...]


def _peaks(weight: Weight, ceilings: Array, normals: Mapping[str, Normal]) -> Array:
    """Output range of each channel as `_Layer.peaks` has it, bounded by the Clip behind the layer.

    Args:
        ceilings: upper bounds of the Clips behind it, (out channels,).
    """
    channels = weight.view.out_channels
    normal, bias = normals.get(weight.node.outputs[0].name), weight.bias
    if normal is not None and len(normal.mean) == channels:
        return np.minimum(np.abs(normal.mean) + REACH * normal.std, ceilings)
    if bias is None or bias.size not in (1, channels):
        return np.zeros(channels)
    return np.minimum(np.abs(np.broadcast_to(bias.reshape(-1), (channels,)).astype(np.float64)), ceilings)


def _is_free(weight: Weight, traced: Traced) -> bool:
    groups = traced.groups
    return not (groups.fixed[groups.of[weight.inputs]].all() and groups.fixed[groups.of[weight.outputs]].all())


def _layer(weight: Weight, of: Array, ceilings: Array, normals: Mapping[str, Normal]) -> _Layer:
    view = weight.view
    kernel = tuple(
        axis
        for axis, (row, column) in enumerate(
            zip(_wide(view.outputs, view.shape), _wide(view.inputs, view.shape), strict=True)
        )
        if row == 1 and column == 1
    )
    values = np.abs(weight.values.reshape(view.shape)).max(kernel, keepdims=True, initial=0.0)
    rows, columns = _wide(view.outputs, view.shape), _wide(view.inputs, view.shape)
    return _Layer(
        values,
        of[weight.inputs],
        of[weight.outputs],
        rows,
        columns,
        _peaks(weight, ceilings[of[weight.outputs]], normals),
    )


def _wide(shape: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with as many axes as `full`, from the right."""
    return (1,) * (len(full) - len(shape)) + shape


def _sets(layers: list[_Layer], fixed: Array) -> list[_Set]:
    """Sets of groups that stand in one axis of a layer, in the order in which they are computed."""
    owner = np.full(len(fixed), -1, np.int64)
    parent: list[int] = []

    def root(number: int) -> int:
        while parent[number] != number:
            number = parent[number]
        return number

    for layer in layers:
        for side in (layer.inputs, layer.outputs):
            met = {root(number) for number in np.unique(owner[side]).tolist() if number >= 0}
            number = min(met) if met else len(parent)
            if not met:
                parent.append(number)
            for other in met:
                parent[other] = number
            owner[side] = number
    roots = np.array([root(number) for number in parent], np.int64)
    found = []
    for number in np.unique(roots).tolist():
        mine = (owner >= 0) & (roots[owner] == number) if len(roots) else owner >= 0
        free = np.flatnonzero(mine & ~fixed)
        makers = tuple(layer for layer in layers if mine[layer.outputs].any())
        readers = tuple(layer for layer in layers if mine[layer.inputs].any())
        if len(free) and makers and readers:
            found.append(_Set(free, makers, readers))
    return found


def _step(one: _Set, log: Array, groups: int) -> Array:
    """What is added to the logarithms of the scales of a set."""
    before, after = np.zeros(groups), np.zeros(groups)
    for layer in one.makers:
        np.maximum.at(before, layer.outputs, layer.over(layer.rows, log))
        np.maximum.at(before, layer.outputs, layer.reached(log))
    for layer in one.readers:
        np.maximum.at(after, layer.inputs, layer.over(layer.columns, log))
    p, q = before[one.free], after[one.free]
    alive = (p > 0) & (q > 0)
    ratio = np.ones(len(p))
    np.divide(p, q, out=ratio, where=alive)
    step: Array = np.log(ratio) / 2
    return step
