"""Cross-layer equalization: channels of two layers brought to the same range, by a scale that cancels between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.equalize.parts import Weight
from sbonnx.equalize.trace import Traced
from sbonnx.spec import Array

SWEEPS: Final = 50
"""Rounds over all layers at most."""

CLOSE: Final = 1e-3
"""A round that moves no scale by more than this share is the last."""

LARGEST: Final = 1e4
"""How far a scale may go from 1 either way: channels that are all but dead would get any."""


def cross_layer_scales(traced: Traced) -> Array:
    """Scales that bring the channels of each layer's output and of what reads it to equal ranges.

    With p_i = r_i / max r for the range r_i of channel i of a weight, its largest absolute value:

        s_i = s_i sqrt(p_i(before) / p_i(after)),      before: rows of what computes i; after: columns of what reads it

    until nothing moves, one set of channels that meet in a layer after the other. Where several layers compute or
    read a channel (residual additions, concatenations, fires) the largest p counts. For one layer on each side it is
    the fixed point of the paper's formula but for one factor for all channels, which per-tensor scales do not see.
    Channels that are 0 on one side keep their scale.

    Returns:
        by group, float64 (groups,); 1 for fixed ones.

    Source: Nagel et al. 2019, Data-Free Quantization Through Weight Equalization and Bias Correction, section 4.1.
    """
    groups = traced.groups
    log = np.zeros(len(groups.fixed))
    layers = [_layer(weight, groups.of) for weight in traced.weights if _is_free(weight, traced)]
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
    """

    ranges: Array
    inputs: Array
    outputs: Array
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def over(self, shape: tuple[int, ...], log: Array) -> Array:
        """Ranges of channels with the scales exp(`log`), as shares of the largest."""
        factor = np.exp(log[self.inputs]).reshape(self.columns) / np.exp(log[self.outputs]).reshape(self.rows)
        scaled = self.ranges * factor
        axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
        found: Array = scaled.max(axes).reshape(-1)
        top = float(found.max(initial=0.0))
        return found / top if top > 0 else found


@dataclass(frozen=True)
class _Set:
    """Channels that meet in a layer, with the layers that compute them and those that read them.

    Attributes:
        free: their groups, those that may be scaled.
    """

    free: Array
    makers: tuple[_Layer, ...]
    readers: tuple[_Layer, ...]


def _is_free(weight: Weight, traced: Traced) -> bool:
    groups = traced.groups
    return not (groups.fixed[groups.of[weight.inputs]].all() and groups.fixed[groups.of[weight.outputs]].all())


def _layer(weight: Weight, of: Array) -> _Layer:
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
    return _Layer(values, of[weight.inputs], of[weight.outputs], rows, columns)


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
    for layer in one.readers:
        np.maximum.at(after, layer.inputs, layer.over(layer.columns, log))
    p, q = before[one.free], after[one.free]
    alive = (p > 0) & (q > 0)
    ratio = np.ones(len(p))
    np.divide(p, q, out=ratio, where=alive)
    step: Array = np.log(ratio) / 2
    return step
