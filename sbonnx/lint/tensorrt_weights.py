"""TensorRT's rules for weights and the ops that read them: T08 to T12, T16 to T18, P13, P16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sbonnx.backends.tensorrt.profiles import E8M0, FP4, INT4_BLOCKS
from sbonnx.graph import Node, Tensor, query
from sbonnx.linear.layer import channel_axes
from sbonnx.lint.tensorrt_codes import Site
from sbonnx.lint.view import RENAMES, Quantizer, View
from sbonnx.ops import ACTIVATIONS, CONVOLUTIONS, LINEAR, NORMS, POOLS, SOFTMAX
from sbonnx.spec import FP8

FP4_BLOCK: Final = 16
MXFP8_BLOCK: Final = 32

COMPUTES_IN_FLOAT: Final = frozenset(LINEAR) | ACTIVATIONS | NORMS | POOLS | SOFTMAX
"""Ops that have an integer form in TensorRT only after a DequantizeLinear."""

NARROW: Final = ("int8", "uint8", "int4", "uint4", "int16", "uint16", "float8", "float4")
"""Quantized types; wider integers are counts and shapes, which some of these ops also take."""


def channels_of_activations(view: View) -> Iterator[Site]:
    """T08: Find vectors of scales on computed tensors."""
    for one in view.distinct:
        if one.many and view.is_activation_pair(one) and one.scale_type != E8M0 and one.codes != FP4:
            yield one.name, one.data.name, f"scales of shape {list(one.scale_shape or ())} on a computed tensor"


def unwritten_axis(view: View) -> Iterator[Site]:
    """T09: Find vectors of scales without `axis`: ONNX takes 1, the parser 0."""
    for one in view.quantizers:
        if one.many and len(one.scale_shape or ()) == 1 and one.axis is None:
            yield one.name, one.scale_name, "a vector of scales without 'axis': ONNX takes 1, TensorRT's parser 0"


def wanted_axes(view: View, one: Quantizer) -> list[tuple[int, Node]]:
    """Return the required scale axis of a weight for each linear op that reads it, in terms of the weight's axes."""
    rank = query.rank(one.data)
    if rank is None:
        return []
    found: list[tuple[int, Node]] = []
    stack: list[tuple[Tensor, tuple[int, ...]]] = [(one.output, tuple(range(rank)))]
    while stack:
        tensor, axes = stack.pop()
        for node, index in view.readers(tensor):
            if node.op == "Transpose":
                order = node.attrs.get("perm") or range(len(axes))[::-1]
                if len(order) == len(axes):
                    stack.append((node.outputs[0], tuple(axes[at] for at in order)))
            elif node.op in RENAMES or (node.op in ("QuantizeLinear", "DequantizeLinear") and index == 0):
                stack.append((node.outputs[0], axes))
            else:
                axis, _ = channel_axes(node.op, node.attrs, len(axes), index) if len(axes) > 1 else (None, None)
                if axis is not None:
                    found.append((axes[axis], node))
    return found


def wrong_axis(view: View) -> Iterator[Site]:
    """T10: Find weight scales along another axis than the output channels."""
    for one, wanted in _vectors(view):
        axes = {axis for axis, _ in wanted}
        if len(axes) == 1 and one.axis is not None and one.channel_axis not in axes:  # T09 reports a missing axis
            axis, node = wanted[0]
            yield one.name, one.data.name, f"scales along axis {one.channel_axis}; {node.op} '{node.name}' wants {axis}"


def shared_weights(view: View) -> Iterator[Site]:
    """P16: Find a vector of scales shared by readers whose output channels are different axes of the weight."""
    for one, wanted in _vectors(view):
        axes = dict(wanted)
        if len(axes) > 1:
            told = ", ".join(f"axis {axis} for {node.op} '{node.name}'" for axis, node in sorted(axes.items()))
            yield one.name, one.data.name, f"one vector of scales for {told}"


def _vectors(view: View) -> Iterator[tuple[Quantizer, list[tuple[int, Node]]]]:
    """Yield each weight with one vector of scales, and the axes that its readers require; a pair counts once."""
    for one in view.distinct:
        if one.many and not one.blocked and not view.is_activation_pair(one):
            wanted = wanted_axes(view, one)
            if wanted:
                yield one, wanted


