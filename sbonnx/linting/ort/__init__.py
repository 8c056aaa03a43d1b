"""onnxruntime's rules for Q/DQ models on CPU, in one table.

Source: kernels and times of onnxruntime 1.31 on x86-64, counted and measured per op and per chain of ops, and its
documentation on quantization.
"""

from __future__ import annotations

from typing import Final

from sbonnx.linting.findings import LintRule
from sbonnx.linting.ort import kernel_choice, numbers

_STATIC: Final = (
    LintRule(
        "O01",
        "every scale is a finite number above 0",
        "error",
        "calibrate the tensor again with finite data, or leave its pair out",
        numbers.bad_scale,
    ),
    LintRule(
        "O02",
        "no scale is denormal in float32",
        "warning",
        "raise the scale to 2**-126 at least; for a channel of zeros any scale is exact",
        numbers.denormal_scale,
    ),
    LintRule(
        "O03",
        "a vector of scales has the length of the axis it runs over",
        "error",
        "set 'axis' to the dimension that the scales belong to",
        numbers.scale_shape,
    ),
    LintRule(
        "O04",
        "scales of a weight run over its output channels",
        "error",
        "quantize the weight along the output channels: axis 0 of a Conv, the last one of a MatMul",
        numbers.weight_axis,
    ),
    LintRule(
        "O05",
        "the bias of a Gemm has the scale x_scale * w_scale and the zero point 0",
        "error",
        "quantize the bias again with the product of the other two scales, or leave it float",
        numbers.gemm_bias,
    ),
    LintRule(
        "O06",
        "the bias of a convolution has the scale x_scale * w_scale and the zero point 0",
        "warning",
        "quantize the bias again with the product of the other two scales, or leave it float",
        numbers.conv_bias,
    ),
    LintRule(
        "O07",
        "no bias code is at a limit of int32",
        "error",
        "raise the weight's scale for that channel, or leave the bias float",
        numbers.bias_saturated,
    ),
    LintRule(
        "O08",
        "bias and products fit int32",
        "warning",
        "raise the weight's scale for that channel, or leave the op float",
        numbers.accumulator,
    ),
    LintRule(
        "O09",
        "scales and zero points are constants",
        "warning",
        "store them as initializers",
        numbers.computed_scale,
    ),
    LintRule(
        "O10",
        "pairs are in float32",
        "warning",
        "quantize the float32 model: on CPU, half precision has no integer kernels",
        numbers.half_scale,
    ),
    LintRule(
        "O11",
        "activations of Conv, Gemm and MatMul are uint8",
        "warning",
        "quantize activations to uint8: on x86, onnxruntime rewrites some int8 pairs so, and runs the rest in float",
        numbers.signed_activation,
    ),
    LintRule(
        "O12",
        "weights are int8",
        "warning",
        "quantize weights to int8, symmetric",
        numbers.unsigned_weight,
    ),
    LintRule(
        "O13",
        "int8 weights have the zero point 0",
        "warning",
        "quantize weights symmetrically",
        numbers.weight_zero_point,
    ),
    LintRule(
        "O14",
        "activations have 8 bits",
        "warning",
        "quantize the activation to uint8, or leave it float",
        numbers.wide_activation,
    ),
    LintRule(
        "O15",
        "where the weight is quantized, so is the activation",
        "warning",
        "put a pair on the op's input, or keep the weight float; in blocks of 4 or 8 bits a MatMul reads it as it is",
        kernel_choice.weight_only,
    ),
    LintRule(
        "O16",
        "where the activation is quantized, so is the weight",
        "warning",
        "quantize the weight, or remove the pair",
        kernel_choice.float_weight,
    ),
    LintRule(
        "O17",
        "the output of a quantized convolution is quantized",
        "warning",
        "put a pair on the convolution's output, before any op but Relu and Clip",
        kernel_choice.conv_output,
    ),
    LintRule(
        "O18",
        "a Relu or Clip between integer ops is replaced by the zero point",
        "warning",
        "give the pair after it the zero point at the lowest code, and a range that ends at the Clip's or below",
        kernel_choice.rectifier_stays,
    ),
    LintRule(
        "O19",
        "pairs are around ops that have an integer kernel",
        "warning",
        "remove the pairs, unless the ops before and after need them",
        kernel_choice.no_kernel,
    ),
    LintRule(
        "O20",
        "Softmax stays float",
        "warning",
        "remove the pairs around the Softmax",
        kernel_choice.softmax,
    ),
    LintRule(
        "O21",
        "all inputs of an op between pairs are quantized",
        "warning",
        "put a pair on the float input, constants too, or remove the others",
        kernel_choice.float_side,
    ),
    LintRule(
        "O22",
        "ops that only move or pick codes have one scale on both sides",
        "warning",
        "give the pairs before and after it the same scale and zero point",
        kernel_choice.two_scales,
    ),
    LintRule(
        "O23",
        "a pair serves an integer kernel",
        "warning",
        "remove the pair",
        kernel_choice.useless_pair,
    ),
    LintRule(
        "O24",
        "outputs of the graph are not rounded without need",
        "warning",
        "remove the pair at the output",
        kernel_choice.output_pair,
    ),
    LintRule(
        "O25",
        "both halves of a pair have the same numbers",
        "warning",
        "give the DequantizeLinear the scale and zero point of its QuantizeLinear",
        kernel_choice.rescale,
    ),
    LintRule(
        "O26",
        "codes are not turned into other codes",
        "info",
        "let both pairs share one scale, or remove one",
        kernel_choice.requantized,
    ),
    LintRule(
        "O27",
        "grouped convolutions stay float",
        "info",
        "remove the pairs of the convolution, or measure that they win",
        kernel_choice.grouped_conv,
    ),
    LintRule(
        "O28",
        "the codes of a Sigmoid or Softmax output cover 0 to 1",
        "info",
        "give it the scale 1/256 and the zero point at the lowest code",
        kernel_choice.unit_range,
    ),
    LintRule(
        "O29",
        "uint8 x int8 products do not saturate on this CPU",
        "warning",
        "quantize the weights again on this CPU, or with reduce_range (7 bits), or use uint8 weights, which are slower",
        numbers.saturates_here,
    ),
    LintRule(
        "O30",
        "uint8 x int8 products do not saturate on x86 CPUs without VNNI or AMX",
        "info",
        "where the model must run there, quantize its weights again on such a CPU, or with reduce_range (7 bits)",
        numbers.saturates_elsewhere,
    ),
)

