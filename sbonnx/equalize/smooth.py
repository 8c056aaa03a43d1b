"""SmoothQuant: moves channel ranges with outliers from layer inputs into weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from sbonnx.equalize.scale_trace import ConstantEditor, Traced, Weight
from sbonnx.graph import Graph, Tensor
from sbonnx.graph.constant_edits import ConstantEdit
from sbonnx.graph.edit import add_constant, add_node, replace_input
from sbonnx.graph.query import producer, shape
from sbonnx.ops import CONVOLUTIONS, MATRIX_PRODUCTS, NORMS
from sbonnx.spec import Array, Bounds

LARGEST: Final = 1e4
"""Limit of scales and of their inverses."""

PAYS: Final = 2.0
"""Minimum ratio of the largest to the smallest scale of a tensor for which a Mul is worth its time."""


Strengths: TypeAlias = tuple[float | None, float]
"""Of convolutions, None: they are left alone, and of products."""


def wanted(traced: Traced, strengths: Strengths, *, only_after_norms: bool) -> dict[str, int]:
    """Return the layer inputs whose channel ranges are needed, each with its channel axis.

    Args:
        only_after_norms: none in a network in which no product reads a normalization.
    """
    axes: dict[str, int] = {}
    if only_after_norms and not any(map(_reads_norm, traced.weights)):
        return axes
    for weight in traced.weights:
        if _strength(weight, strengths) is None:
            continue
        tensor = weight.node.inputs[0]
        axis = _axis(weight)
        if axis is not None and (_free(weight, traced) or is_pinned_product(weight, traced)):
            axes.setdefault(tensor.name, axis)
    return axes


def smooth_scales(traced: Traced, maxima: Mapping[str, Array], strengths: Strengths, *, per_channel: bool) -> Array:
    """Compute scales of the channels that layers read, if preceding constants can absorb them.

        s_j = max|x_j| ** strength / u_j ** (1 - strength)

    u_j is the largest absolute weight of channel j. With one scale per output channel, each row of the weight is
    divided by its largest value first, since only differences within a row affect the error. A depthwise layer then has
    no differences, and its inputs are scaled to one range (strength 1).

    Args:
        maxima: largest absolute values by tensor name, (channels,).
        strengths: for convolutions and for products; 0 uses weights only, 1 gives all input channels one range.
        per_channel: whether weights have one scale per output channel.

    Returns:
        by group, float64 (groups,); 1 if nothing is known or the channel is all 0 or cannot be scaled.

    Source: Xiao et al. 2023, SmoothQuant, equation 4; the division of rows by their largest value and strength 1 for
    depthwise layers are ours.
    """
    groups = traced.groups
    size = len(groups.fixed)
    inputs, weights, share = np.zeros(size), np.zeros(size), np.ones(size)
    for weight in traced.weights:
        input_maxima, strength = maxima.get(weight.node.inputs[0].name), _strength(weight, strengths)
        if input_maxima is None or strength is None or not _free(weight, traced):
            continue
        of = groups.of[weight.inputs]
        np.maximum.at(inputs, of, input_maxima)
        np.maximum.at(weights, of, columns(weight, per_channel=per_channel))
        if not (per_channel and is_depthwise(weight)):
            share[of] = strength
    alive = (inputs > 0) & (weights > 0) & ~groups.fixed
    scales = np.ones(size)
    scales[alive] = inputs[alive] ** share[alive] / weights[alive] ** (1 - share[alive])
    return _centred(scales, alive, traced)


def columns(weight: Weight, *, per_channel: bool) -> Array:
    """Return the largest absolute weight of each input channel, (in channels,).

    With `per_channel` rows are divided by their largest value first.
    """
    full = np.abs(weight.layer.by_channel(weight.values))
    if per_channel:
        top = full.max((2, 3), keepdims=True, initial=0.0)
        full = np.divide(full, top, out=np.zeros_like(full), where=top > 0)
    largest: Array = full.max((1, 3)).reshape(-1)
    return largest.astype(np.float64)


def is_depthwise(weight: Weight) -> bool:
    """Return whether each output is computed from one input channel."""
    return weight.layer.in_channels == weight.layer.group > 1


def _centred(scales: Array, alive: Array, traced: Traced) -> Array:
    """Divide the scales of each layer by their geometric mean, and limit them to `LARGEST`."""
    log = np.log(scales)
    seen = np.zeros(len(scales), bool)
    for weight in traced.weights:
        of = np.unique(traced.groups.of[weight.inputs])
        of = of[alive[of] & ~seen[of]]
        if len(of):
            log[of] -= log[of].mean()
            seen[of] = True
    cut: Array = np.exp(np.clip(log, -np.log(LARGEST), np.log(LARGEST)))
    return cut


def _free(weight: Weight, traced: Traced) -> bool:
    groups = traced.groups
    return not groups.fixed[groups.of[weight.inputs]].all()


def _axis(weight: Weight) -> int | None:
    """Return the channel axis of the input, counted from the front; None if its rank is unknown."""
    size, axis = shape(weight.node.inputs[0]), weight.layer.data_axis
    if axis == -1:
        return None if size is None else len(size) - 1
    return axis if axis > 0 else None


# --- inputs whose scale no preceding constant can absorb ----------------------------------------------


@dataclass(frozen=True)
class Fed:
    """Layers that read one tensor whose channels cannot be scaled where they are computed."""

    tensor: Tensor
    weights: tuple[Weight, ...]


def is_pinned_product(weight: Weight, traced: Traced) -> bool:
    """Return whether a product reads a norm's output that is also read by a node that needs it unscaled."""
    if weight.node.op not in MATRIX_PRODUCTS or _free(weight, traced) or _axis(weight) is None:
        return False
    return _reads_norm(weight)


