"""SmoothQuant: ranges of channels moved from the inputs of layers, where outliers spoil the scale, into weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.equalize.channel_flow.constants import Weight
from sbonnx.equalize.channel_flow.trace import Traced
from sbonnx.graph import Graph, Tensor
from sbonnx.graph.edit import Names, add_constant, add_node, replace_input
from sbonnx.graph.query import producer, shape
from sbonnx.ops import CONVOLUTIONS, MATRIX_PRODUCTS, NORMS
from sbonnx.spec import Array, Bounds

LARGEST: Final = 1e4
"""How far a scale may go from 1 either way."""

PAYS: Final = 2.0
"""How far a scale within one tensor must go from another for a Mul in front of the layers to be worth its time."""


def wanted(traced: Traced) -> dict[str, int]:
    """The tensors whose ranges a channel are wanted, each with its channel axis: inputs of layers."""
    found: dict[str, int] = {}
    for weight in traced.weights:
        tensor = weight.node.inputs[0]
        axis = _axis(weight)
        if axis is not None and (_free(weight, traced) or is_pinned_product(weight, traced)):
            found.setdefault(tensor.name, axis)
    return found


def smooth_scales(
    traced: Traced, maxima: Mapping[str, Array], strength: tuple[float, float], *, per_channel: bool
) -> Array:
    """Scales of the channels that layers read, for those that something before can take up.

        s_j = max|x_j| ** strength / u_j ** (1 - strength)

    u_j is the largest absolute weight of channel j; with a scale an output channel, each row of the weight is seen in
    parts of its own largest value, since only what differs within a row costs anything. A depthwise layer then has
    nothing that could differ, and its inputs are brought to one range (strength 1).

    Args:
        maxima: largest absolute values by tensor name, (channels,).
        strength: of convolutions and of products; 0 looks at weights alone, 1 gives all input channels one range.
        per_channel: whether weights have a scale an output channel.

    Returns:
        by group, float64 (groups,); 1 where nothing is known, where a channel is all 0 or cannot be scaled.

    Source: Xiao et al. 2023, SmoothQuant, equation 4; rows in parts of their largest value and strength 1 for
    depthwise layers are ours.
    """
    groups = traced.groups
    size = len(groups.fixed)
    inputs, weights, share = np.zeros(size), np.zeros(size), np.ones(size)
    for weight in traced.weights:
        found = maxima.get(weight.node.inputs[0].name)
        if found is None or not _free(weight, traced):
            continue
        of = groups.of[weight.inputs]
        np.maximum.at(inputs, of, found)
        np.maximum.at(weights, of, columns(weight, per_channel=per_channel))
        if not (per_channel and is_depthwise(weight)):
            share[of] = strength[weight.node.op not in CONVOLUTIONS]
    alive = (inputs > 0) & (weights > 0) & ~groups.fixed
    scales = np.ones(size)
    scales[alive] = inputs[alive] ** share[alive] / weights[alive] ** (1 - share[alive])
    return _centred(scales, alive, traced)


def columns(weight: Weight, *, per_channel: bool) -> Array:
    """Largest absolute weight of each input channel, (in channels,); rows in parts of their own largest if so."""
    view = weight.view
    full = np.abs(weight.values.reshape(view.shape))
    rows, sides = (_wide(vector, view.shape) for vector in (view.outputs, view.inputs))
    if per_channel:
        top = full.max(tuple(axis for axis, length in enumerate(rows) if length == 1), keepdims=True, initial=0.0)
        full = np.divide(full, top, out=np.zeros_like(full), where=top > 0)
    found: Array = full.max(tuple(axis for axis, length in enumerate(sides) if length == 1)).reshape(-1)
    return found.astype(np.float64)


def is_depthwise(weight: Weight) -> bool:
    """Whether each output is computed from one input channel."""
    view = weight.view
    return view.in_channels > 1 and len(view.shape) > 3 and view.shape[0] == view.in_channels


def _wide(vector: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (len(full) - len(vector)) + vector


def _centred(scales: Array, alive: Array, traced: Traced) -> Array:
    """The same scales but for a factor a layer, so that they lie around 1, cut at `LARGEST`."""
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
    """The axis of the input's channels, counted from the front; None where its rank is not known."""
    size = shape(weight.node.inputs[0])
    if weight.node.op in CONVOLUTIONS:
        return 1
    if size is None or (weight.node.op == "Gemm" and weight.node.attrs.get("transA", 0)):
        return None
    return len(size) - 1


# --- where nothing before can take up a scale ----------------------------------------------------------


@dataclass(frozen=True)
class Fed:
    """Layers that read one tensor whose channels cannot be scaled where they are computed."""

    tensor: Tensor
    weights: tuple[Weight, ...]


def is_pinned_product(weight: Weight, traced: Traced) -> bool:
    """Whether a product reads a norm's output that something else reads as it is."""
    if weight.node.op not in MATRIX_PRODUCTS or _free(weight, traced) or _axis(weight) is None:
        return False
    maker = producer(weight.node.inputs[0])
    return maker is not None and maker.op in NORMS


def pinned_products(traced: Traced) -> tuple[Fed, ...]:
    """What `put_mul` may be used on, in order."""
    found: dict[int, list[Weight]] = {}
    for weight in traced.weights:
        if is_pinned_product(weight, traced):
            found.setdefault(id(weight.node.inputs[0]), []).append(weight)
    return tuple(Fed(weights[0].node.inputs[0], tuple(weights)) for weights in found.values())


def put_mul(graph: Graph, fed: Fed, maxima: Array, strength: float, *, per_channel: bool, names: Names) -> Array | None:
    """In place. The layers read x / s, made by one Mul, and have s in their weights.

    Args:
        maxima: largest absolute values of the tensor, (channels,).

    Returns:
        s, float64 (channels,); None where it would gain too little.
    """
    found = np.max([columns(weight, per_channel=per_channel) for weight in fed.weights], axis=0)
    alive = (maxima > 0) & (found > 0)
    if not alive.any():
        return None
    log = np.zeros(len(maxima))
    log[alive] = strength * np.log(maxima[alive]) - (1 - strength) * np.log(found[alive])
    log[alive] -= log[alive].mean()
    log = np.clip(log, -np.log(LARGEST), np.log(LARGEST))
    if np.ptp(log) < np.log(PAYS):
        return None
    scales = np.exp(log)
    kind = fed.weights[0].values.dtype
    body = fed.weights[0].body
    factor = add_constant(body, f"{fed.tensor.name}/smooth", (1 / scales).astype(kind), names)
    stem = f"{fed.weights[0].node.name}/Mul"
    output = add_node(body, "Mul", [fed.tensor, factor], names=names, stem=stem).outputs[0]
    output.dtype, output.shape = fed.tensor.dtype, fed.tensor.shape
    rounded = 1 / (1 / scales).astype(kind).astype(np.float64)
    for weight in fed.weights:
        replace_input(weight.node, 0, output)
        values, _ = weight.scaled(rounded, np.ones(weight.view.out_channels))
        weight.set_values(values, names)
    return scales


def largest(ranges: Mapping[str, Bounds]) -> dict[str, Array]:
    """Largest absolute values of what was measured, float64 (channels,)."""
    return {name: np.maximum(np.abs(ends.lo), np.abs(ends.hi)).astype(np.float64) for name, ends in ranges.items()}
