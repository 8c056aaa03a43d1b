"""TensorRT's rules for sparse weights: which have the pattern of its sparse kernels, and which miss it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np

from sbonnx.backends.tensorrt.sparse_kernels import FAST, PATTERN, is_large
from sbonnx.graph import Constant, Node, query
from sbonnx.linear.layer import LinearLayer
from sbonnx.linting.model_view import View
from sbonnx.ops import LINEAR
from sbonnx.spec import Array

Site: TypeAlias = tuple[str, str, str]

HALF: Final = 0.495
"""Share of zeros from which a weight counts as sparse: a half, less a rounding of the number."""

NAMED: Final = 8
"""Layers that a finding names."""


def misses_pattern(view: View) -> Iterator[Site]:
    """P17: Find weights of which half the values are zero, but not in the pattern of the sparse kernels."""
    for node, layer, nonzero in _weights(view):
        why = _miss(layer, nonzero)
        if why is not None and np.count_nonzero(nonzero) <= (1 - HALF) * nonzero.size:
            share = 1 - np.count_nonzero(nonzero) / nonzero.size
            yield node.name, node.inputs[LINEAR[node.op].weight].name, f"{share:.0%} of its values are zero, but {why}"


def sparse_weights(view: View) -> Iterator[Site]:
    """P17-kernels: Report once which weights have the pattern, and for which a gain is expected."""
    fitting, large, dense = [], 0, []
    for node, layer, nonzero in _weights(view):
        if _miss(layer, nonzero) is None:
            fitting.append(node.name)
            large += is_large(layer)
        else:
            dense.append(node.name)
    if fitting:
        others = f"; not {PATTERN}: {_named(dense)}" if dense else ""
        yield (
            fitting[0],
            "",
            f"{len(fitting)} of {len(fitting) + len(dense)} weights are {PATTERN}: {_named(fitting)}; {large} of them "
            f"have {FAST} or more input and output channels{others}",
        )


def _miss(layer: LinearLayer, nonzero: Array) -> str | None:
    """Return why a weight (G, O, K) does not have the pattern, or None."""
    why = PATTERN.misfit(layer)
    if why is not None:
        return why
    if layer.groups > 1:
        return f"it has {layer.groups} groups"
    count = PATTERN.excess(nonzero, layer)
    groups = nonzero.size // PATTERN.size
    return f"{count} of its {groups} groups of 4 input channels have more than 2 others" if count else None


def _weights(view: View) -> Iterator[tuple[Node, LinearLayer, Array]]:
    """Yield the linear nodes with a stored weight: its layout, and which values (G, O, K) are not zero."""
    for node in view.weighted:
        tensor = node.inputs[LINEAR[node.op].weight]
        nonzero = _nonzero(view, node)
        layer = None if nonzero is None else LinearLayer.of_shape(node.op, node.attrs, nonzero.shape)
        if nonzero is not None and isinstance(layer, LinearLayer) and nonzero.size and tensor is not None:
            yield node, layer, layer.matrices(nonzero)


def _nonzero(view: View, node: Node) -> Array | None:
    """Return which values of a stored weight are not zero: of floats, or of codes with a DequantizeLinear."""
    tensor = node.inputs[LINEAR[node.op].weight]
    stored = view.quantizer_of(tensor)
    if stored is None:
        return np.asarray(query.constant(tensor) != 0) if isinstance(tensor, Constant) else None
    values = query.constant(stored.data)
    if values is None:  # floats with a pair of QuantizeLinear and DequantizeLinear
        before = view.quantizer_of(stored.data)
        values = None if before is None else query.constant(before.data)
        return None if values is None else np.asarray(values != 0)
    if stored.zero is None or not np.any(stored.zero.astype(np.float32)):
        return np.asarray(values.astype(np.float32) != 0)
    if stored.zero.size > 1 and (stored.zero.ndim != 1 or stored.blocked):
        return None
    sides = [1] * values.ndim
    sides[stored.channel_axis if stored.zero.size > 1 else 0] = -1
    return np.asarray(values.astype(np.float32) != stored.zero.astype(np.float32).reshape(sides))


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
