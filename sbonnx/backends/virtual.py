"""Plain Q/DQ semantics at any width from 2 to 16 bits: for numerical studies, and with Sparsebit's placement."""

from __future__ import annotations

from typing import Final

from sbonnx.backends.base import Backend, Rule, copies, never, signed_when_symmetric
from sbonnx.backends.onnxruntime.exact_biases import keep_biases
from sbonnx.ops import ACTIVATIONS, ADDS, CONCATS, ELEMENTWISE, MATRIX_PRODUCTS, POOLS, REDUCES, RESIZES, SOFTMAX

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

VIRTUAL: Final = Backend(
    name="virtual",
    linear=frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"}),
    slow_linear=never,
    linear_output=frozenset(),
    rules=RULES,
    folds=ACTIVATIONS,
    joins_concat=False,
    int32_bias=False,
    embedding=True,
    any_bits=True,
    spec=signed_when_symmetric,
    legalise=keep_biases,
)
