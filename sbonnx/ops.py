"""Sets of ONNX operators by kind, in one table.

Code that depends on the kind of an op uses these sets; no other module lists op types.
A test checks every name against the ONNX schemas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Linear:
    """Positions of weight and bias in the inputs of a linear op; see `sbonnx.linear` for the axes of the weight.

    Attributes:
        weight: index of the weight among the inputs.
        bias: index of the bias, or None.
    """

    weight: int
    bias: int | None


LINEAR: Final[dict[str, Linear]] = {
    "Conv": Linear(weight=1, bias=2),
    "ConvTranspose": Linear(weight=1, bias=2),
    "Gemm": Linear(weight=1, bias=2),
    "MatMul": Linear(weight=1, bias=None),
}
"""Linear ops."""

CONVOLUTIONS: Final = frozenset({"Conv", "ConvTranspose"})

EMBEDDING: Final = frozenset({"Gather"})
"""If the first input is constant, it is an embedding table: one scale per row (axis 0)."""

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
"""The output holds values of the first input, unchanged, and shares its scale."""

RESHAPES: Final = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"})
"""All values of the first input, in another shape or order."""

SPLITS: Final = frozenset({"Split", "Slice", "Gather"})
"""Each output is a part of the first input."""

SELECTS: Final = frozenset({"NonMaxSuppression", "TopK", "ArgMax", "ArgMin", "NonZero", "Unique"})
"""Ops that select by comparing values: a small error changes which values their readers get."""

READS_SHAPE: Final = frozenset({"Shape", "Size"})
"""The output depends on the shape of the input only."""

SHAPED_BY_VALUES: Final = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression"})
"""The shape of the output depends on the values of the inputs."""

PICKS_MAX: Final = frozenset({"MaxPool", "GlobalMaxPool"})
"""The output is a selection of the input's values: the op commutes with quantization, the scale is shared."""

POOLS: Final = frozenset({"AveragePool", "GlobalAveragePool"})
"""Averaging pools; pools that do not compute are in `MOVES_DATA` and `PICKS_MAX`."""

BLOCKED_POOLS: Final = POOLS | {"MaxPool"}
"""Pools whose float kernels on onnxruntime's CPU use a blocked channel layout (NCHWc)."""

WINDOWED_POOLS: Final = frozenset({"MaxPool", "AveragePool"})
"""Pools over a window, whose time depends on its size."""

REDUCES: Final = frozenset({"ReduceMean", "ReduceSum"})

RECTIFIERS: Final = frozenset({"Relu", "Clip"})
"""Activations that can be absorbed by the zero point of their quantized output."""

MAKES_DISTANCES: Final = RECTIFIERS | {"Exp"}
"""Last operators of the branch of a detector's head that computes distances to the sides of boxes."""

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
"""The output is never negative."""

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
"""Element-wise ops of two tensors, without Add."""

MATRIX_PRODUCTS: Final = frozenset({"MatMul", "Gemm"})

CONCATS: Final = frozenset({"Concat"})
PADS: Final = frozenset({"Pad"})
RESIZES: Final = frozenset({"Resize", "Upsample"})

CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})

REPEATED: Final = frozenset({"Loop", "Scan", "SequenceMap"})
"""Ops that repeat a body."""

ENDS_BLOCKS: Final = frozenset({"Relu", "LeakyRelu", "PRelu", "Clip", "HardSwish", "LayerNormalization"})
"""Ops that count as the end of a residual block if they are the only reader of its sum."""

QUANTIZE: Final = frozenset({"QuantizeLinear"})
DEQUANTIZE: Final = frozenset({"DequantizeLinear"})
QDQ: Final = QUANTIZE | DEQUANTIZE

KEEPS_VALUES: Final = QDQ | {"Identity", "Cast", "Dropout"}
"""The output has the values of the first input at their places, but for their type and rounding."""

BITS: Final = "__bits"
"""Attribute of both nodes of a Q/DQ pair that holds the bit width."""

