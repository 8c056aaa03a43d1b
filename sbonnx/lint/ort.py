"""onnxruntime's rules for Q/DQ models on CPU, in one table.

Source: kernels and times of onnxruntime 1.31 on x86-64, counted and measured per op and per chain of ops, and its
documentation on quantization.
"""

from __future__ import annotations

from typing import Final

from sbonnx.lint import ort_kernels as kernels
from sbonnx.lint import ort_numbers as numbers
from sbonnx.lint import ort_placement as placement
from sbonnx.lint.types import Rule

_STATIC: Final = (
    Rule(
        "O01",
        "every scale is a finite number above 0",
        "error",
        "calibrate the tensor again with finite data, or leave its pair out",
        numbers.bad_scale,
    ),
    Rule(
        "O02",
        "no scale is denormal in float32",
        "warning",
        "raise the scale to 2**-126 at least; for a channel of zeros any scale is exact",
        numbers.denormal_scale,
    ),
    Rule(
        "O03",
        "a vector of scales has the length of the axis it runs over",
        "error",
        "set 'axis' to the dimension that the scales belong to",
        numbers.scale_shape,
    ),
    Rule(
        "O04",
        "scales of a weight run over its output channels",
        "error",
        "quantize the weight along the output channels: axis 0 of a Conv, the last one of a MatMul",
        numbers.weight_axis,
    ),
    Rule(
        "O05",
        "the bias of a Gemm has the scale x_scale * w_scale and the zero point 0",
        "error",
        "quantize the bias again with the product of the other two scales, or leave it float",
        numbers.gemm_bias,
    ),
    Rule(
        "O06",
        "the bias of a convolution has the scale x_scale * w_scale and the zero point 0",
        "warning",
        "quantize the bias again with the product of the other two scales, or leave it float",
        numbers.conv_bias,
    ),
    Rule(
        "O07",
        "no bias code stands at the end of int32",
        "error",
        "raise the weight's scale for that channel, or leave the bias float",
        numbers.bias_saturated,
    ),
    Rule(
        "O08",
        "bias and products fit int32",
        "warning",
        "raise the weight's scale for that channel, or leave the op float",
        numbers.accumulator,
    ),
    Rule(
        "O09",
        "scales and zero points are constants",
        "warning",
        "store them as initializers",
        numbers.computed_scale,
    ),
    Rule(
        "O10",
        "pairs are in float32",
        "warning",
        "quantize the float32 model: on CPU, half precision has no integer kernels",
        numbers.half_scale,
    ),
    Rule(
        "O11",
        "activations of Conv, Gemm and MatMul are uint8",
        "warning",
        "quantize activations to uint8: on x86, onnxruntime rewrites some int8 pairs so, and runs the rest in float",
        numbers.signed_activation,
    ),
    Rule(
        "O12",
        "weights are int8",
        "warning",
        "quantize weights to int8, symmetric",
        numbers.unsigned_weight,
    ),
    Rule(
        "O13",
        "int8 weights have the zero point 0",
        "warning",
        "quantize weights symmetrically",
        numbers.weight_zero_point,
    ),
    Rule(
        "O14",
        "activations have 8 bits",
        "warning",
        "quantize the activation to uint8, or leave it float",
        numbers.wide_activation,
    ),
    Rule(
        "O15",
        "where the weight is quantized, so is the activation",
        "warning",
        "put a pair on the op's input, or keep the weight float; in blocks of 4 or 8 bits a MatMul reads it as it is",
        placement.weight_only,
    ),
    Rule(
        "O16",
        "where the activation is quantized, so is the weight",
        "warning",
        "quantize the weight, or take the pair away",
        placement.float_weight,
    ),
    Rule(
        "O17",
        "the output of a quantized convolution is quantized",
        "warning",
        "put a pair on the convolution's output, before any op but Relu and Clip",
        placement.conv_output,
    ),
    Rule(
        "O18",
        "a Relu or Clip between integer ops is replaced by the zero point",
        "warning",
        "give the pair behind it the zero point at the lowest code, and a range that ends at the Clip's or below",
        placement.rectifier_stays,
    ),
    Rule(
        "O19",
        "pairs stand around ops that have an integer kernel",
        "warning",
        "take the pairs away, unless the ops before and behind need them",
        placement.no_kernel,
    ),
    Rule(
        "O20",
        "Softmax stays float",
        "warning",
        "take the pairs around the Softmax away",
        placement.softmax,
    ),
    Rule(
        "O21",
        "all inputs of an op between pairs are quantized",
        "warning",
        "put a pair on the float input, constants too, or take the others away",
        placement.float_side,
    ),
    Rule(
        "O22",
        "ops that only move or pick codes have one scale on both sides",
        "warning",
        "give the pairs before and behind it the same scale and zero point",
        placement.two_scales,
    ),
    Rule(
        "O23",
        "a pair serves an integer kernel",
        "warning",
        "take the pair away",
        placement.useless_pair,
    ),
    Rule(
        "O24",
        "outputs of the graph are not rounded without need",
        "warning",
        "take the pair at the output away",
        placement.output_pair,
    ),
    Rule(
        "O25",
        "both halves of a pair have the same numbers",
        "warning",
        "give the DequantizeLinear the scale and zero point of its QuantizeLinear",
        placement.rescale,
    ),
    Rule(
        "O26",
        "codes are not turned into other codes",
        "info",
        "let both pairs share one scale, or take one away",
        placement.requantized,
    ),
    Rule(
        "O27",
        "grouped convolutions stay float",
        "info",
        "take the pairs of the convolution away, or measure that they win",
        placement.grouped_conv,
    ),
    Rule(
        "O28",
        "the codes of a Sigmoid or Softmax output cover 0 to 1",
        "info",
        "give it the scale 1/256 and the zero point at the lowest code",
        placement.unit_range,
    ),
    Rule(
        "O29",
        "uint8 x int8 products do not saturate on this CPU",
        "warning",
        "quantize the weights again with reduce_range (7 bits), or use uint8 weights: slower, and exact",
        numbers.saturates_here,
    ),
    Rule(
        "O30",
        "uint8 x int8 products do not saturate on x86 CPUs without VNNI or AMX",
        "info",
        "where the model must run there, quantize its weights again with reduce_range (7 bits)",
        numbers.saturates_elsewhere,
    ),
)

ORT_RULES: Final = (
    *_STATIC,
    Rule(
        "O31",
        "onnxruntime loads the model",
        "error",
        "mend what its message names",
        kernels.refused,
    ),
    Rule(
        "O32",
        "no op stays float between pairs in the optimised graph",
        "warning",
        "take the pairs around the op away, or complete them",
        kernels.stays_float(tuple(rule.check for rule in _STATIC)),
    ),
    Rule(
        "O33",
        "the kernels of the optimised graph are counted",
        "info",
        "install onnxruntime, or make the model small enough to be written to the temporary folder",
        kernels.not_counted,
    ),
)
"""Rules in the order of the report: parameters, types, placement, counted kernels."""
