"""Cross-layer equalization: scales channels of consecutive layers to equal ranges, by factors that cancel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.equalize.scale_trace import Traced, Weight
from sbonnx.graph.model import Normal
from sbonnx.spec import Array

SWEEPS: Final = 50
"""Maximum number of iterations over all layers."""

CLOSE: Final = 1e-3
"""Convergence threshold: the iteration stops if no scale changes by more than this share."""

REACH: Final = 3.0
"""Assumed range of a channel in standard deviations from its mean, as in bias absorption of the paper."""

LARGEST: Final = 1e4
"""Limit of the scales and of their inverses. Channels of almost zero range would get arbitrary scales."""


def cross_layer_scales(traced: Traced, normals: Mapping[str, Normal]) -> Array:
    """Compute scales that equalize the channel ranges of each layer's output and of its readers.

    With p_i = r_i / max r for the range r_i of channel i of a weight, its largest absolute value:

        s_i = s_i sqrt(p_i(before) / p_i(after)),      before: rows of what computes i; after: columns of what reads it

    iterated until convergence over sets of channels that share a layer. If several layers compute or read a channel
    (residual additions, concatenations, fire modules) the largest p counts. For one layer on each side this is the
    fixed point of the paper's formula up to one factor for all channels, which per-tensor scales do not depend on.
    Channels that are 0 on one side keep their scale.

    Ranges of activations count as rows of the layer that computes them (this is ours): by the formula alone a channel
    with small weights and a large bias is enlarged until it dominates the range of its tensor. The paper absorbs such
    biases into the next layer, which is impossible for convolutions with zero padding. On MobileNetV1, where the first
    layer has such channels, one scale per tensor gives 0.044 of top-1 without and 0.53 with it (float 0.56).

    Args:
        normals: statistics of layer outputs with folded batch norms; for other layers only the bias is used.

    Returns:
        by group, float64 (groups,); 1 for fixed groups.

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
        for channel_set in sets:
            step = _step(channel_set, log, len(log))
            log[channel_set.free] = np.clip(log[channel_set.free] + step, -limit, limit)
        if not len(log) or np.abs(log - before).max() < CLOSE:
            break
    return np.exp(log)


@dataclass(frozen=True)
class _Layer:
    """Ranges of a weight, and the groups of its channels.

    Attributes:
        ranges: largest absolute value over the kernel, float32 (group, outputs, inputs, 1).
        inputs, outputs: groups, (in channels,) and (out channels,).
        rows, columns: shapes in which vectors over outputs and inputs broadcast against `ranges`.
        peaks: largest known absolute value of each output channel, float64 (out channels,).
    """

    ranges: Array
    inputs: Array
    outputs: Array
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    peaks: Array

    def reached(self, log: Array) -> Array:
        """Return the peaks of channels at the scales exp(`log`), relative to the largest."""
        return _shares(self.peaks / np.exp(log[self.outputs]))

    def over(self, shape: tuple[int, ...], log: Array) -> Array:
        """Return the ranges of channels at the scales exp(`log`), relative to the largest."""
        factor = np.exp(log[self.inputs]).reshape(self.columns) / np.exp(log[self.outputs]).reshape(self.rows)
        scaled = self.ranges * factor
        axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
        return _shares(scaled.max(axes).reshape(-1))


def _shares(values: Array) -> Array:
    """Divide nonnegative numbers by their maximum."""
    top = float(values.max(initial=0.0))
    return values / top if top > 0 else values


@dataclass(frozen=True)
class _ChannelSet:
    """Channels that share a layer, with the layers that compute them and those that read them.

    Attributes:
        free: the groups that may be scaled.
    """

    free: Array
    makers: tuple[_Layer, ...]
    readers: tuple[_Layer, ...]


def _peaks(weight: Weight, ceilings: Array, normals: Mapping[str, Normal]) -> Array:
    """Return the output range of each channel for `_Layer.peaks`, limited by the following Clip.

    Args:
        ceilings: upper bounds of the following Clips, (out channels,).
    """
    channels = weight.layer.out_channels
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
    layer = weight.layer
    return _Layer(
        np.abs(layer.by_channel(weight.values)).max(3, keepdims=True, initial=0.0),
        of[weight.inputs],
        of[weight.outputs],
        layer.out_shape,
        layer.in_shape,
        _peaks(weight, ceilings[of[weight.outputs]], normals),
    )


def _sets(layers: list[_Layer], fixed: Array) -> list[_ChannelSet]:
    """Partition groups into sets that share an axis of a layer, in the order in which they are computed."""
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
    sets = []
    for number in np.unique(roots).tolist():
        mine = (owner >= 0) & (roots[owner] == number) if len(roots) else owner >= 0
        free = np.flatnonzero(mine & ~fixed)
        makers = tuple(layer for layer in layers if mine[layer.outputs].any())
        readers = tuple(layer for layer in layers if mine[layer.inputs].any())
        if len(free) and makers and readers:
            sets.append(_ChannelSet(free, makers, readers))
    return sets


def _step(one: _ChannelSet, log: Array, groups: int) -> Array:
    """Return the update of the logarithms of a set's scales."""
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