RECTIFIED: Final = "__rectified"
"""Attribute of a QuantizeLinear that holds the bounds of the Relu (0) or Clip (two) that was removed before it."""

INTEGER_OPS: Final = frozenset(
    {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"}
)
"""Ops of an already quantized model in a format without Q/DQ."""

INTEGER_PRODUCTS: Final = (INTEGER_OPS - {"DynamicQuantizeLinear"}) | {"QGemm"}
"""Ops that multiply integers in the file itself, so at every optimization level; QGemm is onnxruntime's own."""

INTEGER_CONVOLUTIONS: Final = frozenset({"QLinearConv", "ConvInteger"})
"""Integer convolutions: their weights have the output channels first. In the other integer ops they are last."""

UNPACKS: Final = frozenset({"Cast", "Sub"})
"""Ops that unpack byte values from constants stored in fewer bits. Runtimes fold them when they load the file."""

OBJECT_BOX_CLASSES: Final = ("Sigmoid", "Conv", "Softmax")
"""Operators that end the three parts of a detection map: objectness, box, classes (FastestDet)."""

INTEGER_ON_CPU: Final = (
    (frozenset(LINEAR) - {"ConvTranspose"})
    | (MOVES_DATA - {"SpaceToDepth", "GatherND", "Expand", "Identity"})
    | {"Add", "Mul", "Concat", "Where"}
    | {"MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMax", "ReduceMin"}
    | {"LeakyRelu", "Sigmoid", "Softmax", "Resize"}
)
"""Ops that onnxruntime computes with integer CPU kernels between Q/DQ, each tested alone (1.31, uint8 values)."""

DECODES: Final = frozenset({"Cast", "Sub", "Mul"})
"""Ops that turn packed codes of a weight into codes or floats, folded when a file is loaded."""

RECURRENT: Final = frozenset({"LSTM", "GRU", "RNN"})

EXPERTS: Final = {"MoE": (2, 4, 6)}
"""onnxruntime's mixture of experts, and its inputs that hold their weights: (experts, outputs, inputs)."""

DYNAMIC_LSTM: Final = "DynamicQuantizeLSTM"
"""onnxruntime's LSTM with integer weights, which quantizes its input and state at run time."""

RANDOM: Final = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)
"""Ops with random outputs, never folded as constants (Dropout only in training mode, which simplification checks)."""

EPILOGUES: Final = RECTIFIERS | {"BatchNormalization", "LeakyRelu", "Sigmoid", "Tanh"}
"""Ops that a runtime fuses into the kernel of the preceding linear op."""

HALF_LOSES: Final = SOFTMAX | {"LayerNormalization", "RMSNormalization", "Erf", "Gelu"}
"""Ops that lose accuracy in half precision and gain nothing from 8 bits."""

COORDINATES: Final = frozenset({"GridSample", "RoiAlign", "MaxRoiPool", "AffineGrid", "NonMaxSuppression"})
"""Ops that read image coordinates, which half precision resolves to one pixel in a thousand only."""

ROOTS: Final = frozenset({"Sqrt", "Reciprocal", "Pow"})
"""Ops that a small constant (epsilon) passes through before it protects a division."""

READS_RELATIVE: Final = frozenset({"Sqrt", "Reciprocal", "Log"})
"""Ops sensitive to the relative error of their input, however small the input is."""

CARRIES_MASK: Final = MOVES_DATA | ELEMENTWISE | {"Add", "Where", "Concat", "Max", "Min"}
"""Ops between an attention mask (large negative numbers) and its softmax."""

CARRIES_INFINITY: Final = MOVES_DATA | {"Add", "Where", "Concat", "Pad", "ScatterElements", "ScatterND"}
"""Ops whose output holds an infinite number of an input, for most other inputs."""

FUSED_INTO_CONV: Final = frozenset({"LeakyRelu", "Sigmoid", "Add"})
"""Ops that onnxruntime's CPU fuses into the float convolution before them; in integers they have kernels apart."""

