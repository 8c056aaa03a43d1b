"""TensorRT's rules for ops that are better left in float: P11, P12, P14, P15."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sbonnx.backends.tensorrt.backend import FEW, slow_linear, unfit
from sbonnx.graph import Node, Tensor, query
from sbonnx.linear.layer import channel_axes
from sbonnx.lint.tensorrt_codes import Site
from sbonnx.lint.view import Quantizer, View
from sbonnx.ops import (
    ADDS,
    CONCATS,
    CONVOLUTIONS,
    ELEMENTWISE,
    HALF_LOSES,
    LINEAR,
    PICKS_MAX,
    POOLS,
    QDQ,
    RECTIFIERS,
    SOFTMAX,
    STANDARD_DOMAINS,
)
from sbonnx.spec import FP8, QuantSpec

PLAIN: Final = frozenset(LINEAR) | POOLS | PICKS_MAX | ADDS | ELEMENTWISE | RECTIFIERS | CONCATS
"""Ops that a DLA runs in int8."""

LONGEST_INT8: Final = 512
"""Longest sequence for which int8 attention fuses."""

WHOLE_VECTOR: Final = 32
"""Channels that an int8 kernel reads at once."""

FP8_HEAD: Final = range(9, 257)
"""Head sizes for which fp8 attention fuses."""


def high_precision(view: View) -> Iterator[Site]:
    """P11: Find pairs before softmax and norms, at masks, and on only one input of attention's products."""
    for node in view.nodes:
        if node.op in HALF_LOSES and (one := view.dequantizer(node.inputs[0])) is not None:
            yield node.name, node.inputs[0].name, f"{node.op} reads what '{one.name}' returns: it wants high precision"
        elif node.op in ADDS and _feeds_softmax(view, node):
            masked = [tensor for tensor in node.inputs if view.dequantizer(tensor) is not None]
            if masked:
                yield node.name, masked[0].name, "the Add of a mask before Softmax reads Q/DQ"
        elif node.op == "MatMul" and not any(view.is_constant(tensor) for tensor in node.inputs):
            why = _product(view, node)
            if why:
                yield node.name, node.outputs[0].name, why


def _feeds_softmax(view: View, node: Node) -> bool:
    return any(reader.op in SOFTMAX for reader, _ in view.readers(node.outputs[0]))


def _product(view: View, node: Node) -> str | None:
    """Return the fault of the pairs before a product of two computed tensors, or None."""
    sides = [view.dequantizer(tensor) for tensor in node.inputs]
    if not any(sides):
        return None
    if None in sides:
        return "one factor of a product of activations stands behind Q/DQ: both or none"
    first, shape = query.shape(node.inputs[0]), query.shape(node.outputs[0])
    if not first or not shape or not _is_scores(view, node):
        return None
    length, head = shape[-1], first[-1]
    codes = {side.codes for side in sides if side is not None}
    if codes == {"int8"} and isinstance(length, int) and length > LONGEST_INT8:
        return f"int8 attention over {length} positions; TensorRT fuses up to {LONGEST_INT8}"
    if codes == {FP8} and isinstance(head, int) and head not in FP8_HEAD:
        return f"fp8 attention with heads of {head}; TensorRT fuses {FP8_HEAD.start} to {FP8_HEAD.stop - 1}"
    return None


def _is_scores(view: View, node: Node) -> bool:
    """Return whether the output of a product goes to a Softmax, through scaling and a mask."""
    tensor: Tensor = node.outputs[0]
    for _ in range(4):
        readers = view.readers(tensor)
        if any(reader.op in SOFTMAX for reader, _ in readers):
            return True
        if len(readers) != 1 or readers[0][0].op not in ADDS | ELEMENTWISE:
            return False
        tensor = readers[0][0].outputs[0]
    return False


def tiny(view: View) -> Iterator[Site]:
    """P12: Find quantized weighted ops that are too small or have too many groups for integer kernels."""
    for node in view.weighted:
        linear = LINEAR[node.op]
        one = view.dequantizer(node.inputs[linear.weight])
        if one is None or view.dequantizer(node.inputs[1 - linear.weight]) is None:
            continue
        why = _tiny_conv(node, one) if node.op in CONVOLUTIONS else _tiny_product(node)
        if why:
            yield node.name, node.outputs[0].name, why


