"""onnxruntime on CPU: uint8 activations, int8 per-channel weights, pairs where its kernels fuse them.

The rows follow what was measured to become an integer kernel; what has none stays float.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from sbonnx.backends.base import ON_REQUEST, Backend, Rule, interpolates, nothing_to_legalise
from sbonnx.graph import Node, query
from sbonnx.ops import ADDS, CONCATS, MULTIPLIES, PICKS_MAX, POOLS, RECTIFIERS, RESIZES
from sbonnx.spec import QuantSpec

RULES: Final = (
    Rule(
        "add",
        ADDS,
        "all",
        when="inputs_integer",
        output=True,
        switch="add",
        why="QLinearAdd reads integers on both sides and writes them",
    ),
    Rule(
        "concat",
        CONCATS,
        "all",
        when="between_linear",
        output=True,
        switch="concat",
        why="QLinearConcat reads and writes integers",
    ),
    Rule(
        "pool",
        POOLS,
        "first",
        when="input_written",
        output=True,
        switch="pool",
        why="QLinearAveragePool reads and writes integers",
    ),
    Rule(
        "max",
        PICKS_MAX & {"MaxPool"},
        "first",
        when="input_written",
        output=True,
        one_scale=True,
        switch="pool",
        why="MaxPool runs on integers when both sides have one scale",
    ),
    Rule(
        "multiply",
        MULTIPLIES,
        "all",
        when="between_linear",
        output=True,
        switch="elementwise",
        why="QLinearMul reads and writes integers",
    ),
    Rule(
        "activation",
        frozenset({"LeakyRelu", "Sigmoid"}),
        "first",
        when="between_linear",
        output=True,
        switch="elementwise",
        why="QLinearLeakyRelu and QLinearSigmoid read and write integers",
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
        why="a nearest Resize copies integers when both sides have one scale",
    ),
    *ON_REQUEST,
)


def no_kernel(node: Node) -> str | None:
    """The reason why a weighted op cannot run in integers, or None."""
    if query.dtype(node.outputs[0]) == np.dtype(np.float16):
        return "float16 has no integer kernels on onnxruntime's CPU, where pairs only cost; quantize the float32 model"
    return None


def spec(side: Literal["w", "a"], bits: int, symmetric: bool, axis: int | None) -> QuantSpec:
    """Activations unsigned (signed ones run in float kernels), weights signed when symmetric."""
    return QuantSpec(bits=bits, signed=side == "w" and symmetric, symmetric=symmetric, axis=axis)


ONNXRUNTIME: Final = Backend(
    name="onnxruntime",
    linear=frozenset({"Conv", "Gemm", "MatMul"}),
    slow_linear=no_kernel,
    linear_output=frozenset({"Conv"}),
    rules=RULES,
    folds=RECTIFIERS,
    joins_concat=False,
    int32_bias=True,
    embedding=False,
    any_bits=False,
    spec=spec,
    legalise=nothing_to_legalise,
)
