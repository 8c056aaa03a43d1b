"""TensorRT explicit quantization: symmetric, zero point 0, per-channel weights, float bias."""

from __future__ import annotations

from typing import Any, Final, Literal

from sbonnx.backends.base import Backend, Rule
from sbonnx.graph import query
from sbonnx.ops import ADDS, POOLS, QDQ
from sbonnx.spec import QuantSpec

RULES: Final = (
    Rule(
        "residual_add",
        ADDS,
        "skip",
        switch="add",
        why="the skip branch of a residual add, and it alone: the conv branch fuses with the add",
    ),
    Rule(
        "pool",
        POOLS,
        "first",
        when="output_read_quantized",
        switch="pool",
        why="an averaging pool is int8 only between two pairs",
    ),
    Rule("concat", frozenset({"Concat"}), "all", switch="concat", default=False, why="input of a concat"),
    Rule("matmul", frozenset({"MatMul", "Gemm"}), "all", switch="matmul", default=False, why="product of activations"),
    Rule("softmax", frozenset({"Softmax"}), "first", switch="softmax", default=False, why="input of a softmax"),
    Rule(
        "norm",
        frozenset({"LayerNormalization", "RMSNormalization", "block:layernorm", "block:rmsnorm"}),
        "first",
        switch="norm",
        default=False,
        why="input of a normalization",
    ),
    Rule("multiply", frozenset({"Mul"}), "all", switch="elementwise", default=False, why="input of a product"),
    Rule("resize", frozenset({"Resize"}), "first", switch="resize", default=False, why="input of a resize"),
)


def spec(side: Literal["w", "a"], bits: int, symmetric: bool, axis: int | None) -> QuantSpec:
    """Always signed and symmetric; the recipe was validated to ask for nothing else."""
    return QuantSpec(bits=bits, signed=True, symmetric=True, axis=axis)


def legalise(graph: Any) -> list[str]:
    """Write what TensorRT's parser needs and ONNX leaves to defaults. In place; returns what was done.

    The axis of a vector of scales is written out (ONNX takes 1 when absent, TensorRT's parser 0).
    """
    done = []
    for _, body in query.scopes(graph):
        for node in body.nodes:
            shape = query.shape(node.inputs[1]) if node.op in QDQ else None
            if shape is not None and len(shape) == 1 and "axis" not in node.attrs:
                node.attrs["axis"] = 1
                done.append(f"{node.name}: axis 1 written out")
    return done


TENSORRT: Final = Backend(
    name="tensorrt",
    linear=frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"}),
    linear_output=frozenset(),
    rules=RULES,
    folds=frozenset({"Relu", "Clip", "Sigmoid", "LeakyRelu", "Tanh"}),
    all_readers=False,
    joins_concat=True,
    int32_bias=False,
    embedding=False,
    any_bits=False,
    spec=spec,
    legalise=legalise,
)
