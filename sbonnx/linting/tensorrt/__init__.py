"""TensorRT's rules for explicit quantization, in one table."""

from __future__ import annotations

from typing import Final

from sbonnx.backends.tensorrt.profiles import PROFILES
from sbonnx.linting.findings import LintRule
from sbonnx.linting.tensorrt import pair_parameters, pair_placement, sparse_weights

STRONGLY_TYPED: Final = tuple(profile.target for profile in PROFILES.values() if profile.only_strong)
"""Versions that compute every op in the type that the file says; in older versions this is a build option."""

WITH_DLA_FLAG: Final = ("tensorrt@11", "tensorrt@10")
"""Versions whose parser has the flag for asymmetric quantization on a DLA."""

TENSORRT: Final[tuple[LintRule, ...]] = (
    LintRule(
        "T01",
        "quantization is written with QuantizeLinear and DequantizeLinear alone",
        "error",
        "export in the QDQ format, not QOperator, and without dynamic quantization",
        pair_parameters.integer_ops,
    ),
    LintRule(
        "T02",
        "zero points are constant zeros",
        "error",
        "quantize symmetrically, or re-centre the codes of a constant",
        pair_parameters.asymmetric,
    ),
    LintRule(
        "T02-dla",
        "codes are signed; only a DLA takes others, with a parser flag",
        "info",
        "nothing if T02 and T03 are fixed; for a DLA on Orin, 10.11 and later: set the parser's flag "
        "ENABLE_UINT8_AND_ASYMMETRIC_QUANTIZATION_DLA",
        pair_parameters.unsigned_for_dla,
        WITH_DLA_FLAG,
    ),
    LintRule(
        "T03",
        "codes have a type that TensorRT takes",
        "error",
        "quantize to int8; leave biases in float",
        pair_parameters.refused_codes,
    ),
    LintRule(
        "T04",
        "QuantizeLinear specifies the type of its codes",
        "error",
        "give it a zero point of int8 zeros",
        pair_parameters.untyped_codes,
    ),
    LintRule(
        "T05",
        "scales are finite and above 0, in float16 as well",
        "error",
        "raise the scale to the smallest normal number of the type, 6.1e-5 for float16; 1 for a channel of zeros",
        pair_parameters.bad_scales,
    ),
    LintRule(
        "T06",
        "scales are floating-point constants",
        "error",
        "calibrate to constants; fold constants before the export",
        pair_parameters.computed_scales,
    ),
    LintRule(
        "T07",
        "scales are per tensor, per channel or per block",
        "error",
        "give scales the shape [], [channels], or that of the data with one dimension divided",
        pair_parameters.misshapen_scales,
    ),
    LintRule(
        "T08",
        "activations have one scale",
        "error",
        "quantize activations per tensor",
        pair_parameters.channels_of_activations,
    ),
    LintRule(
        "T09",
        "a vector of scales specifies its axis",
        "error",
        "write the attribute 'axis'",
        pair_parameters.unwritten_axis,
    ),
    LintRule(
        "T10",
        "scales of a weight run over its output channels",
        "error",
        "Conv: axis 0; ConvTranspose: 1; MatMul: last; Gemm: 0 with transB, else 1",
        pair_parameters.wrong_axis,
    ),
    LintRule(
        "T11",
        "int4 is used for weights in blocks",
        "error",
        "use blocks of 64 or 128, or int8",
        pair_parameters.int4,
    ),
    LintRule(
        "T12",
        "FP4 and MXFP8 have the blocks and scales that TensorRT knows",
        "error",
        "FP4: blocks of 16, scales in FP8 with a DequantizeLinear; MXFP8: blocks of 32 with E8M0 scales",
        pair_parameters.small_floats,
    ),
    LintRule(
        "T13",
        "quantized tensors have a dimension",
        "error",
        "remove the pair, or give the tensor the shape [1]",
        pair_parameters.scalars,
    ),
    LintRule(
        "T14",
        "the opset has the types and forms in use",
        "error",
        "convert the model to that opset",
        pair_parameters.old_opset,
    ),
    LintRule(
        "T14-newest",
        "the opset is not newer than the parser is documented for",
        "warning",
        "export with that opset or an older one; operators that did not change since are read all the same",
        pair_parameters.new_opset,
    ),
    LintRule(
        "T15",
        "tensor and scale have one float type",
        "error",
        "store the scale in the type of the tensor",
        pair_parameters.mixed_types,
    ),
    LintRule(
        "T16",
        "codes enter float ops through a DequantizeLinear",
        "error",
        "put a DequantizeLinear in between",
        pair_parameters.integers_in_float_ops,
    ),
    LintRule(
        "T17",
        "biases are float",
        "error",
        "store the dequantized bias as floats",
        pair_parameters.quantized_biases,
    ),
    LintRule(
        "T18",
        "both nodes of a pair have the same numbers",
        "warning",
        "use one scale and one zero point for both",
        pair_parameters.rescaled,
    ),
    LintRule(
        "T19",
        "scales are of half precision in a model of half precision",
        "warning",
        "store scales in the type of the model",
        pair_parameters.float_islands,
        STRONGLY_TYPED,
    ),
    LintRule(
        "P01",
        "weighted ops have Q/DQ on activation and weight, or on neither",
        "warning",
        "quantize the other side too, or remove the pair",
        pair_placement.one_sided,
    ),
    LintRule(
        "P02",
        "no Q/DQ between a weighted op and what fuses into it",
        "warning",
        "move the pair after the op that fuses",
        pair_placement.splits_fusion,
    ),
    LintRule(
        "P03",
        "outputs of weighted ops are quantized only for ops that benefit",
        "warning",
        "remove the pair",
        pair_placement.needless_outputs,
    ),
    LintRule(
        "P04",
        "a residual Add has Q/DQ on its skip branch only",
        "warning",
        "one pair at the Add, on the skip branch",
        pair_placement.residual_adds,
    ),
    LintRule(
        "P05",
        "a tensor is quantized once",
        "warning",
        "let all readers share one pair",
        pair_placement.repeated,
    ),
    LintRule(
        "P06",
        "a Concat has one scale around it",
        "warning",
        "use the largest of the scales for all",
        pair_placement.concat_scales,
    ),
    LintRule(
        "P07",
        "one scale before and after ops that only move or pick values",
        "warning",
        "keep one pair, or give both the same scale",
        pair_placement.rescaled_moves,
    ),
    LintRule(
        "P08",
        "pools, Add and Resize with int8 inputs write int8",
        "warning",
        "quantize the output too, or remove the pairs at the inputs",
        pair_placement.half_fused,
    ),
    LintRule(
        "P09",
        "nothing is quantized twice in succession with different scales",
        "warning",
        "keep one pair",
        pair_placement.requantized,
    ),
    LintRule(
        "P10",
        "inputs and outputs of the graph are float",
        "warning",
        "remove the pair, unless integers are asked for",
        pair_placement.quantized_interface,
    ),
    LintRule(
        "P11",
        "softmax, norms and masks keep high precision; attention's products are int8 on both sides or on none",
        "warning",
        "remove the pair",
        pair_placement.high_precision,
    ),
    LintRule(
        "P12",
        "quantized ops are large enough for integer kernels",
        "warning",
        "leave this op in float",
        pair_placement.tiny,
    ),
    LintRule(
        "P12-full",
        "channels of int8 convolutions are multiples of 32",
        "info",
        "nothing, unless the architecture is still to be chosen",
        pair_placement.padded_channels,
    ),
    LintRule(
        "P13",
        "weights of convolutions have one scale per channel",
        "warning",
        "quantize weights per channel",
        pair_parameters.weights_per_tensor,
    ),
    LintRule(
        "P14",
        "ops of other domains have no Q/DQ around them",
        "info",
        "keep it in float, or remove the pair where the plugin takes int8 itself",
        pair_placement.foreign_ops,
    ),
    LintRule(
        "P15",
        "for a DLA every tensor has Q/DQ",
        "info",
        "nothing on a GPU; for a DLA quantize the inputs of these ops too",
        pair_placement.not_for_dla,
    ),
    LintRule(
        "P16",
        "a weight that consumers read along different axes has a pair for each",
        "warning",
        "give each consumer its own pair",
        pair_parameters.shared_weights,
    ),
    LintRule(
        "P17",
        "weights that are half zero have the 2:4 pattern of the sparse kernels",
        "info",
        "prune with --pattern 2:4; other zeros gain nothing",
        sparse_weights.misses_pattern,
    ),
    LintRule(
        "P17-kernels",
        "weights with the 2:4 pattern are large enough for sparse kernels",
        "info",
        "build the engine with sparse weights (BuilderFlag.SPARSE_WEIGHTS) and measure it",
        sparse_weights.sparse_weights,
    ),
)
"""Rules: T for data, P for placement.

An id with a suffix is the second half of the rule with that number: documented, but not rejected.
"""