KEEPS_BLOCKS: Final = ADDS | MULTIPLIES | {"Sum", "Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid"}
"""Element-wise ops that onnxruntime's CPU computes in float on blocks of channels (NCHWc), as its convolutions."""

SUMS: Final = POOLS | {"ReduceMean"}
"""Ops that sum, then divide: the intermediate sum is larger than the output."""

SUMS_SQUARES: Final = frozenset({"ReduceL2", "LpNormalization", "LRN", "GlobalLpPool", "LpPool"})
"""Ops that sum squares internally."""

MAKES_TENSORS: Final = frozenset(
    {"Cast", "ConstantOfShape", "Range", "Shape", "Size", "EyeLike", "OneHot", "DequantizeLinear", "RandomNormal"}
    | {"RandomUniform", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix", "NonZero"}
)
"""Ops whose output device or type does not follow from their inputs."""

TAKES_NUMBERS: Final = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "Mod", "Where", "Clip", "Pad", "Equal", "Less"}
    | {"LessOrEqual", "Greater", "GreaterOrEqual", "Expand", "CastLike"}
)
"""Ops in which a single constant number is not a weight: a half, an epsilon, a temperature."""

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

CONTRIB: Final = "com.microsoft"
"""Domain of onnxruntime's own operators."""

RUNTIME_OPS: Final = frozenset({"SimplifiedLayerNormalization"})
"""Operators that onnxruntime registers in ONNX's own domain, where onnx has no schema for them."""

POINTWISE: Final = (
    ACTIVATIONS
    | {"Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Erf", "Sign", "Floor", "Ceil", "Round", "Sin", "Cos", "Tan"}
    | {"Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Not", "IsNaN", "IsInf", "Identity", "Cast"}
    | {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "Mod", "Where", "And", "Or", "Xor"}
    | {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
)
"""Element-wise ops of one or more tensors, which broadcast."""

REDUCES_ANY: Final = REDUCES | {
    *("ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"),
    *("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
}
"""All reductions over axes."""

IMAGE_PREPARATION: Final = frozenset(
    {"Pad", "Resize", "Upsample", "Transpose", "Cast", "Identity", "Sub", "Div", "Mul", "Add", "Slice", "Concat"}
)
"""Ops between an image input and its first layer: padding, resizing, normalization inside the model."""

WEBGPU: Final = frozenset(
    {
        "Abs", "Acos", "Acosh", "Add", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "Attention",
        "AveragePool", "BatchNormalization", "BiasAdd", "BiasSplitGelu", "Cast", "Ceil", "Clip", "Concat",
        "Conv", "ConvTranspose", "Cos", "Cosh", "CumSum", "DFT", "DepthToSpace", "DequantizeLinear", "Div",
        "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "FastGelu", "Flatten", "Floor", "FusedConv", "Gather",
        "GatherBlockQuantized", "GatherElements", "GatherND", "Gelu", "Gemm", "GlobalAveragePool",
        "GlobalMaxPool", "Greater", "GreaterOrEqual", "GridSample", "GroupQueryAttention", "HardSigmoid",
        "HardSwish", "If", "InstanceNormalization", "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual",
        "Log", "MatMul", "MatMulNBits", "MaxPool", "Mul", "MultiHeadAttention", "Neg", "Not", "Pad", "Pow",
        "QuickGelu", "Range", "Reciprocal", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
        "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Resize",
        "RotaryEmbedding", "ScatterND", "Shape", "Sigmoid", "SimplifiedLayerNormalization", "Sin", "Sinh",
        "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Slice", "Softmax", "Split", "Sqrt",
        "Squeeze", "Sub", "Tan", "Tanh", "ThresholdedRelu", "Tile", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
"""Ops with kernels in the WebGPU provider of onnxruntime-web 1.30, by its table ``docs/webgpu-operators.md``."""
