"""Data-free bias correction: the mean output shift by weight rounding, from batch-norm statistics of the inputs.

    E[V x] - E[W x]  =  (V - W) E[x]

is subtracted from the bias. The expected inputs E[x] follow from batch norms alone: mean and standard deviation of each
channel are propagated through the graph. For a normal value ``x = m + s z``, with the density ``p`` and distribution
``P`` of ``z`` and ``t = m / s``, a rectifier gives

    E max(x, 0)    =  m P(t) + s p(t)
    E max(x, 0)^2  =  (m^2 + s^2) P(t) + m s p(t)

and Clip to (a, b) is ``b - max(b - max(x, a), 0)``. Operands of sums are assumed to be independent.

Source: Nagel et al., Data-free quantization through weight equalization and bias correction, ICCV 2019, section 4.2 and
appendix C (clipped normal distribution). Sums, pools and leaky slopes are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sbonnx.correct.biases import biases_of, with_corrections
from sbonnx.correct.normals import CHANNELS, channel_map, known_channels
from sbonnx.graph import Graph, Node, Tensor
from sbonnx.graph.query import constant, node_by_name, optional_input, rank, scopes, shape, tensors_by_name
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import LINEAR
from sbonnx.planning.types import Plan, Site, Solution
from sbonnx.report import Note, Reason, Refusal
from sbonnx.spec import Array


@dataclass(frozen=True)
class Expected:
    """Mean and standard deviation of each channel of a tensor, along axis 1, float64 (C,); `std` None: unknown."""

    mean: Array
    std: Array | None = None


def spreads(graph: Graph) -> dict[str, Expected]:
    """Return mean and standard deviation of all tensors for which batch norms determine the mean, by name.

    Channels are on axis 1. The result contains inputs of linear nodes. Zero padding of convolutions is ignored, and
    windows of a pool are treated as completely inside.

    Args:
        graph: prepared; `record_normals` was called before its batch norms were folded.
    """
    by_tensor: dict[str, Expected] = {
        name: Expected(normal.mean, normal.std) for name, normal in graph.info.normals.items()
    }
    for _, body in scopes(graph):
        for node in body.nodes:
            follow = RULES.get(node.op)
            if follow is None or len(node.outputs) != 1 or node.outputs[0].name in by_tensor:
                continue
            output = follow(node, by_tensor)
            if output is not None and np.isfinite(output.mean).all():
                by_tensor[node.outputs[0].name] = output
    return by_tensor


def rectified(mean: Array, std: Array) -> tuple[Array, Array]:
    """Return the mean of ``max(x, 0)`` and of its square for normal x, float64 as `mean`."""
    safe = np.where(std > 0, std, 1.0)
    t = np.where(std > 0, mean / safe, 0.0)
    density = np.exp(-0.5 * t**2) / math.sqrt(2 * math.pi)
    below = _distribution(t)
    first = mean * below + std * density
    second = (mean**2 + std**2) * below + mean * std * density
    sure = np.maximum(mean, 0.0)
    return np.where(std > 0, first, sure), np.where(std > 0, np.maximum(second, 0.0), sure**2)


def clipped(mean: Array, std: Array, low: float, high: float) -> tuple[Array, Array]:
    """Return mean and standard deviation of ``min(max(x, low), high)`` for normal x; the limits may be infinite.

    With ``g(u) = E max(x - u, 0)`` and ``h(u) = E max(x - u, 0)^2``, both relative to `low`: the mean is ``g(low) -
    g(high)``, the mean square ``h(low) - h(high) - 2 (high - low) g(high)``.
    """
    if np.isneginf(low):
        if np.isposinf(high):
            return mean, std
        turned, spread = clipped(-mean, std, -high, np.inf)
        return -turned, spread
    first, second = rectified(mean - low, std)
    if np.isfinite(high):
        above, squared = rectified(mean - high, std)
        first, second = first - above, second - squared - 2 * (high - low) * above
    return low + first, np.sqrt(np.maximum(second - first**2, 0.0))


_distribution: Final = np.vectorize(lambda t: 0.5 * math.erfc(-t / math.sqrt(2)), otypes=[np.float64])
"""Distribution function of the standard normal distribution."""


def _known(tensor: Tensor, known: Mapping[str, Expected]) -> Expected | None:
    return known.get(tensor.name)


def _limits(node: Node) -> tuple[float, float] | None:
    """Return the limits of a Clip, one number each; None if they are computed."""
    bounds = [float(node.attrs.get("min", -np.inf)), float(node.attrs.get("max", np.inf))]
    for place, tensor in enumerate(node.inputs[1:3]):
        if tensor.is_empty():
            continue
        values = constant(tensor)
        if values is None or values.size != 1:
            return None
        bounds[place] = float(values.reshape(()))
    return (bounds[0], bounds[1]) if bounds[0] <= bounds[1] else None


def _clip(node: Node, known: Mapping[str, Expected]) -> Expected | None:
    x = _known(node.inputs[0], known)
    limits = (0.0, np.inf) if node.op == "Relu" else _limits(node)
    if x is None or x.std is None or limits is None:
        return None
    return Expected(*clipped(x.mean, x.std, *limits))


def _slope(node: Node, known: Mapping[str, Expected]) -> Expected | None:
    """LeakyRelu and PRelu: ``max(x, 0) - slope * max(-x, 0)``."""
    x = _known(node.inputs[0], known)
    if x is None or x.std is None:
        return None
    slope: Array | None = np.asarray(node.attrs.get("alpha", 0.01), np.float64)
    if len(node.inputs) > 1:
        values = constant(node.inputs[1])
        slope = None if values is None else values.astype(np.float64).reshape(-1)
    if slope is None or slope.size not in (1, x.mean.size):
        return None
    slope = slope.reshape(-1)
    up, up2 = rectified(x.mean, x.std)
    down, down2 = rectified(-x.mean, x.std)
    mean = up - slope * down
    return Expected(mean, np.sqrt(np.maximum(up2 + slope**2 * down2 - mean**2, 0.0)))


def _combine(node: Node, known: Mapping[str, Expected]) -> Expected | None:
    """Add and Sub of two tensors; Add, Sub, Mul and Div with a constant."""
    sides = [_known(tensor, known) for tensor in node.inputs]
    if len(sides) != 2:
        return None
    first, second = sides
    if first is not None and second is not None:
        if node.op not in ("Add", "Sub") or first.mean.shape != second.mean.shape:
            return None
        mean = first.mean + second.mean if node.op == "Add" else first.mean - second.mean
        both = first.std is not None and second.std is not None
        return Expected(mean, np.hypot(first.std, second.std) if both else None)  # type: ignore[arg-type]
    for index, side in enumerate(sides):
        map_ = None if side is None else channel_map(node, node.inputs[index], index, side.mean.size)
        if side is not None and map_ is not None:
            std = None if side.std is None else np.abs(map_.scale) * side.std
            return Expected(map_.scale * side.mean + map_.shift, std)
    return None


def _same(node: Node, known: Mapping[str, Expected]) -> Expected | None:
    return _known(node.inputs[0], known)


def _average(node: Node, known: Mapping[str, Expected]) -> Expected | None:
    """Averaging over positions keeps the mean. The standard deviation depends on correlations, so it is unknown."""
    x = _known(node.inputs[0], known)
    return None if x is None else Expected(x.mean)


def _flat(node: Node, known: Mapping[str, Expected]) -> Expected | None:
    """Flatten and Reshape of (N, C, ...) to (N, C * positions): repeat each channel for each of its positions."""
    x, before, after = _known(node.inputs[0], known), shape(node.inputs[0]), known_channels(node.outputs[0])
    positions = [dim for dim in (before or ())[CHANNELS + 1 :] if isinstance(dim, int)]
    if x is None or before is None or len(positions) != len(before) - 2 or rank(node.outputs[0]) != 2:
        return None
    times = math.prod(positions)
    if after is None and node.op == "Flatten" and int(node.attrs.get("axis", 1)) == 1:
        after = x.mean.size * times
    elif after is None and node.op != "Flatten":
        dims = constant(node.inputs[1])
        if dims is not None and int(dims.reshape(-1)[0]) == 0 and not node.attrs.get("allowzero", 0):
            after = x.mean.size * times
    if after != x.mean.size * times:
        return None
    return Expected(np.repeat(x.mean, times), None if x.std is None else np.repeat(x.std, times))


def _slice(node: Node, known: Mapping[str, Expected]) -> Expected | None:
    """Slice along other axes than the channel axis."""
    x, dims = _known(node.inputs[0], known), rank(node.inputs[0])
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
    if axes is None or dims is None or any(int(axis) % dims == CHANNELS for axis in axes.reshape(-1)):
        return None
    return x


def _pad(node: Node, known: Mapping[str, Expected]) -> Expected | None:
    """Pad with additional constant channels only."""
    x, dims = _known(node.inputs[0], known), rank(node.inputs[0])
    pads = constant(node.inputs[1]) if len(node.inputs) in (2, 3) else None
    fill = optional_input(node, 2)
    value = np.zeros(1) if fill is None else constant(fill)
    if x is None or dims is None or pads is None or value is None or pads.size != 2 * dims:
        return None
    ends = pads.reshape(2, dims).astype(int)
    if node.attrs.get("mode", "constant") != "constant" or (ends < 0).any() or np.delete(ends, CHANNELS, 1).any():
        return None
    around = tuple(ends[:, CHANNELS])
    mean = np.pad(x.mean, around, constant_values=float(value.reshape(-1)[0]))
    return Expected(mean, None if x.std is None else np.pad(x.std, around))


def _concat(node: Node, known: Mapping[str, Expected]) -> Expected | None:
    sides = [_known(tensor, known) for tensor in node.inputs]
    dims = rank(node.outputs[0])
    if dims is None or int(node.attrs.get("axis", 0)) % dims != CHANNELS or any(side is None for side in sides):
        return None
    there = [side for side in sides if side is not None]
    spread = [side.std for side in there if side.std is not None]
    return Expected(
        np.concatenate([side.mean for side in there]), np.concatenate(spread) if len(spread) == len(there) else None
    )


def _linear(node: Node, known: Mapping[str, Expected]) -> Expected | None:
    """Layer without batch norm: propagates the mean, not the standard deviation."""
    kind = LINEAR[node.op]
    weight, layer = constant(node.inputs[kind.weight]), LinearLayer.of_rows(node)
    rows = expected_rows(node, known)
    if weight is None or layer is None or rows is None:
        return None
    mean = through(layer.matrices(weight.astype(np.float64)), rows)
    given = optional_input(node, kind.bias)
    if given is not None:
        bias = constant(given)
        if bias is None or bias.size not in (1, mean.size):
            return None
        mean = mean + layer.beta * bias.astype(np.float64).reshape(-1)
    return Expected(mean)


def through(matrices: Array, rows: Array) -> Array:
    """Compute ``matrix @ row`` for each group: (G, O, K) and (G, K) to (G * O,), in the order of the op's outputs."""
    return np.asarray(np.einsum("gok,gk->go", matrices, rows).reshape(-1))


