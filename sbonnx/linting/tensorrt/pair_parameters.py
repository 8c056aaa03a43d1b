"""TensorRT's rules for types, parameters and weights of Q/DQ nodes: T01 to T19, P13, P16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import ml_dtypes
import numpy as np

from sbonnx.backends.tensorrt.profiles import INT4_BLOCKS, PROFILES
from sbonnx.graph import Node, Tensor, query
from sbonnx.linear.layer import channel_axes
from sbonnx.linting.model_view import RENAMES, Quantizer, View
from sbonnx.ops import ACTIVATIONS, CONVOLUTIONS, LINEAR, NORMS, POOLS, SOFTMAX, STANDARD_DOMAINS
from sbonnx.qdq import is_integer_op
from sbonnx.small_floats import E8M0, FP4, FP8
from sbonnx.spec import BLOCKS_SINCE, CHANNELS_SINCE, CODES_SINCE, HALF_SCALES_SINCE, Array

Site = tuple[str, str, str]

SCALES: Final = frozenset({"float32", "float16", "bfloat16", E8M0})
HALVES: Final = frozenset({"float16", "bfloat16"})


def integer_ops(view: View) -> Iterator[Site]:
    """T01: Find ops that compute in integers themselves."""
    for node in view.nodes:
        if is_integer_op(node):
            yield node.name, node.outputs[0].name if node.outputs else "", f"the parser has no {node.op}"


def asymmetric(view: View) -> Iterator[Site]:
    """T02: Find zero points that are not all zeros, or not known at build time."""
    for quantizer in view.distinct:
        if not quantizer.has_zero:
            continue
        if quantizer.zero is None:
            yield (
                quantizer.name,
                quantizer.zero_name,
                f"the zero point '{quantizer.zero_name}' is computed, not a constant",
            )
        elif np.any(values := quantizer.zero.astype(np.float32)):
            first = values.ravel()[np.flatnonzero(values)[0]]
            yield quantizer.name, quantizer.zero_name, f"the zero point '{quantizer.zero_name}' is {first:g}, not 0"


def refused_codes(view: View) -> Iterator[Site]:
    """T03: Find quantized types that the version does not support."""
    taken = PROFILES[view.release].codes
    for quantizer in view.distinct:
        if quantizer.codes is not None and quantizer.codes not in taken:
            yield (
                quantizer.name,
                quantizer.data.name,
                f"codes of type {quantizer.codes}; {view.target} takes {', '.join(sorted(taken))}",
            )


def unsigned_for_dla(view: View) -> Iterator[Site]:
    """T02-dla: Report once the uint8 codes that a DLA supports with a parser flag.

    Source: TensorRT's page on parser flags for DLA (Orin, float32 scales); the flag was added in 10.11.
    """
    taken = [
        quantizer
        for quantizer in view.distinct
        if quantizer.codes == "uint8" and quantizer.scale_type == "float32" and not quantizer.many
    ]
    if taken:
        why = f"{len(taken)} tensors of uint8 codes with one float32 scale: what a DLA takes, and a GPU does not"
        yield taken[0].name, taken[0].data.name, why


def untyped_codes(view: View) -> Iterator[Site]:
    """T04: Find quantizers with neither zero point nor output_dtype: ONNX defaults to uint8 and the parser to int8."""
    for quantizer in view.quantizers:
        if quantizer.quantizes and quantizer.codes is None and not quantizer.has_zero:
            yield (
                quantizer.name,
                quantizer.output.name,
                "neither a zero point nor output_dtype: ONNX reads uint8, TensorRT int8",
            )


def bad_scales(view: View) -> Iterator[Site]:
    """T05: Find scales that are 0, negative or not finite, or become 0 or infinite in half precision."""
    for quantizer in view.distinct:
        if quantizer.scale is None or quantizer.scale.size == 0:
            continue
        values = quantizer.scale.astype(np.float32).ravel()
        wrong = ~(np.isfinite(values) & (values > 0))
        if wrong.any():
            yield quantizer.name, quantizer.scale_name, _bad(values, wrong, "not a finite number above 0")
            continue
        if quantizer.codes == "int32" or quantizer.scale_type == E8M0:
            continue  # T03 reports int32; powers of two are never rounded to half precision
        with np.errstate(over="ignore"):
            half = values.astype(np.float16).astype(np.float32)
        wrong = ~(np.isfinite(half) & (half > 0))
        if quantizer.scale_type == "bfloat16":
            wrong = ~(values.astype(ml_dtypes.bfloat16).astype(np.float32) > 0)
        if wrong.any():
            yield quantizer.name, quantizer.scale_name, _bad(values, wrong, "0 or infinite in float16")


def _bad(values: Array, wrong: Array, what: str) -> str:
    at = int(np.flatnonzero(wrong)[0])
    of = f" ({int(wrong.sum())} of {values.size} are, the first at {at})" if values.size > 1 else ""
    return f"a scale of {values[at]:g} is {what}{of}"


def computed_scales(view: View) -> Iterator[Site]:
    """T06: Find scales that are not known at build time, or of an unsupported type."""
    for quantizer in view.distinct:
        node = query.producer(quantizer.node.inputs[1])
        if node is not None and node.op.startswith("TRT_"):
            continue  # of a dynamic-quantize op: computed by design
        if quantizer.scale is None and not view.is_constant(quantizer.node.inputs[1]):
            yield (
                quantizer.name,
                quantizer.scale_name,
                f"the scale '{quantizer.scale_name}' is computed, not a constant",
            )
        elif quantizer.scale_type is not None and quantizer.scale_type not in SCALES:
            yield quantizer.name, quantizer.scale_name, f"a scale of type {quantizer.scale_type}"


def misshapen_scales(view: View) -> Iterator[Site]:
    """T07: Find scales that are neither per-tensor, per-channel nor block-wise."""
    for quantizer in view.distinct:
        why = _misshapen(quantizer)
        if why:
            yield quantizer.name, quantizer.scale_name, why


def _misshapen(quantizer: Quantizer) -> str | None:
    shape, data = quantizer.scale_shape, query.shape(quantizer.data)
    if shape is None or any(not isinstance(dim, int) for dim in shape):
        return None
    volume = int(np.prod([dim for dim in shape if isinstance(dim, int)], dtype=np.int64))
    if quantizer.zero is not None and quantizer.zero.size != volume:
        return f"{volume} scales and {quantizer.zero.size} zero points"
    if volume == 1 or data is None:
        return None
    if len(shape) == 1 and not quantizer.block:
        axis = quantizer.channel_axis
        if not 0 <= axis < len(data):
            return f"{volume} scales along axis {axis} of a tensor of rank {len(data)}"
        is_static = isinstance(data[axis], int)
        return (
            f"{volume} scales for {data[axis]} channels of axis {axis}" if is_static and data[axis] != volume else None
        )
    if len(shape) != len(data):
        return f"scales of shape {list(shape)} for a tensor of shape {list(data)}"
    if any(not isinstance(dim, int) for dim in data):
        return None
    axis_ = quantizer.blocked_axis
    if axis_ is None:
        return f"scales of shape {list(shape)} differ from the tensor's {list(data)} in more or less than one dimension"
    whole, parts = data[axis_], shape[axis_]
    divides = isinstance(whole, int) and isinstance(parts, int) and parts and whole % parts == 0
    return None if divides else f"{whole} values along axis {axis_} do not divide into {parts} blocks"


def scalars(view: View) -> Iterator[Site]:
    """T13: Find Q/DQ of tensors without dimensions."""
    for quantizer in view.distinct:
        if query.rank(quantizer.data) == 0:
            yield quantizer.name, quantizer.data.name, f"'{quantizer.data.name}' has no dimensions"


def old_opset(view: View) -> Iterator[Site]:
    """T14: Find Q/DQ forms that the file's opset does not have, or an opset below the parser's oldest."""
    for quantizer in view.distinct:
        if (quantizer.node.domain or "") not in STANDARD_DOMAINS:
            continue  # of a domain with its own versions
        needed, what = max(_needs(quantizer), default=(10, "Q/DQ"))
        if view.opset < needed:
            yield quantizer.name, quantizer.output.name, f"{what} since opset {needed}, the model has {view.opset}"


def opset_wanted(view: View) -> int:
    """Return the oldest opset that has all Q/DQ forms in use."""
    ours = [quantizer for quantizer in view.distinct if (quantizer.node.domain or "") in STANDARD_DOMAINS]
    return max((opset for quantizer in ours for opset, _ in _needs(quantizer)), default=0)


def _needs(quantizer: Quantizer) -> Iterator[tuple[int, str]]:
    if quantizer.many or quantizer.axis is not None:
        yield CHANNELS_SINCE, "per-channel scales exist"
    if quantizer.codes in CODES_SINCE:
        yield CODES_SINCE[quantizer.codes], f"{quantizer.codes} codes exist"
    if quantizer.scale_type in HALVES:
        yield HALF_SCALES_SINCE, f"{quantizer.scale_type} scales exist"
    if quantizer.block:
        yield BLOCKS_SINCE, "blocks exist"


def new_opset(view: View) -> Iterator[Site]:
    """T14-newest: Report an opset newer than the parser is documented for. Parsers often read it nevertheless."""
    newest = PROFILES[view.release].newest_opset
    if view.quantizers and view.opset > newest:
        yield "", "", f"the model has opset {view.opset}; the parser of {view.target} is documented up to {newest}"


def mixed_types(view: View) -> Iterator[Site]:
    """T15: Find QuantizeLinear nodes whose input has another float type than the scale."""
    for quantizer in view.quantizers:
        data = query.dtype(quantizer.data)
        if not quantizer.quantizes or data is None or quantizer.scale_type is None or quantizer.scale_type == E8M0:
            continue
        if str(data) != quantizer.scale_type and {str(data), quantizer.scale_type} & HALVES:
            yield (
                quantizer.name,
                quantizer.data.name,
                f"'{quantizer.data.name}' is {data}, the scale {quantizer.scale_type}",
            )


def float_islands(view: View) -> Iterator[Site]:
    """T19: Find DequantizeLinear nodes that return float32 in a half-precision model."""
    tensors = (tensor for node in view.nodes for tensor in (*node.inputs[:1], *node.outputs))
    if not any(str(query.dtype(tensor)) in HALVES for tensor in tensors):  # apart from scales
        return
    for quantizer in view.quantizers:
        if (
            not quantizer.quantizes
            and quantizer.scale_type == "float32"
            and not quantizer.node.attrs.get("output_dtype")
        ):
            yield quantizer.name, quantizer.output.name, "a float32 scale: what follows computes in float32"


FP4_BLOCK: Final = 16
MXFP8_BLOCK: Final = 32

COMPUTES_IN_FLOAT: Final = frozenset(LINEAR) | ACTIVATIONS | NORMS | POOLS | SOFTMAX
"""Ops that have an integer form in TensorRT only after a DequantizeLinear."""

NARROW: Final = ("int8", "uint8", "int4", "uint4", "int16", "uint16", "float8", "float4")
"""Quantized types; wider integers are counts and shapes, which some of these ops also take."""


def channels_of_activations(view: View) -> Iterator[Site]:
    """T08: Find vectors of scales on computed tensors."""
    for quantizer in view.distinct:
        if (
            quantizer.many
            and view.is_activation_pair(quantizer)
            and quantizer.scale_type != E8M0
            and quantizer.codes != FP4
        ):
            yield (
                quantizer.name,
                quantizer.data.name,
                f"scales of shape {list(quantizer.scale_shape or ())} on a computed tensor",
            )


def unwritten_axis(view: View) -> Iterator[Site]:
    """T09: Find vectors of scales without `axis`: ONNX takes 1, the parser 0."""
    for quantizer in view.quantizers:
        if quantizer.many and len(quantizer.scale_shape or ()) == 1 and quantizer.axis is None:
            yield (
                quantizer.name,
                quantizer.scale_name,
                "a vector of scales without 'axis': ONNX takes 1, TensorRT's parser 0",
            )


def wanted_axes(view: View, quantizer: Quantizer) -> list[tuple[int, Node]]:
    """Return the required scale axis of a weight for each linear op that reads it, in terms of the weight's axes."""
    rank = query.rank(quantizer.data)
    if rank is None:
        return []
    wanted: list[tuple[int, Node]] = []
    stack: list[tuple[Tensor, tuple[int, ...]]] = [(quantizer.output, tuple(range(rank)))]
    while stack:
        tensor, axes = stack.pop()
        for node, index in query.readers(tensor):
            if node.op == "Transpose":
                order = node.attrs.get("perm") or range(len(axes))[::-1]
                if len(order) == len(axes):
                    stack.append((node.outputs[0], tuple(axes[at] for at in order)))
            elif node.op in RENAMES or (node.op in ("QuantizeLinear", "DequantizeLinear") and index == 0):
                stack.append((node.outputs[0], axes))
            else:
                axis, _ = channel_axes(node.op, node.attrs, len(axes), index) if len(axes) > 1 else (None, None)
                if axis is not None:
                    wanted.append((axes[axis], node))
    return wanted


