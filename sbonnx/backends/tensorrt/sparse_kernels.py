"""Facts about the sparse kernels of TensorRT: the pattern that they need, and when a gain is expected."""

from __future__ import annotations

from typing import Final

from sbonnx.linear.layer import LinearLayer
from sbonnx.linear.zero_patterns import GroupSparsity, SparsityPattern

PATTERN: Final = GroupSparsity(2, 4)
"""Pattern of sparse weights: 2 of 4 input channels at one kernel tap and output."""

FAST: Final = 256
"""Input and output channels from which sparse kernels are expected to be faster than dense ones."""


def is_large(layer: LinearLayer) -> bool:
    """Return whether a gain is expected from a sparse weight of this layer."""
    return layer.groups == 1 and min(layer.in_channels, layer.outputs) >= FAST


def expected(layer: LinearLayer, pattern: SparsityPattern) -> str:
    """Return what TensorRT is expected to do with a weight of this pattern.

    Source: TensorRT developer guide, "Sparsity": a constant weight with 2:4 zeros, input channels a multiple of 4, no
    groups; a gain is expected from 256 input and output channels.
    """
    if pattern != PATTERN:
        return f"no sparse kernels: they need {PATTERN}"
    if layer.groups > 1:
        return "no sparse kernels: several groups"
    if not is_large(layer):
        return f"accepted; no gain expected below {FAST} input and output channels"
    return "accepted; faster"