def expected_rows(node: Node, known: Mapping[str, Expected]) -> Array | None:
    """Return the mean of the rows that a linear node multiplies with its weight, float64 (G, K); None if unknown.

    A ConvTranspose multiplies each input position with the whole kernel and adds overlapping results: an output gets
    ``1 / strides`` of the kernel on average, so the rows are scaled by this factor.
    """
    x, layer = _known(node.inputs[0], known), LinearLayer.of_rows(node)
    if x is None or layer is None or layer.trans_a:
        return None
    if node.op in ("MatMul", "Gemm") and rank(node.inputs[0]) != 2:
        return None
    channels = x.mean.size // layer.groups
    if channels * layer.groups != x.mean.size or layer.inputs % channels:
        return None
    rows = np.repeat(x.mean.reshape(layer.groups, channels), layer.inputs // channels, axis=1)
    if node.op == "ConvTranspose":
        rows = rows / math.prod(node.attrs.get("strides") or [1])
    return np.asarray(rows * layer.alpha)


RULES: Final[dict[str, Callable[[Node, Mapping[str, Expected]], Expected | None]]] = {
    **dict.fromkeys(LINEAR, _linear),
    "Relu": _clip,
    "Clip": _clip,
    "LeakyRelu": _slope,
    "PRelu": _slope,
    "Add": _combine,
    "Sub": _combine,
    "Mul": _combine,
    "Div": _combine,
    "Identity": _same,
    "Dropout": _same,
    "AveragePool": _average,
    "GlobalAveragePool": _average,
    "Flatten": _flat,
    "Reshape": _flat,
    "Slice": _slice,
    "Pad": _pad,
    "Concat": _concat,
}
"""Propagation rules by op type."""


WHAT: Final = "correct bias"


def correct_analytically(graph: Graph, plan: Plan, solution: Solution) -> Solution:
    """Return `solution` with biases that compensate the mean output shift by weight rounding.

    Layers whose input means are not known from batch norms keep their biases and are listed in the refusals.

    Args:
        graph: prepared, with `record_normals` and `give_biases`.
        plan, solution: as given to and by `calibrate` or `weights_alone`.
    """
    statistics, biases, nodes = spreads(graph), biases_of(graph), node_by_name(graph)
    constants: dict[str, Array] = {}
    refusals: list[Refusal] = []
    for site in plan.of_role("weight"):
        if site.key not in solution.codes:
            continue
        for reader in site.readers:
            node = nodes[reader.node]
            if reader in solution.unread or node.op not in LINEAR or LINEAR[node.op].weight != reader.index:
                continue
            bias = biases.get(node.name)
            if bias is None:
                refusals.append(Refusal(WHAT, node.name, Reason("no-bias", "it has no separate bias")))
                continue
            shift = _shift(node, site, solution, statistics)
            if isinstance(shift, Reason):
                refusals.append(Refusal(WHAT, node.name, shift))
            else:
                values = solution.constants.get(bias.name)
                values = constant(bias) if values is None else values
                assert values is not None
                wide = values.astype(np.float64).reshape(-1) - shift
                constants[bias.name] = np.asarray(wide.reshape(values.shape).astype(values.dtype))
    corrected = with_corrections(plan, tensors_by_name(graph), solution, constants)
    note = Note(
        "biases-corrected",
        f"{len(constants)} biases were corrected by the mean inputs of their layers, from batch norms",
    )
    return replace(corrected, refusals=(*corrected.refusals, *refusals), notes=(*corrected.notes, note))


def _shift(node: Node, site: Site, solution: Solution, known: Mapping[str, Expected]) -> Array | Reason:
    """Return the mean output shift of a layer by rounding its weight, float64 (O,), or why it is unknown."""
    weight, layer = constant(node.inputs[LINEAR[node.op].weight]), LinearLayer.of_rows(node)
    rows = expected_rows(node, known)
    if weight is None or layer is None or rows is None:
        return Reason("mean-not-known", "no batch norm determines the mean of its input")
    rounded = solution.qparams[site.key].dequantize(solution.codes[site.key])
    return through(layer.matrices(rounded.astype(np.float64) - weight.astype(np.float64)), rows)