def wrong_axis(view: View) -> Iterator[Site]:
    """T10: Find weight scales along another axis than the output channels."""
    for quantizer, wanted in _vectors(view):
        axes = {axis for axis, _ in wanted}
        if (
            len(axes) == 1 and quantizer.axis is not None and quantizer.channel_axis not in axes
        ):  # T09 reports a missing axis
            axis, node = wanted[0]
            yield (
                quantizer.name,
                quantizer.data.name,
                f"scales along axis {quantizer.channel_axis}; {node.op} '{node.name}' wants {axis}",
            )


def shared_weights(view: View) -> Iterator[Site]:
    """P16: Find a vector of scales shared by readers whose output channels are different axes of the weight."""
    for quantizer, wanted in _vectors(view):
        axes = dict(wanted)
        if len(axes) > 1:
            told = ", ".join(f"axis {axis} for {node.op} '{node.name}'" for axis, node in sorted(axes.items()))
            yield quantizer.name, quantizer.data.name, f"one vector of scales for {told}"


def _vectors(view: View) -> Iterator[tuple[Quantizer, list[tuple[int, Node]]]]:
    """Yield each weight with one vector of scales, and the axes that its readers require; a pair counts once."""
    for quantizer in view.distinct:
        if quantizer.many and not quantizer.blocked and not view.is_activation_pair(quantizer):
            wanted = wanted_axes(view, quantizer)
            if wanted:
                yield quantizer, wanted


