"""Plain Q/DQ semantics at any width from 2 to 16 bits: for numerical studies, and with Sparsebit's placement."""

from __future__ import annotations

from typing import Final

from sbonnx.backends.base import Backend, Files, Numbers
from sbonnx.backends.mode_limits import ANY_BITS, ANY_STATIC, SCHEMES, ModeLimits, SideLimits
from sbonnx.backends.onnxruntime.exact_biases import keep_biases
from sbonnx.backends.placement_rules import Placement, Rule, copies
from sbonnx.graph import Graph
from sbonnx.ops import (
    ACTIVATIONS,
    ADDS,
    CONCATS,
    ELEMENTWISE,
    EMBEDDING,
    LINEAR,
    MATRIX_PRODUCTS,
    POOLS,
    REDUCES,
    RESIZES,
    SOFTMAX,
)
from sbonnx.small_floats import IN_BLOCKS

NORM_OPS: Final = frozenset({"LayerNormalization", "RMSNormalization", "GroupNormalization"})
NORM_BLOCKS: Final = frozenset({"block:layernorm", "block:rmsnorm", "block:groupnorm"})
ACTIVATION_BLOCKS: Final = frozenset({"block:gelu", "block:silu", "block:hardswish", "block:mish"})

RULES: Final = (
    Rule(
        "attention",
        frozenset({"block:attention_softmax"}),
        "none",
        why="scale, mask and softmax of attention stay in float",
    ),
    Rule(
        "norm",
        NORM_OPS | NORM_BLOCKS,
        "first",
        switch="norm",
        why="input of a normalization",
    ),
    Rule(
        "activation",
        ACTIVATIONS | ACTIVATION_BLOCKS,
        "first",
        when="not_after_producer",
        why="input of an activation that does not directly follow a conv, linear, batch norm or add",
    ),
    Rule("pool", POOLS, "first", switch="pool", why="input of an averaging pool"),
    Rule("reduce", REDUCES & {"ReduceMean"}, "first", switch="pool", why="input of a mean"),
    Rule("softmax", SOFTMAX, "first", switch="softmax", why="input of a softmax"),
    Rule("matmul", MATRIX_PRODUCTS, "all", switch="matmul", why="product of two activations"),
    Rule("add", ADDS, "all", switch="add", default=False, why="input of an element-wise add"),
    Rule("concat", CONCATS, "all", switch="concat", default=False, why="input of a concat"),
    Rule("elementwise", ELEMENTWISE, "all", switch="elementwise", default=False, why="input of an element-wise op"),
    Rule("resize", RESIZES, "first", switch="resize", unless=copies, why="input of an interpolating resize"),
)


class VirtualFiles(Files):
    """Q/DQ of any width, as onnxruntime simulates them."""

    def legalise(self, graph: Graph) -> list[str]:
        """Keep float biases that onnxruntime would round. In place; return what was done."""
        return keep_biases(graph)


VIRTUAL: Final = Backend(
    name="virtual",
    placement=Placement(linear=frozenset(LINEAR), rules=RULES, folds=ACTIVATIONS, stored=EMBEDDING),
    numbers=Numbers(any_bits=True, fp8="simulated", block_floats=IN_BLOCKS),
    files=VirtualFiles(),
    modes={
        "static": ANY_STATIC,
        "weight_only": ModeLimits(
            weights=SideLimits(ANY_BITS, SCHEMES, "per-channel-symmetric", 4, "mse"),
            activations=ANY_STATIC.activations,
            block=32,
        ),
    },
)
