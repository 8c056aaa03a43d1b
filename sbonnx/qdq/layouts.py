"""Input layouts of the integer operators of onnxruntime and ONNX: one row per operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Layout:
    """Input layout of one integer operator, and the float operator that it computes.

    Attributes:
        op: the float operator.
        data: input indices of (codes, scale, zero point) of each operand.
        out: input index of the output's scale; its zero point follows.
        bias: input index of the int32 bias, whose scale is the product of the operands' scales, or None.
        axes: axis of each operand along which a vector of scales runs.
        passed: inputs that the float operator takes unchanged, before the operands.
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
"""Operators with a fixed number of operands; QLinearConcat has any number, integer products have no output scale."""

CONCAT: Final = "QLinearConcat"

PRODUCTS: Final = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
"""Products whose int32 results are scaled by a Cast and a Mul afterwards: dynamic quantization."""

READS_FLOATS: Final = "DynamicQuantizeMatMul"

WITH_FLOAT_INPUT: Final = {READS_FLOATS: (1, 2, 3, 4), "MatMulIntegerToFloat": (1, 3, 5, 6)}
"""Input indices of the weight, its scale, its zero point and the bias."""

BLOCKED: Final = "MatMulNBits"

UNKNOWN: Final = frozenset(
    {"QLinearReduceMean", "QAttention", "QEmbedLayerNormalization", "DynamicQuantizeLSTM", "NhwcMaxPool", "QMoE"}
)
"""Known integer operators that are not rewritten: no kernel to check against, or no single float operator."""

MICROSOFT: Final = "com.microsoft"

CONTRIBUTED: Final = (
    (LAYOUTS.keys() | WITH_FLOAT_INPUT.keys() | UNKNOWN | {CONCAT, BLOCKED}) - {"QLinearConv", "QLinearMatMul"}
)  # fmt: skip
"""Integer operators of onnxruntime's own domain."""
