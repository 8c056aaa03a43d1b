"""TensorRT's rules for explicit quantization, in one table."""

from __future__ import annotations

from typing import Final

from sbonnx.backends.tensorrt.profiles import PROFILES
from sbonnx.lint import tensorrt_codes as codes
from sbonnx.lint import tensorrt_fusion as fusion
from sbonnx.lint import tensorrt_sizes as sizes
from sbonnx.lint import tensorrt_weights as weights
from sbonnx.lint.types import Rule

STRONGLY_TYPED: Final = tuple(profile.target for profile in PROFILES.values() if profile.only_strong)
"""Versions that compute every op in the type that the file says; in older versions this is a build option."""

WITH_DLA_FLAG: Final = ("tensorrt@11", "tensorrt@10")
"""Versions whose parser has the flag for asymmetric quantization on a DLA."""

TENSORRT: Final[tuple[Rule, ...]] = (
    Rule(
        "T01",
        "quantization is written with QuantizeLinear and DequantizeLinear alone",
        "error",
        "export in the QDQ format, not QOperator, and without dynamic quantization",
        codes.integer_ops,
    ),
    Rule(
        "T02",
        "zero points are constant zeros",
        "error",
        "quantize symmetrically, or re-centre the codes of a constant",
        codes.asymmetric,
    ),
    Rule(
        "T02-dla",
        "codes are signed; only a DLA takes others, behind a flag",
        "info",
        "nothing where T02 and T03 are mended; for a DLA on Orin, 10.11 and later: set the parser's flag "
        "ENABLE_UINT8_AND_ASYMMETRIC_QUANTIZATION_DLA",
        codes.unsigned_for_dla,
        WITH_DLA_FLAG,
    ),
    Rule(
        "T03",
        "codes have a type that TensorRT takes",
        "error",
        "quantize to int8; leave biases in float",
        codes.refused_codes,
    ),
    Rule(
        "T04",
        "QuantizeLinear says the type of its codes",
        "error",
        "give it a zero point of int8 zeros",
        codes.untyped_codes,
    ),
    Rule(
        "T05",
        "scales are finite and above 0, in float16 as well",
        "error",
        "raise the scale to the smallest normal number of the type, 6.1e-5 for float16; 1 for a channel of zeros",
        codes.bad_scales,
    ),
    Rule(
        "T06",
        "scales are floating-point constants",
        "error",
        "calibrate to constants; fold constants before the export",
        codes.computed_scales,
    ),
    Rule(
        "T07",
        "scales are one, one a channel, or one a block",
        "error",
        "give scales the shape [], [channels], or that of the data with one dimension divided",
        codes.misshapen_scales,
    ),
    Rule(
        "T08",
        "activations have one scale",
        "error",
        "quantize activations per tensor",
        weights.channels_of_activations,
    ),
    Rule("T09", "a vector of scales says its axis", "error", "write the attribute 'axis'", weights.unwritten_axis),
    Rule(
        "T10",
        "scales of a weight run over its output channels",
        "error",
        "Conv: axis 0; ConvTranspose: 1; MatMul: last; Gemm: 0 with transB, else 1",
        weights.wrong_axis,
    ),
    Rule("T11", "int4 stands for weights in blocks", "error", "use blocks of 64 or 128, or int8", weights.int4),
    Rule(
        "T12",
        "FP4 and MXFP8 have the blocks and scales that TensorRT knows",
        "error",
        "FP4: blocks of 16, scales in FP8 behind a DequantizeLinear; MXFP8: blocks of 32 with E8M0 scales",
        weights.small_floats,
    ),
    Rule(
        "T13",
        "quantized tensors have a dimension",
        "error",
        "take the pair away, or give the tensor the shape [1]",
        codes.scalars,
    ),
    Rule(
        "T14",
        "the opset has the types and forms in use",
        "error",
        "convert the model to that opset",
        codes.old_opset,
    ),
    Rule(
        "T14-newest",
        "the opset is not newer than the parser is documented for",
        "warning",
        "export with that opset or an older one; operators that did not change since are read all the same",
        codes.new_opset,
    ),
    Rule(
        "T15",
        "tensor and scale have one float type",
        "error",
        "store the scale in the type of the tensor",
        codes.mixed_types,
    ),
    Rule(
        "T16",
        "codes enter float ops through a DequantizeLinear",
        "error",
        "put a DequantizeLinear in between",
        weights.integers_in_float_ops,
    ),
    Rule("T17", "biases are float", "error", "store the dequantized bias as floats", weights.quantized_biases),
    Rule(
        "T18",
        "both nodes of a pair have the same numbers",
        "warning",
        "use one scale and one zero point for both",
        weights.rescaled,
    ),
    Rule(
        "T19",
        "scales are of half precision in a model of half precision",
        "warning",
        "store scales in the type of the model",
        codes.float_islands,
        STRONGLY_TYPED,
    ),
    Rule(
        "P01",
        "weighted ops have Q/DQ on activation and weight, or on neither",
        "warning",
        "quantize the other side too, or take the pair away",
        fusion.one_sided,
    ),
    Rule(
        "P02",
        "no Q/DQ between a weighted op and what fuses into it",
        "warning",
        "move the pair behind the op that fuses",
        fusion.splits_fusion,
    ),
    Rule(
        "P03",
        "outputs of weighted ops are quantized only for ops that gain by it",
        "warning",
        "take the pair away",
        fusion.needless_outputs,
    ),
    Rule(
        "P04",
        "a residual Add has its skip branch behind Q/DQ, and no other",
        "warning",
        "one pair at the Add, on the skip branch",
        fusion.residual_adds,
    ),
    Rule(
        "P05",
        "a tensor is quantized once",
        "warning",
        "let all readers share one pair",
        fusion.repeated,
    ),
    Rule(
        "P06",
        "a Concat has one scale around it",
        "warning",
        "use the largest of the scales for all",
        fusion.concat_scales,
    ),
    Rule(
        "P07",
        "one scale before and after ops that only move or pick values",
        "warning",
        "keep one pair, or give both the same scale",
        fusion.rescaled_moves,
    ),
    Rule(
        "P08",
        "pools, Add and Resize with int8 inputs write int8",
        "warning",
        "quantize the output too, or take the pairs at the inputs away",
        fusion.half_fused,
    ),
    Rule(
        "P09",
        "nothing is quantized twice in a row with different scales",
        "warning",
        "keep one pair",
        fusion.requantized,
    ),
    Rule(
        "P10",
        "inputs and outputs of the graph are float",
        "warning",
        "take the pair away, unless integers are asked for",
        fusion.quantized_interface,
    ),
    Rule(
        "P11",
        "softmax, norms and masks keep high precision; attention's products are int8 on both sides or on none",
        "warning",
        "take the pair away",
        sizes.high_precision,
    ),
    Rule(
        "P12",
        "quantized ops are large enough for integer kernels",
        "warning",
        "leave this op in float",
        sizes.tiny,
    ),
    Rule(
        "P12-full",
        "channels of int8 convolutions are multiples of 32",
        "info",
        "nothing, unless the architecture is still to be chosen",
        sizes.padded_channels,
    ),
    Rule(
        "P13",
        "weights of convolutions have one scale a channel",
        "warning",
        "quantize weights per channel",
        weights.weights_per_tensor,
    ),
    Rule(
        "P14",
        "ops of other domains have no Q/DQ around them",
        "info",
        "keep it in float, or take the pair away where the plugin takes int8 itself",
        sizes.foreign_ops,
    ),
    Rule(
        "P15",
        "for a DLA every tensor has Q/DQ",
        "info",
        "nothing on a GPU; for a DLA quantize the inputs of these ops too",
        sizes.not_for_dla,
    ),
    Rule(
        "P16",
        "a weight that consumers read along different axes has a pair for each",
        "warning",
        "give each consumer its own pair",
        weights.shared_weights,
    ),
)
"""Rules: T for data, P for placement.

An id with a suffix is the second half of the rule with that number: documented, but not rejected.
"""
