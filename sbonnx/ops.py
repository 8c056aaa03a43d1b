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

READS_SHAPE: Final = frozenset({"Shape", "Size"})
"""The output says how large the input is, whatever it holds."""

PICKS_MAX: Final = frozenset({"MaxPool", "GlobalMaxPool"})
"""The output is a choice among the input's values: quantization commutes, the scale is shared."""

POOLS: Final = frozenset({"AveragePool", "GlobalAveragePool"})
"""Averaging pools; `MOVES_DATA` and `PICKS_MAX` hold the pools that do not compute."""

BLOCKED_POOLS: Final = POOLS | {"MaxPool"}
"""Pools whose float kernels on onnxruntime's CPU work on blocks of channels."""

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

NOT_NEGATIVE: Final = frozenset(
    {"Relu", "Sigmoid", "HardSigmoid", "Softplus", "Softmax", "Hardmax", "Exp", "Abs", "Sqrt"}
)
"""The output is 0 or above, whatever the input."""

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
PADS: Final = frozenset({"Pad"})
RESIZES: Final = frozenset({"Resize", "Upsample"})

CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})

REPEATED: Final = frozenset({"Loop", "Scan", "SequenceMap"})
"""Ops that repeat a body."""

ENDS_BLOCKS: Final = frozenset({"Relu", "LeakyRelu", "PRelu", "Clip", "HardSwish", "LayerNormalization"})
"""What still belongs to a residual block where nothing else reads its sum."""

QUANTIZE: Final = frozenset({"QuantizeLinear"})
DEQUANTIZE: Final = frozenset({"DequantizeLinear"})
QDQ: Final = QUANTIZE | DEQUANTIZE

BITS: Final = "__bits"
"""Attribute of both nodes of a pair that holds the width of the codes."""

INTEGER_OPS: Final = frozenset(
    {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"}
)
"""Ops of a model that was quantized before, in a form without Q/DQ."""

INTEGER_CONVOLUTIONS: Final = frozenset({"QLinearConv", "ConvInteger"})
"""Of those, the ones whose weight has its output channels first; the others have them last."""

UNPACKS: Final = frozenset({"Cast", "Sub"})
"""What makes codes of bytes of constants stored in fewer bits; runtimes compute it once, as they open the file."""

INTEGER_ON_CPU: Final = (
    (frozenset(LINEAR) - {"ConvTranspose"})
    | (MOVES_DATA - {"SpaceToDepth", "GatherND", "Expand", "Identity"})
    | {"Add", "Mul", "Concat", "Where"}
    | {"MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMax", "ReduceMin"}
    | {"LeakyRelu", "Sigmoid", "Softmax", "Resize"}
)
"""Ops between pairs that onnxruntime computes with integer kernels on CPU, each tried alone (1.31, uint8 codes)."""

RECURRENT: Final = frozenset({"LSTM", "GRU", "RNN"})

RANDOM: Final = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)
"""Never folded: two runs differ (Dropout only in training mode, which simplification checks)."""

EPILOGUES: Final = RECTIFIERS | {"BatchNormalization", "LeakyRelu", "Sigmoid", "Tanh"}
"""What a runtime computes in the kernel of the weighted op before."""

HALF_LOSES: Final = SOFTMAX | {"LayerNormalization", "RMSNormalization", "Erf", "Gelu"}
"""Ops that lose in half precision, and gain nothing by 8 bits."""

COORDINATES: Final = frozenset({"GridSample", "RoiAlign", "MaxRoiPool", "AffineGrid", "NonMaxSuppression"})
"""Ops that read positions in an image, of which half precision keeps a pixel in a thousand."""

ROOTS: Final = frozenset({"Sqrt", "Reciprocal", "Pow"})
"""What a small number is led through before it guards a division."""

READS_RELATIVE: Final = frozenset({"Sqrt", "Reciprocal", "Log"})
"""Ops that answer to the relative error of their input, however small it is."""

CARRIES_MASK: Final = MOVES_DATA | ELEMENTWISE | {"Add", "Where", "Concat", "Max", "Min"}
"""Ops that a mask of huge negative numbers passes on its way to a softmax."""

SUMS: Final = POOLS | {"ReduceMean"}
"""Ops that sum and then divide: the sum is larger than what they give."""

SUMS_SQUARES: Final = frozenset({"ReduceL2", "LpNormalization", "LRN", "GlobalLpPool", "LpPool"})
"""Ops that sum squares on the way."""

MAKES_TENSORS: Final = frozenset(
    {"Cast", "ConstantOfShape", "Range", "Shape", "Size", "EyeLike", "OneHot", "DequantizeLinear", "RandomNormal"}
    | {"RandomUniform", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix", "NonZero"}
)
"""Ops of which neither device nor type follow from those of what they read."""

TAKES_NUMBERS: Final = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "Mod", "Where", "Clip", "Pad", "Equal", "Less"}
    | {"LessOrEqual", "Greater", "GreaterOrEqual", "Expand", "CastLike"}
)
"""Ops of which a single constant number is no weight: a half, an epsilon, a temperature."""

TEXTS: Final = frozenset({"RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"})
"""Ops on text."""

LISTS: Final = frozenset(
    {"Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt", "SequenceConstruct", "SequenceEmpty"}
    | {"SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "ConcatFromSequence", "SplitToSequence"}
)
"""Ops on sequences and optionals."""

SIGNALS: Final = frozenset({"BlackmanWindow", "DFT", "HammingWindow", "HannWindow", "MelWeightMatrix", "STFT"})
"""Ops that prepare signals."""

STANDARD_DOMAINS: Final = frozenset({"", "ai.onnx"})
