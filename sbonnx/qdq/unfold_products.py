"""Conversion of integer products whose scaling is in the surrounding nodes: dynamic quantization, MatMulNBits."""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

from sbonnx.graph import Body, Node, Tensor, edit, query
from sbonnx.ops import MULTIPLIES
from sbonnx.qdq import layouts
from sbonnx.qdq.unfolder import Unfolder, optional
from sbonnx.qdq.values import Numbers
from sbonnx.spec import Array

DYNAMIC: Final = "DynamicQuantizeLinear"

BLOCKS_SINCE: Final = 21
"""First opset whose DequantizeLinear supports blocks."""


def rewrite(work: Unfolder, body: Body, node: Node) -> str | None:
    """Rewrite one product as a float product of a dequantized weight. In place; return a reason on failure."""
    if node.op in layouts.PRODUCTS:
        return _scaled_later(work, body, node)
    if node.op in layouts.WITH_FLOAT_INPUT:
        return _with_float(work, body, node)
    if node.op == layouts.BLOCKED:
        return _blocked(work, body, node)
    return f"{node.op} has no single float operator"


def _float_input(codes: Tensor) -> Tensor | None:
    """Return the float input of the DynamicQuantizeLinear that writes `codes`, or None."""
    maker = query.producer(codes)
    if maker is None or maker.op != DYNAMIC or maker.outputs[0] is not codes:
        return None
    found: Tensor = maker.inputs[0]
    return found


def _scaled_later(work: Unfolder, body: Body, node: Node) -> str | None:
    """Rewrite ``Cast(MatMulInteger(DynamicQuantizeLinear(x), w)) * (sx * sw)`` as MatMul of x and DQ(w)."""
    x = _float_input(node.inputs[0])
    if x is None:
        return "its activation does not come from a DynamicQuantizeLinear"
    found = _scaling(node)
    if found is None:
        return "no Cast and Mul with the scales follow it"
    multiply, other = found
    scale = _weight_scale(other, node.inputs[0].inputs[0].outputs[1])
    if scale is None:
        return "the scale of its weight is computed"
    kind = query.dtype(x) or np.dtype(np.float32)
    values = scale.reshape(-1) if scale.size > 1 else scale.reshape(())
    stored = edit.add_constant(work.graph, f"{node.name}_weight_scale", values.astype(kind), work.names)
    axis = 0 if node.op == "ConvInteger" else -1
    weight = work.dequantize(body, node.inputs[1], stored, _zero(work, node, values), axis)
    made = Node(layouts.PRODUCTS[node.op], node.name, dict(node.attrs), [x, weight], [])
    body.nodes.append(made)
    result = work.variable(f"{multiply.outputs[0].name}_float", kind, query.shape(multiply.outputs[0]))
    made.outputs.append(result)
    edit.replace_all_uses(multiply.outputs[0], result, graph=body)
    return None


def _zero(work: Unfolder, node: Node, scale: Array) -> Tensor | None:
    """Return the weight's zero point in the shape of its scale."""
    zero = optional(node, 3)
    value = query.constant(zero)
    if zero is None or value is None or value.shape == scale.shape:
        return zero
    shaped = np.broadcast_to(value.reshape(-1) if value.size > 1 else value.reshape(()), scale.shape)
    return edit.add_constant(work.graph, f"{node.name}_weight_zero_point", np.array(shaped), work.names)


def _scaling(node: Node) -> tuple[Node, Tensor] | None:
    """Return the Mul that scales the int32 products to floats, and its other factor."""
    readers = query.readers(node.outputs[0])
    if len(readers) != 1 or readers[0][0].op != "Cast":
        return None
    readers = query.readers(readers[0][0].outputs[0])
    if len(readers) != 1 or readers[0][0].op not in MULTIPLIES:
        return None
    multiply, index = readers[0]
    return multiply, multiply.inputs[1 - index]


def _weight_scale(factor: Tensor, sx: Tensor) -> Array | None:
    """Return the constant sw in ``sx * sw``; 1 if the factor is sx alone."""
    if factor is sx:
        return np.ones((), np.float32)
    maker = query.producer(factor)
    if maker is None or maker.op not in MULTIPLIES or not any(one is sx for one in maker.inputs):
        return None
    others = [one for one in maker.inputs if one is not sx]
    return query.constant(others[0]) if others else None


