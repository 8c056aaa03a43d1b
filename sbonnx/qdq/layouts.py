"""Where the inputs of onnxruntime's and ONNX's integer operators stand: one row an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Layout:
    """One integer operator and the float operator that it computes.

    Attributes:
        op: the float operator.
        data: (codes, scale, zero point) of each operand, by index of the input.
        out: index of the output's scale; its zero point comes right after.
        bias: index of the int32 bias, whose scale is the product of the operands' scales, or None.
        axes: axis of each operand that a vector of scales runs over.
        passed: inputs that the float operator takes as they are, before the operands.
        drop: attributes that the float operator does not have.
    """

    op: str
    data: tuple[tuple[int, int, int], ...]
    out: int
    bias: int | None = None
    axes: tuple[int, ...] = (-2, -1)
    passed: tuple[int, ...] = ()
    drop: tuple[str, ...] = ()


_ONE: Final = ((0, 1, 2),)
_TWO: Final = ((0, 1, 2), (3, 4, 5))

LAYOUTS: Final[dict[str, Layout]] = {
    "QLinearConv": Layout("Conv", _TWO, 6, bias=8, axes=(0, 0)),
    "QLinearMatMul": Layout("MatMul", _TWO, 6),
    "QGemm": Layout("Gemm", _TWO, 7, bias=6),
    "QLinearAdd": Layout("Add", _TWO, 6),
    "QLinearMul": Layout("Mul", _TWO, 6),
    "QLinearWhere": Layout("Where", ((1, 2, 3), (4, 5, 6)), 7, passed=(0,)),
    "QLinearLeakyRelu": Layout("LeakyRelu", _ONE, 3),
    "QLinearSigmoid": Layout("Sigmoid", _ONE, 3),
    "QLinearSoftmax": Layout("Softmax", _ONE, 3, drop=("opset",)),
    "QLinearAveragePool": Layout("AveragePool", _ONE, 3, drop=("channels_last",)),
    "QLinearGlobalAveragePool": Layout("GlobalAveragePool", _ONE, 3, drop=("channels_last",)),
}
"""Operators with a fixed number of operands; QLinearConcat has any, the products of integers have no output scale."""

CONCAT: Final = "QLinearConcat"

PRODUCTS: Final = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
"""Products whose int32 results a Cast and a Mul scale afterwards: dynamic quantization."""

READS_FLOATS: Final = "DynamicQuantizeMatMul"

WITH_FLOAT_INPUT: Final = {READS_FLOATS: (1, 2, 3, 4), "MatMulIntegerToFloat": (1, 3, 5, 6)}
"""Indices of weight, its scale, its zero point and the bias."""

BLOCKED: Final = "MatMulNBits"

UNKNOWN: Final = frozenset(
    {"QLinearReduceMean", "QAttention", "QEmbedLayerNormalization", "DynamicQuantizeLSTM", "NhwcMaxPool", "QMoE"}
)
"""Integer operators that are known and not rewritten: no kernel to check against, or no single float operator."""

MICROSOFT: Final = "com.microsoft"

CONTRIBUTED: Final = (
    (LAYOUTS.keys() | WITH_FLOAT_INPUT.keys() | UNKNOWN | {CONCAT, BLOCKED}) - {"QLinearConv", "QLinearMatMul"}
)  # fmt: skip
"""Integer operators of onnxruntime's own domain."""
