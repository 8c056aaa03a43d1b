"""Statistics of tensors from batch normalizations, recorded before these are folded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from sbonnx.graph import Graph, Node, Normal, Tensor
from sbonnx.graph.edit import Names, add_constant, replace_input
from sbonnx.graph.query import constant, rank, readers, scopes, shape
from sbonnx.patterns.fuse.linear import Affine, along_channel, of_batchnorm, of_constant
from sbonnx.spec import Array

CHANNELS: Final = 1
"""Channel axis of a BatchNormalization."""

STATISTICS: Final = (3, 4)
"""Input indices of mean and variance of a BatchNormalization."""


def record_normals(graph: Graph) -> int:
    """Record mean and spread of all BatchNormalization outputs, and of constant maps of these, in `graph.info`.

    To be called before the fusions: a layer into which a BatchNormalization and the following nodes are folded has an
    output with the name of the last folded tensor.

    Returns:
        number of batch normalizations with known parameters.
    """
    normals: dict[str, Normal] = {}
    counted = 0
    for _, body in scopes(graph):
        for node in body.nodes:
            normal = normal_of(node)
            counted += normal is not None
            normal = _scaled(node, normals) if normal is None else normal
            if normal is not None:
                normals[node.outputs[0].name] = normal
    graph.info.normals = normals
    return counted


def normal_of(node: Node) -> Normal | None:
    """Return output statistics of a BatchNormalization; None for any other node or if its parameters are unknown.

    With its factor ``g = gamma / sqrt(variance + eps)``: mean beta, standard deviation ``|g| sqrt(variance)``.
    """
    parameters = None if node.op != "BatchNormalization" else batchnorm_constants(node)
    if parameters is None:
        return None
    gamma, beta, mean, variance = parameters
    epsilon = float(node.attrs.get("epsilon", 1e-5))
    factor = of_batchnorm(gamma, beta, mean, variance, epsilon).scale
    spread = np.maximum(variance.astype(np.float64), 0.0)
    if not (np.isfinite(factor).all() and np.isfinite(spread).all()):
        return None
    return Normal(node.name, beta.astype(np.float64), np.abs(factor) * np.sqrt(spread), factor**2 * epsilon)


def batchnorm_constants(node: Node) -> tuple[Array, Array, Array, Array] | None:
    """Return gamma, beta, mean, variance of a BatchNormalization at inference, (C,) each; None if any is computed."""
    values = [constant(tensor) for tensor in node.inputs[1:5]]
    if node.attrs.get("training_mode", 0) or len(values) < 4 or len(node.outputs) != 1:
        return None
    gamma, beta, mean, variance = values
    if gamma is None or beta is None or mean is None or variance is None:
        return None
    return gamma, beta, mean, variance


def own_statistics(graph: Graph) -> tuple[str, ...]:
    """Give every BatchNormalization with constant parameters a separate mean and variance, in place.

    Returns:
        names of the changed nodes.
    """
    given = []
    names: Names | None = None
    for _, body in scopes(graph):
        for node in body.nodes:
            for place in STATISTICS if normal_of(node) is not None else ():
                values = constant(node.inputs[place])
                if len(readers(node.inputs[place])) > 1 and values is not None:
                    names = Names(graph) if names is None else names
                    replace_input(node, place, add_constant(body, node.inputs[place].name, np.array(values), names))
                    given.append(node.name)
    return tuple(dict.fromkeys(given))


def _scaled(node: Node, known: Mapping[str, Normal]) -> Normal | None:
    """Return the spread of a known tensor after Mul, Add, Sub or Div with a constant per channel, else None."""
    inputs_known = [(tensor, index) for index, tensor in enumerate(node.inputs) if tensor.name in known]
    if len(inputs_known) != 1 or len(node.inputs) != 2:
        return None
    tensor, index = inputs_known[0]
    map_ = channel_map(node, tensor, index, len(known[tensor.name].mean))
    return None if map_ is None else known[tensor.name].through(map_.scale, map_.shift)


def channel_map(node: Node, tensor: Tensor, index: int, channels: int) -> Affine | None:
    """Return the affine map of a binary node on its input `index`, if the other one is a constant per channel."""
    values, dims = constant(node.inputs[1 - index]), rank(tensor)
    if values is None or dims is None or dims <= CHANNELS:
        return None
    numbers = along_channel(values, dims, CHANNELS, channels)
    map_ = None if numbers is None else of_constant(node.op, numbers, constant_first=index == 1)
    return map_ if map_ is not None and np.isfinite(map_.scale).all() else None


def known_channels(tensor: Tensor) -> int | None:
    """Return the length of the channel axis, if known."""
    dims = shape(tensor)
    length = dims[CHANNELS] if dims is not None and len(dims) > CHANNELS else None
    return length if isinstance(length, int) else None