def _with_float(work: Unfolder, body: Body, node: Node) -> str | None:
    """Rewrite onnxruntime's fused forms, whose activation is float or comes from a DynamicQuantizeLinear."""
    weight, scale, zero, bias = layouts.WITH_FLOAT_INPUT[node.op]
    x = node.inputs[0] if node.op == layouts.READS_FLOATS else _float_input(node.inputs[0])
    if x is None:
        return "its activation does not come from a DynamicQuantizeLinear"
    factor = work.dequantize(body, node.inputs[weight], node.inputs[scale], optional(node, zero), -1)
    _product(work, body, node, [x, factor], optional(node, bias))
    return None


def _product(work: Unfolder, body: Body, node: Node, inputs: list[Tensor], bias: Tensor | None) -> None:
    """Replace `node` by a MatMul, followed by an Add if it has a bias."""
    if bias is None:
        made = Node("MatMul", node.name, {}, inputs, [])
        body.nodes.append(made)
        work.take_output(node, made)
        return
    output = node.outputs[0]
    product = work.variable(f"{output.name}_product", query.dtype(output), query.shape(output))
    body.nodes.append(Node("MatMul", node.name, {}, inputs, [product]))
    made = Node("Add", work.names.fresh(f"{node.name}_bias"), {}, [product, bias], [])
    body.nodes.append(made)
    work.take_output(node, made)


def _blocked(work: Unfolder, body: Body, node: Node) -> str | None:
    """Rewrite a MatMulNBits: codes in blocks along the reduction axis, packed from the lowest bits of each byte."""
    if optional(node, 4) is not None:
        return "its rows are in another order (g_idx)"
    bits, block = int(node.attrs["bits"]), int(node.attrs["block_size"])
    rows, columns = int(node.attrs["K"]), int(node.attrs["N"])
    packed, scales = (query.constant(node.inputs[at]) for at in (1, 2))
    zeros = query.constant(optional(node, 3)) if optional(node, 3) is not None else None
    if packed is None or scales is None or bits not in (2, 4, 8) or (optional(node, 3) is not None and zeros is None):
        return "its weight is computed, or not of 2, 4 or 8 bits"
    if zeros is not None and zeros.dtype != np.uint8:
        return "its zero points are floats"
    found = unpacked(packed, scales, zeros, (rows, columns, bits, block))
    codes, numbers = found
    stem = str(node.inputs[1].name)
    if work.graph.opset < BLOCKS_SINCE:
        weight: Tensor = edit.add_constant(work.graph, f"{stem}_float", numbers.dequantize(codes), work.names)
    else:
        stored = edit.add_constant(work.graph, f"{stem}_quantized", codes, work.names)
        scale = edit.add_constant(work.graph, f"{stem}_scale", numbers.scale, work.names)
        zero = edit.add_constant(work.graph, f"{stem}_zero_point", numbers.zero, work.names)
        weight = work.dequantize(body, stored, scale, zero, 0, block)
    _product(work, body, node, [node.inputs[0], weight], optional(node, 5))
    return None


def unpacked(
    packed: Array, scales: Array, zeros: Array | None, sizes: tuple[int, int, int, int]
) -> tuple[Array, Numbers]:
    """Unpack the weight of a MatMulNBits to codes (K, N) and their parameters, with scales of shape (blocks, N).

    If all zero points are in the middle, codes become signed with zero point 0.

    Args:
        sizes: K, N, bits and block size.
    """
    rows, columns, bits, block = sizes
    blocks = -(-rows // block)
    codes = _bits(packed.reshape(columns, -1), bits)[:, : blocks * block][:, :rows].T
    scale = scales.reshape(columns, blocks).T
    middle = 1 << (bits - 1)
    if zeros is None:
        zero = np.full(scale.shape, middle, np.uint8)
    elif zeros.size == columns * blocks and bits == 8:
        zero = zeros.reshape(columns, blocks).T
    else:
        zero = _bits(zeros.reshape(columns, -1), bits)[:, :blocks].T
    unsigned, signed = (np.uint8, np.int8) if bits == 8 else (ml_dtypes.uint4, ml_dtypes.int4)
    if (zero == middle).all():
        codes, zero = codes.astype(np.int16) - middle, np.zeros(scale.shape, np.int16)
        unsigned = signed
    numbers = Numbers(np.ascontiguousarray(scale), np.ascontiguousarray(zero).astype(unsigned), 0, block)
    return np.ascontiguousarray(codes).astype(unsigned), numbers


def _bits(packed: Array, bits: int) -> Array:
    """Unpack bytes (N, B) to codes: two per byte for 4 bits, four for 2 bits, lowest bits first."""
    if bits == 8:
        return packed
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.asarray((packed[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(packed.shape[0], -1))