ORT_RULES: Final = (
    *_STATIC,
    LintRule(
        "O31",
        "onnxruntime loads the model",
        "error",
        "fix what its message names",
        kernel_choice.refused,
    ),
    LintRule(
        "O32",
        "no op stays float between pairs in the optimised graph",
        "warning",
        "remove the pairs around the op, or complete them",
        kernel_choice.stays_float(tuple(rule.check for rule in _STATIC)),
    ),
    LintRule(
        "O33",
        "the kernels of the optimised graph are counted",
        "info",
        "install onnxruntime, or make the model small enough to be written to the temporary folder",
        kernel_choice.not_counted,
    ),
    LintRule(
        "O34",
        "products of block-wise weights have a fast kernel",
        "warning",
        "quantize with accuracy level 4, integer zero points, and 2 bits in blocks of 64 or 128",
        kernel_choice.slow_blocks,
    ),
    LintRule(
        "O35",
        "channels of float convolutions fill blocks of the kernels",
        "warning",
        "prune with MULTIPLE: auto, or pad to the next multiple of 16 channels with zeros, which takes less time",
        kernel_choice.unblocked_channels,
    ),
    LintRule(
        "O36",
        "uint8 x int8 products do not saturate on the CPU that the file is for",
        "error",
        "quantize again with --cpu and that CPU, or use uint8 weights: slower, and exact",
        numbers.saturates_there,
    ),
    LintRule(
        "O37",
        "the model runs after onnxruntime's own rewrites",
        "error",
        "leave the op float, or disable the rewrite in every session of the file",
        kernel_choice.broken_by_rewrites,
    ),
)
"""Rules in the order of the report: parameters, types, placement, counted kernel_choice."""
