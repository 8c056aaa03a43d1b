"""Rewrites of a Q/DQ graph into forms that onnxruntime's CPU provider runs fast, with the same results.

Weight zero points are subtracted from the codes: integer kernels are made for weights with zero point 0. With one zero
point per channel, a depthwise convolution takes 20 times as long, and other kernels a fifth longer; release 1.23 does
not run them. Codes of few bits leave room in a byte for ``code - zero_point``.

A Clip for activations of fewer than 8 bits works on codes: ``Q(Clip(x, (qmin - z) s, (qmax - z) s))`` and
``Clip(Q(x), qmin, qmax)`` are equal, because rounding is monotonic. onnxruntime fuses a Conv into a QLinearConv only if
a QuantizeLinear follows directly, and has a Clip kernel for 8-bit integers. A Clip at whose bounds the codes saturate
has no effect and is removed: that kernel takes up to 30 % of the time of the convolution before it.

A Pad works on codes: onnxruntime moves pairs past Transpose, Slice and the like by itself, but not past Pad.

A residual Add before a layer normalization becomes a Sum: onnxruntime fuses Add and LayerNormalization into
SkipLayerNormalization, whose CPU kernel takes 4 to 6 times as long as the two separate ops (docs/decisions/0007). A Sum
is not fused, and can include a bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sbonnx.backends.base import in_every_scope
from sbonnx.backends.placement_rules import PAD_VALUE, fills_zero
from sbonnx.backends.saturating_codes import has_no_effect, remove_rectifier
from sbonnx.graph import Body, Constant, Node, Tensor, Variable, edit, query
from sbonnx.ops import ADDS, DEQUANTIZE, LINEAR, PADS, QUANTIZE
from sbonnx.spec import SAFE_CODE, Array


@in_every_scope(sort=False)
def centre_weights(body: Body, names: edit.Names) -> Iterator[str]:
    """Subtract the zero points from stored int8 weight codes where the result fits a byte."""
    for node in list(body.nodes):
        uses = query.readers(node.outputs[0]) if node.op in DEQUANTIZE else []
        codes = _about_zero(node) if uses and all(_is_integer_weight(*use) for use in uses) else None
        if codes is not None:
            zeros = np.zeros(tuple(node.inputs[2].shape), np.int8)
            for index, values in ((0, codes), (2, zeros)):
                edit.replace_input(node, index, edit.add_constant(body, str(node.inputs[index].name), values, names))
            yield f"{node.name}: zero points taken into its codes"


def _is_integer_weight(user: Node, index: int) -> bool:
    """Return whether input `index` of a node is the weight of a linear op with quantized data."""
    linear = LINEAR.get(user.op)
    data = query.producer(user.inputs[0])
    return linear is not None and index == linear.weight and data is not None and data.op in DEQUANTIZE


def _about_zero(node: Node) -> Array | None:
    """Subtract the zero points from the codes; None if there are none, or if the results are too large."""
    codes = query.constant(node.inputs[0])
    zero = query.constant(query.optional_input(node, 2))
    if codes is None or zero is None or codes.dtype != np.int8 or not zero.any() or node.attrs.get("block_size"):
        return None
    if zero.size > 1:
        axis = int(node.attrs.get("axis", 1)) % codes.ndim
        zero = zero.reshape([-1 if at == axis else 1 for at in range(codes.ndim)])
    steps = codes.astype(np.int16) - zero.astype(np.int16)
    reach = int(np.abs(steps).max(initial=0))
    before = int(np.abs(codes.astype(np.int16)).max(initial=0))
    return steps.astype(np.int8) if reach <= min(127, max(SAFE_CODE, before)) else None


INPUTS: Final = 3
"""Number of inputs of a Clip with both bounds, and of a QuantizeLinear with a zero point."""


@in_every_scope()
def clip_codes(body: Body, names: edit.Names) -> Iterator[str]:
    """Move a Clip behind the QuantizeLinear that alone reads it, or remove it if it has no effect there."""
    outputs = {id(tensor) for tensor in body.outputs}
    for node in list(body.nodes):
        clipped = _clipped(node, outputs)
        if clipped is not None:
            quantize, *ends = clipped
            if has_no_effect(node, quantize):
                remove_rectifier(node, quantize)
                yield f"{node.name}: removed, since the codes behind it saturate at its bounds"
                continue
            codes: Tensor = quantize.outputs[0]
            edit.replace_input(quantize, 0, node.inputs[0])
            wide = Variable(names.fresh(f"{codes.name}_wide"), dtype=codes.dtype, shape=codes.shape)
            edit.replace_output(quantize, 0, wide)
            bounds = [
                edit.add_constant(body, f"{codes.name}_{name}", np.asarray(end), names)
                for name, end in zip(("low", "high"), ends, strict=True)
            ]
            inputs, attrs = [wide, *bounds], dict(node.attrs)
            edit.add_node(body, "Clip", inputs, names=names, stem=node.name, attrs=attrs, outputs=[codes])
            yield f"{node.name}: clips codes"


def _clipped(node: Node, outputs: set[int]) -> tuple[Node, np.generic, np.generic] | None:
    """Return the only QuantizeLinear that reads a Clip, and the bounds of the Clip in its codes."""
    if node.op != "Clip" or len(node.inputs) < INPUTS or id(node.outputs[0]) in outputs:
        return None
    readers = query.readers(node.outputs[0])
    if len(readers) != 1 or readers[0][0].op not in QUANTIZE or len(readers[0][0].inputs) < INPUTS:
        return None
    quantize = readers[0][0]
    if query.constant(node.inputs[1]) is None or query.constant(node.inputs[2]) is None:
        return None
    values = [query.constant(tensor) for tensor in (*node.inputs[1:], *quantize.inputs[1:])]
    if id(quantize.outputs[0]) in outputs or any(value is None or value.size != 1 for value in values):
        return None
    low, high, scale, zero = (value.reshape(()) for value in values if value is not None)
    if zero.dtype not in (np.dtype(np.int8), np.dtype(np.uint8)) or not low <= high:  # NaN
        return None
    limits = np.iinfo(zero.dtype)
    ends = (np.clip(np.rint(end / scale) + float(zero), limits.min, limits.max) for end in (low, high))
    first, last = (zero.dtype.type(int(end)) for end in ends)
    return quantize, first, last


PADDED: Final = ("int8", "uint8")
"""Quantized types that onnxruntime's Pad supports."""


