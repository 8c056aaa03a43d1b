"""OpenVINO on CPU: uint8 activations, int8 symmetric weights, pairs where its low-precision transformations use them.

The rules follow experiments: tiny graphs, compiled, with the types of the executed kernels read back (docs/openvino.md,
tests/backends/openvino).
"""

from __future__ import annotations

from typing import Final, Literal

from sbonnx.backends.base import Backend, Files, Numbers
from sbonnx.backends.decoded_weights import decode_rows
from sbonnx.backends.mode_limits import BYTES, FREE, PER_CHANNEL, PER_TENSOR, SYMMETRIC, ModeLimits, SideLimits
from sbonnx.backends.openvino.costs import load_costs
from sbonnx.backends.openvino.runtime import OPENVINO_RUNTIME
from sbonnx.backends.placement_rules import ON_REQUEST, Placement, Rule, interpolates
from sbonnx.graph import Constant, Graph, Node
from sbonnx.ops import (
    ACTIVATIONS,
    ADDS,
    CONCATS,
    CONVOLUTIONS,
    EMBEDDING,
    LINEAR,
    MATRIX_PRODUCTS,
    PICKS_MAX,
    POOLS,
    REDUCES,
    RESIZES,
)
from sbonnx.spec import QuantSpec

RULES: Final = (
    Rule(
        "add",
        ADDS,
        "all",
        when="inputs_integer",
        output=True,
        switch="add",
        why="a sum of integers is fused into the convolution before it",
    ),
    Rule(
        "concat",
        CONCATS,
        "all",
        when="between_linear",
        output=True,
        switch="concat",
        why="inputs of one scale are concatenated as integers",
    ),
    Rule(
        "pool",
        POOLS | (REDUCES & {"ReduceMean"}),
        "first",
        when="input_written",
        output=True,
        switch="pool",
        why="a pool between two pairs reads and writes integers",
    ),
    Rule(
        "max",
        PICKS_MAX & {"MaxPool"},
        "first",
        when="input_written",
        output=True,
        one_scale=True,
        switch="pool",
        why="a MaxPool behind a pair picks integers",
    ),
    Rule(
        "resize",
        RESIZES,
        "first",
        when="input_written",
        output=True,
        one_scale=True,
        switch="resize",
        unless=interpolates,
        why="a nearest Resize behind a pair copies integers",
    ),
    *ON_REQUEST,
)

FUSED_BLOCKS: Final = frozenset({"block:gelu", "block:silu", "block:hardswish", "block:mish"})
"""Blocks that OpenVINO recognizes and fuses into the kernel before them."""


class OpenVinoNumbers(Numbers):
    """Signed weights, and activations that are signed if they are symmetric."""

    def spec(self, side: Literal["w", "a"], bits: int, symmetric: bool, axis: int | None) -> QuantSpec:
        """Return signed types for weights and for symmetric activations, unsigned ones for affine activations."""
        return QuantSpec(bits=bits, signed=side == "w" or symmetric, symmetric=symmetric, axis=axis)

    def centred(self, node: Node, index: int) -> bool:
        """Return whether the integer kernel of an op needs an input with zero point 0.

        ConvTranspose and products of two activations do: with another zero point they run in float.
        """
        if node.op == "ConvTranspose":
            return index == 0
        return node.op in MATRIX_PRODUCTS and not any(isinstance(tensor, Constant) for tensor in node.inputs[:2])


class OpenVinoFiles(Files):
    """Q/DQ with tables whose rows are decoded as they are read."""

    def legalise(self, graph: Graph) -> list[str]:
        """Let Gathers read rows of codes; OpenVINO would decode a whole table when it loads the file."""
        return decode_rows(graph)


OPENVINO: Final = Backend(
    name="openvino",
    placement=Placement(
        linear=frozenset(LINEAR),
        rules=RULES,
        linear_output=CONVOLUTIONS,
        writes_float=True,
        folds=ACTIVATIONS | FUSED_BLOCKS,
        stored=EMBEDDING,
    ),
    numbers=OpenVinoNumbers(saturates=True, only_channels=True),
    files=OpenVinoFiles(packs_weights=True),
    modes={
        "static": ModeLimits(
            weights=SideLimits(BYTES, SYMMETRIC, "per-channel-symmetric"),
            activations=SideLimits((8,), PER_TENSOR, "per-tensor-affine", observer="mse"),
        ),
        "weight_only": ModeLimits(
            weights=SideLimits((4, 8), PER_CHANNEL, "per-channel-affine", 4, "mse"),
            activations=FREE,
            smallest=32 * 32,
            block=32,
            why="read in fewer bytes, computed in float",
        ),
    },
    costs=load_costs,
    runtime=OPENVINO_RUNTIME,
)