def int4(view: View) -> Iterator[Site]:
    """T11: Find int4 in other forms than blocks of constants."""
    for quantizer in view.distinct:
        if quantizer.codes != "int4":
            continue
        shape = query.shape(quantizer.data)
        if view.is_activation_pair(quantizer):
            yield quantizer.name, quantizer.data.name, "int4 of a computed tensor; TensorRT takes it for weights alone"
        elif shape and isinstance(shape[-1], int) and shape[-1] % 2:
            yield quantizer.name, quantizer.data.name, f"int4 with an odd last dimension, {shape[-1]}"
        elif quantizer.block_length not in INT4_BLOCKS:
            layout = f"blocks of {quantizer.block_length}" if quantizer.blocked else "no blocks"
            yield quantizer.name, quantizer.data.name, f"int4 with {layout}; TensorRT takes blocks of 64 or 128"
        elif quantizer.blocked_axis is not None and shape is not None and quantizer.blocked_axis < len(shape) - 2:
            yield (
                quantizer.name,
                quantizer.data.name,
                f"blocks along axis {quantizer.blocked_axis}, not one of the last two",
            )


def small_floats(view: View) -> Iterator[Site]:
    """T12: Find FP4 without blocks of 16 and FP8 scales, and E8M0 scales without FP8 codes in blocks of 32."""
    for quantizer in view.distinct:
        if quantizer.codes == FP4:
            before = view.dequantizer(quantizer.node.inputs[1])
            if quantizer.block_length != FP4_BLOCK:
                yield (
                    quantizer.name,
                    quantizer.data.name,
                    f"FP4 in blocks of {quantizer.block_length or 'all values'}, not {FP4_BLOCK}",
                )
            elif before is None or before.codes != FP8:
                yield quantizer.name, quantizer.scale_name, "FP4 whose scales are not dequantized FP8 codes"
        elif quantizer.scale_type == E8M0 and (quantizer.block_length != MXFP8_BLOCK or quantizer.codes != FP8):
            layout = f"{quantizer.codes} in blocks of {quantizer.block_length or 'all values'}"
            yield (
                quantizer.name,
                quantizer.data.name,
                f"E8M0 scales of {layout}; TensorRT takes {FP8} in blocks of {MXFP8_BLOCK}",
            )