@in_every_scope()
def pad_codes(body: Body, names: edit.Names) -> Iterator[str]:
    """Replace DequantizeLinear, Pad, QuantizeLinear with one scale by a Pad of codes."""
    outputs = {tensor.name for tensor in body.outputs}
    for node in list(body.nodes):
        if node.op not in PADS or node.outputs[0].name in outputs or not fills_zero(node):
            continue
        before = query.producer(node.inputs[0])
        after = [reader for reader, index in query.readers(node.outputs[0]) if index == 0]
        if before is None or before.op not in DEQUANTIZE or not _one_scale(before, after):
            continue
        codes, _, zero = before.inputs[:3]
        if str(query.dtype(zero)) not in PADDED:
            continue
        fill = edit.add_constant(body, f"{codes.name}_fill", np.asarray(query.constant(zero)).reshape(()), names)
        moved = Variable(names.fresh(f"{codes.name}_padded"), dtype=codes.dtype, shape=node.outputs[0].shape)
        inputs = [codes, node.inputs[1], fill, *node.inputs[PAD_VALUE + 1 :]]
        name = names.fresh(f"{node.name}_codes")
        body.nodes.append(Node("Pad", name, dict(node.attrs), inputs, [moved]))
        for quantize in after:
            edit.replace_all_uses(quantize.outputs[0], moved, graph=body)
        yield f"{node.name}: pads codes"


def _one_scale(before: Node, after: list[Node]) -> bool:
    if not after or any(node.op not in QUANTIZE for node in after):
        return False
    for index in (1, 2):
        constants = [
            query.constant(node.inputs[index]) if len(node.inputs) > index else None for node in (before, *after)
        ]
        values = [value for value in constants if value is not None and value.size == 1]
        if len(values) < len(constants) or any(value != values[0] for value in values):
            return False
    return True


NORMALIZES = "LayerNormalization"
FIRST_OF_UNROLLED = "ReduceMean"
"""First op of a normalization that is written in single ops."""


SUMMED: Final = ("float16", "float32", "float64")
"""Types that Sum supports: unlike Add, it has no integers."""


@in_every_scope()
def write_sums(body: Body, names: edit.Names) -> Iterator[str]:
    """Replace residual Adds before a layer normalization by Sums."""
    outputs = {tensor.name for tensor in body.outputs}
    for node in [node for node in body.nodes if _is_residual_sum(node)]:
        output = node.outputs[0]
        edit.replace_output(node, 0, Variable(names.fresh(output.name), output.dtype, output.shape))
        name = names.fresh(f"{node.name}_Sum")
        body.nodes.append(Node("Sum", name, {}, _terms(node, outputs), [output]))
        yield f"{node.name}: written as Sum"


def _is_residual_sum(node: Node) -> bool:
    if node.op not in ADDS or str(query.dtype(node.outputs[0])) not in SUMMED:
        return False
    for tensor in node.inputs:
        producer = query.producer(tensor)
        if isinstance(tensor, Constant) or (producer is not None and producer.op in DEQUANTIZE):
            return False  # an integer kernel may read it
    ops = {reader.op for reader, _ in query.readers(node.outputs[0])}
    return not ops & QUANTIZE and (NORMALIZES in ops or FIRST_OF_UNROLLED in ops)


def _terms(node: Node, outputs: set[str]) -> list[Tensor]:
    """Return the terms of an Add in the order of the additions, including a bias added to one side before."""
    for index, tensor in enumerate(node.inputs):
        inner = query.producer(tensor)
        if inner is None or inner.op not in ADDS or len(query.readers(tensor)) != 1 or tensor.name in outputs:
            continue
        if any(isinstance(term, Constant) for term in inner.inputs):
            return [*inner.inputs, node.inputs[1 - index]]
    return list(node.inputs)