def _reads_norm(weight: Weight) -> bool:
    """Return whether it is a product that reads a normalization."""
    maker = producer(weight.node.inputs[0])
    return weight.node.op in MATRIX_PRODUCTS and maker is not None and maker.op in NORMS


def _strength(weight: Weight, strengths: Strengths) -> float | None:
    return strengths[weight.node.op not in CONVOLUTIONS]


def pinned_products(traced: Traced) -> tuple[Fed, ...]:
    """Return the candidates for `put_mul`, in order."""
    by_tensor: dict[int, list[Weight]] = {}
    for weight in traced.weights:
        if is_pinned_product(weight, traced):
            by_tensor.setdefault(id(weight.node.inputs[0]), []).append(weight)
    return tuple(Fed(weights[0].node.inputs[0], tuple(weights)) for weights in by_tensor.values())


def put_mul(
    graph: Graph, fed: Fed, maxima: Array, strength: float, *, per_channel: bool, editor: ConstantEditor
) -> Array | None:
    """Insert one Mul, so that the layers read x / s, and multiply their weights by s, in place.

    Args:
        maxima: largest absolute values of the tensor, (channels,).

    Returns:
        s, float64 (channels,); None if the gain would be too small.
    """
    weight_maxima = np.max([columns(weight, per_channel=per_channel) for weight in fed.weights], axis=0)
    alive = (maxima > 0) & (weight_maxima > 0)
    if not alive.any():
        return None
    log = np.zeros(len(maxima))
    log[alive] = strength * np.log(maxima[alive]) - (1 - strength) * np.log(weight_maxima[alive])
    log[alive] -= log[alive].mean()
    log = np.clip(log, -np.log(LARGEST), np.log(LARGEST))
    if np.ptp(log) < np.log(PAYS):
        return None
    scales = np.exp(log)
    kind = fed.weights[0].values.dtype
    body = fed.weights[0].body
    factor = add_constant(body, f"{fed.tensor.name}/smooth", (1 / scales).astype(kind), editor.names)
    stem = f"{fed.weights[0].node.name}/Mul"
    output = add_node(body, "Mul", [fed.tensor, factor], names=editor.names, stem=stem).outputs[0]
    output.dtype, output.shape = fed.tensor.dtype, fed.tensor.shape
    rounded = 1 / (1 / scales).astype(kind).astype(np.float64)
    for weight in fed.weights:
        replace_input(weight.node, 0, output)
        values, _ = weight.scaled(rounded, np.ones(weight.layer.out_channels))
        weight.set_values(values, editor, ConstantEdit("channels", inputs=rounded))
    return scales


def largest(ranges: Mapping[str, Bounds]) -> dict[str, Array]:
    """Return the largest absolute values of measured ranges, float64 (channels,)."""
    return {name: np.maximum(np.abs(ends.lo), np.abs(ends.hi)).astype(np.float64) for name, ends in ranges.items()}