def integers_in_float_ops(view: View) -> Iterator[Site]:
    """T16: Find codes that enter a float op without a DequantizeLinear."""
    for node in view.nodes:
        if node.op not in COMPUTES_IN_FLOAT:
            continue
        for tensor in node.inputs:
            before = view.quantizer_of(tensor)
            codes = str(query.dtype(tensor)).startswith(NARROW) if before is None else before.quantizes
            if not tensor.is_empty() and codes:
                yield node.name, tensor.name, f"{node.op} reads the codes '{tensor.name}' without a DequantizeLinear"


def quantized_biases(view: View) -> Iterator[Site]:
    """T17: Find DequantizeLinear nodes before a bias."""
    for node in view.nodes:
        linear = LINEAR.get(node.op)
        if linear is None or linear.bias is None or len(node.inputs) <= linear.bias:
            continue
        bias = view.dequantizer(node.inputs[linear.bias])
        if bias is not None:
            yield bias.name, bias.data.name, f"the bias of '{node.name}' is {bias.codes} with a DequantizeLinear"


def rescaled(view: View) -> Iterator[Site]:
    """T18: Find DequantizeLinear nodes with other parameters than the QuantizeLinear before them."""
    for quantizer in view.quantizers:
        before = None if quantizer.quantizes else view.quantizer_of(quantizer.data)
        if before is not None and before.quantizes and not quantizer.same_numbers(before):
            yield (
                quantizer.name,
                quantizer.data.name,
                f"other numbers than in the QuantizeLinear '{before.name}' before it",
            )


def weights_per_tensor(view: View) -> Iterator[Site]:
    """P13: Find convolution weights with one scale for all channels."""
    for node in view.weighted:
        linear = LINEAR[node.op]
        weight = view.dequantizer(node.inputs[linear.weight]) if node.op in CONVOLUTIONS else None
        if weight is None or weight.many:
            continue
        shape = query.shape(weight.data)
        axis, _ = channel_axes(node.op, node.attrs, 0 if shape is None else len(shape))
        channels = 1 if shape is None or axis is None else shape[axis]
        if channels != 1:
            yield weight.name, weight.data.name, f"one scale for the {channels} output channels of '{node.name}'"