def int4(view: View) -> Iterator[Site]:
    """T11: Find int4 in other forms than blocks of constants."""
    for one in view.distinct:
        if one.codes != "int4":
            continue
        shape = query.shape(one.data)
        if view.is_activation_pair(one):
            yield one.name, one.data.name, "int4 of a computed tensor; TensorRT takes it for weights alone"
        elif shape and isinstance(shape[-1], int) and shape[-1] % 2:
            yield one.name, one.data.name, f"int4 with an odd last dimension, {shape[-1]}"
        elif one.block_length not in INT4_BLOCKS:
            found = f"blocks of {one.block_length}" if one.blocked else "no blocks"
            yield one.name, one.data.name, f"int4 with {found}; TensorRT takes blocks of 64 or 128"
        elif one.blocked_axis is not None and shape is not None and one.blocked_axis < len(shape) - 2:
            yield one.name, one.data.name, f"blocks along axis {one.blocked_axis}, not one of the last two"


def small_floats(view: View) -> Iterator[Site]:
    """T12: Find FP4 without blocks of 16 and FP8 scales, and E8M0 scales without FP8 codes in blocks of 32."""
    for one in view.distinct:
        if one.codes == FP4:
            before = view.dequantizer(one.node.inputs[1])
            if one.block_length != FP4_BLOCK:
                yield one.name, one.data.name, f"FP4 in blocks of {one.block_length or 'all values'}, not {FP4_BLOCK}"
            elif before is None or before.codes != FP8:
                yield one.name, one.scale_name, "FP4 whose scales are not FP8 codes behind a DequantizeLinear"
        elif one.scale_type == E8M0 and (one.block_length != MXFP8_BLOCK or one.codes != FP8):
            found = f"{one.codes} in blocks of {one.block_length or 'all values'}"
            yield one.name, one.data.name, f"E8M0 scales of {found}; TensorRT takes {FP8} in blocks of {MXFP8_BLOCK}"


def integers_in_float_ops(view: View) -> Iterator[Site]:
    """T16: Find codes that enter a float op without a DequantizeLinear."""
    for node in view.nodes:
        if node.op not in COMPUTES_IN_FLOAT:
            continue
        for tensor in node.inputs:
            if not tensor.is_empty() and _holds_codes(view, tensor):
                yield node.name, tensor.name, f"{node.op} reads the codes '{tensor.name}' without a DequantizeLinear"


def _holds_codes(view: View, tensor: Tensor) -> bool:
    before = view.quantizer_of(tensor)
    if before is not None:
        return before.quantizes
    kind = query.dtype(tensor)
    return kind is not None and str(kind).startswith(NARROW)


def quantized_biases(view: View) -> Iterator[Site]:
    """T17: Find DequantizeLinear nodes before a bias."""
    for node in view.nodes:
        linear = LINEAR.get(node.op)
        if linear is None or linear.bias is None or len(node.inputs) <= linear.bias:
            continue
        one = view.dequantizer(node.inputs[linear.bias])
        if one is not None:
            yield one.name, one.data.name, f"the bias of '{node.name}' is {one.codes} behind a DequantizeLinear"


def rescaled(view: View) -> Iterator[Site]:
    """T18: Find DequantizeLinear nodes with other parameters than the QuantizeLinear before them."""
    for one in view.quantizers:
        before = None if one.quantizes else view.quantizer_of(one.data)
        if before is not None and before.quantizes and not one.same_numbers(before):
            yield one.name, one.data.name, f"other numbers than in the QuantizeLinear '{before.name}' before it"


def weights_per_tensor(view: View) -> Iterator[Site]:
    """P13: Find convolution weights with one scale for all channels."""
    for node in view.weighted:
        linear = LINEAR[node.op]
        one = view.dequantizer(node.inputs[linear.weight]) if node.op in CONVOLUTIONS else None
        if one is None or one.many:
            continue
        shape = query.shape(one.data)
        axis, _ = channel_axes(node.op, node.attrs, 0 if shape is None else len(shape))
        channels = 1 if shape is None or axis is None else shape[axis]
        if channels != 1:
            yield one.name, one.data.name, f"one scale for the {channels} output channels of '{node.name}'"