def padded_channels(view: View) -> Iterator[Site]:
    """P12-full: Report once the int8 convolutions whose channels are not multiples of 32, to which kernels pad."""
    named = {name for name, _, _ in tiny(view)}
    total, odd = 0, []
    for node in view.weighted:
        if node.op not in CONVOLUTIONS or node.name in named:
            continue
        pairs = [view.dequantizer(tensor) for tensor in node.inputs[:2]]
        if any(one is None or one.codes != "int8" for one in pairs):
            continue
        total += 1
        shape = query.shape(node.inputs[1])
        sizes = [dim for dim in (shape or ())[:2] if isinstance(dim, int)]
        if node.attrs.get("group", 1) == 1 and any(size % WHOLE_VECTOR for size in sizes):
            odd.append((node, sizes))
    if odd:
        (node, sizes), several = odd[0], f"{len(odd)} of {total} int8 convolutions"
        why = f"{several} have channels that are no multiple of {WHOLE_VECTOR}, first {' and '.join(map(str, sizes))}"
        yield node.name, node.outputs[0].name, why


def _tiny_conv(node: Node, one: Quantizer) -> str | None:
    shape = query.shape(node.inputs[1])
    if shape is None or len(shape) < 3 or any(not isinstance(dim, int) for dim in shape):
        return None
    return (unfit(node, QuantSpec(kind="fp8")) if one.codes == FP8 else None) or slow_linear(node)


def _tiny_product(node: Node) -> str | None:
    data, weight, out = (query.shape(tensor) for tensor in (node.inputs[0], node.inputs[1], node.outputs[0]))
    if weight is None or len(weight) < 2:
        return None
    columns, depth = (weight[axis or 0] for axis in channel_axes(node.op, node.attrs, len(weight)))
    rows = _rows(out if out is not None else data)
    if rows == 1 or columns == 1:
        return f"a product of a matrix with one vector ({rows or '?'} x {depth} x {columns})"
    for name, size in (("columns", columns), ("rows", depth)):
        if isinstance(size, int) and size < FEW:
            return f"a weight of {size} {name}; fewer than {FEW} do not fill an integer kernel"
    return None


def _rows(shape: tuple[int | str | None, ...] | None) -> int | None:
    """Count the vectors that a product works on at once; None if a dimension is dynamic."""
    if shape is None or any(not isinstance(dim, int) for dim in shape[:-1]):
        return None
    return int(np.prod([dim for dim in shape[:-1] if isinstance(dim, int)], dtype=np.int64))


def foreign_ops(view: View) -> Iterator[Site]:
    """P14: Find pairs around ops of other domains."""
    for node in view.nodes:
        if (node.domain or "") in STANDARD_DOMAINS or node.op in QDQ or node.op.startswith("TRT_"):
            continue
        tensors = [tensor for tensor in node.inputs if view.dequantizer(tensor) is not None]
        tensors += [tensor for tensor in node.outputs if next(view.quantized_readers(tensor), None) is not None]
        if tensors:
            yield node.name, tensors[0].name, f"Q/DQ at {node.op} of the domain '{node.domain}'"


def _is_float(tensor: Tensor) -> bool:
    kind = query.dtype(tensor)
    return kind is None or "float" in str(kind)


def not_for_dla(view: View) -> Iterator[Site]:
    """P15: Report how much of a quantized model would stay float, which a DLA does not run."""
    if not view.quantizers:
        return
    total, plain = 0, []
    for node in view.nodes:
        if node.op not in PLAIN:
            continue
        computed = [tensor for tensor in node.inputs if _is_float(tensor) and not view.is_constant(tensor)]
        total += bool(computed)
        if any(view.dequantizer(tensor) is None for tensor in computed):
            plain.append(node)
    if plain:
        why = f"{len(plain)} of {total} ops read float tensors; a DLA in int8 needs Q/DQ on all of them"
        yield plain[0].name, plain[0].inputs[0].name, why
