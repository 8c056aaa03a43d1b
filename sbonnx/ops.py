"""What sbonnx knows of the ONNX operators, in one table of named sets.

Code that must know the kind of an op asks here; nowhere else stands a list of op types.
Every name is checked against the ONNX schemas by a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Linear:
    """An op that multiplies a weight: where its weight and bias stand, and the output-channel axis.

    Attributes:
        weight: index of the weight among the inputs.
        bias: index of the bias, or None.
        out_axis: axis of the weight that runs over output channels; negative counts from the end.
    """

    weight: int
    bias: int | None
    out_axis: int


LINEAR: Final[dict[str, Linear]] = {
    "Conv": Linear(weight=1, bias=2, out_axis=0),
    "ConvTranspose": Linear(weight=1, bias=2, out_axis=1),  # (in, out / group, *kernel)
    "Gemm": Linear(weight=1, bias=2, out_axis=1),  # 0 if transB
    "MatMul": Linear(weight=1, bias=None, out_axis=-1),
}
"""Ops with a weight; `QuantSpec.axis` for their weights is `out_axis` (Gemm: by transB)."""

CONVOLUTIONS: Final = frozenset({"Conv", "ConvTranspose"})

EMBEDDING: Final = frozenset({"Gather"})
"""A constant first input is a table: one scale a row (axis 0)."""

MOVES_DATA: Final = frozenset(
    {
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "Slice",
        "Gather",
        "GatherElements",
        "GatherND",
        "Split",
        "Expand",
        "Tile",
        "DepthToSpace",
        "SpaceToDepth",
        "Identity",
    }
)
"""The output holds values of the first input, unchanged: it shares the scale."""

PICKS_MAX: Final = frozenset({"MaxPool", "GlobalMaxPool"})
"""The output is a choice among the input's values: quantization commutes, the scale is shared."""

POOLS: Final = frozenset({"AveragePool", "GlobalAveragePool"})
"""Averaging pools; `MOVES_DATA` and `PICKS_MAX` hold the pools that do not compute."""

REDUCES: Final = frozenset({"ReduceMean", "ReduceSum"})

RECTIFIERS: Final = frozenset({"Relu", "Clip"})
"""Activations that the zero point of their own output can do."""

ACTIVATIONS: Final = frozenset(
    {
        "Relu",
        "Clip",
        "LeakyRelu",
        "PRelu",
        "Sigmoid",
        "Tanh",
        "HardSigmoid",
        "HardSwish",
        "Elu",
        "Selu",
        "Celu",
        "Softplus",
        "Softsign",
        "ThresholdedRelu",
        "Gelu",
        "Mish",
        "Swish",
    }
)

NORMS: Final = frozenset(
    {
        "BatchNormalization",
        "LayerNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "RMSNormalization",
        "LpNormalization",
        "LRN",
    }
)

SOFTMAX: Final = frozenset({"Softmax", "LogSoftmax", "Hardmax"})

BOUNDS: Final = frozenset({"Clip", "Max", "Min"})
"""Ops that limit values to a range."""

ADDS: Final = frozenset({"Add"})
MULTIPLIES: Final = frozenset({"Mul"})
ELEMENTWISE: Final = MULTIPLIES | {"Sub", "Div"}
"""Element-wise ops of two tensors beside Add."""

MATRIX_PRODUCTS: Final = frozenset({"MatMul", "Gemm"})

CONCATS: Final = frozenset({"Concat"})
RESIZES: Final = frozenset({"Resize", "Upsample"})

CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})

QUANTIZE: Final = frozenset({"QuantizeLinear"})
DEQUANTIZE: Final = frozenset({"DequantizeLinear"})
QDQ: Final = QUANTIZE | DEQUANTIZE

INTEGER_OPS: Final = frozenset(
    {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"}
)
"""Ops of a model that was quantized before, in a form without Q/DQ."""

RECURRENT: Final = frozenset({"LSTM", "GRU", "RNN"})

RANDOM: Final = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)
"""Never folded: two runs differ (Dropout only in training mode, which simplification checks)."""

EPILOGUES: Final = RECTIFIERS | {"BatchNormalization", "LeakyRelu", "Sigmoid", "Tanh"}
"""What a runtime computes in the kernel of the weighted op before."""

HALF_LOSES: Final = SOFTMAX | {"LayerNormalization", "RMSNormalization", "Erf", "Gelu"}
"""Ops that lose in half precision, and gain nothing by 8 bits."""

STANDARD_DOMAINS: Final = frozenset({"", "ai.onnx"})
