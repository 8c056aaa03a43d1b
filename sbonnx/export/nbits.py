"""Block-wise weights of 2, 4 or 8 bits dequantized inside the op: MatMulNBits, and GatherBlockQuantized for tables."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np

from sbonnx.backends.onnxruntime import backend as ort
from sbonnx.export.conversion import CONTRIB, Codes, Converted, Product, dequantized, product
from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import EMBEDDING
from sbonnx.plan import BITS
from sbonnx.report import Refusal
from sbonnx.spec import Array

STEP: Final = "keep weights in blocks"

MIN_BLOCK: Final = 16
"""Smallest block size of onnxruntime's kernels; block sizes are powers of two."""

WIDTHS: Final = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
"""Quantized types that MatMulNBits supports, and their bits: 3 bits are stored in 4, 5 to 7 in 8."""

TWO: Final = 2
"""Bit width that newer runtimes have kernels for; older ones store it in 4 bits."""

FLOATS: Final = (np.dtype(np.float32), np.dtype(np.float16))


def convert(graph: Graph, *, accuracy_level: int = 4) -> Converted:
    """Turn every product of a block-wise dequantized weight into one MatMulNBits. In place.

    Args:
        accuracy_level: compute type of the kernel; 0: chosen by the kernel, 1: float32, 2: float16, 3: bfloat16, 4:
            int8, with the activations rounded to int8 per block.

    Source: onnxruntime, contrib operators, MatMulNBits and GatherBlockQuantized.
    """
    names = edit.Names(graph)
    done: Counter[str] = Counter()
    refusals: list[Refusal] = []
    for _, body in list(query.scopes(graph)):
        for node in list(body.nodes):
            found = _table(node) if node.op in EMBEDDING else product(node)
            if isinstance(found, Product):
                found = _obstacle(found) or found
            if isinstance(found, str):
                refusals.append(Refusal(STEP, node.name, found))
            elif isinstance(found, Product):
                _write_product(found, body, names, accuracy_level, _held(found.codes))
                done["MatMulNBits"] += 1
            elif found is not None:
                _write_table(node, found, body, names, _held(found))
                done["GatherBlockQuantized"] += 1
    edit.sweep(graph)
    edit.sort(graph)
    return Converted(done, tuple(refusals))


def _obstacle(found: Product) -> str | None:
    """Return the reason why MatMulNBits cannot compute a product, or None."""
    codes = found.codes
    if codes.block is None or codes.axis != found.sum_axis:
        return "MatMulNBits takes scales of blocks along the summed axis"
    if query.dtype(found.data) not in FLOATS:
        return f"MatMulNBits takes float32 and float16, '{found.data.name}' is {query.dtype(found.data)}"
    return _odd_block(codes)


def _odd_block(codes: Codes) -> str | None:
    block = codes.block or 0
    if block < MIN_BLOCK or block & (block - 1):
        return f"onnxruntime's kernels take blocks of a power of two from {MIN_BLOCK} up, these are of {block}"
    if str(codes.zero.dtype) not in WIDTHS:
        return f"onnxruntime's kernels take codes of 4 and 8 bits, these are {codes.zero.dtype}"
    return None


def _held(codes: Codes) -> int:
    """Return the storage bits of a weight's codes: 2 if the weight has 2 bits and onnxruntime has a kernel."""
    bits = WIDTHS[str(codes.zero.dtype)]
    return TWO if codes.node.attrs.get(BITS, bits) == TWO and ort.has_two_bits() else bits


def pack(codes: Array, bits: int) -> Array:
    """Pack unsigned codes of 2, 4 or 8 bits into bytes along the last axis, lowest bits first.

    Args:
        codes: uint8, (..., L), each below 2 ** bits.

    Returns:
        uint8, (..., L) for 8 bits, else (..., ceil(L * bits / 8)); padding bits are 0.
    """
    if bits == 8:
        return codes
    count = 8 // bits
    missing = -codes.shape[-1] % count
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)]) if missing else codes
    packed = padded[..., 0::count].copy()
    for at in range(1, count):
        packed |= padded[..., at::count] << np.uint8(bits * at)
    return np.asarray(packed, np.uint8)


def unsigned(codes: Array, bits: int) -> Array:
    """Convert codes or zero points to MatMulNBits' form: uint8, with signed values shifted to start at 0."""
    offset = 0 if str(codes.dtype).startswith("u") else 1 << (bits - 1)
    return np.asarray((codes.astype(np.int16) + offset).astype(np.uint8))


def blocked(
    codes: Array, scale: Array, zero: Array, *, block: int, bits: int | None = None
) -> tuple[Array, Array, Array | None]:
    """Compute B, scales and zero points of MatMulNBits.

        B[n, b, i] = codes[b * block + i, n] + offset, packed into bytes; beyond K the zero point

    Args:
        codes: (K, N), int4, uint4, int8 or uint8.
        scale, zero: (ceil(K / block), N).
        bits: storage bits of a code; None: those of its type.

    Returns:
        B: uint8, (N, blocks, block * bits / 8). scales: (N, blocks). zero points: uint8,
        (N, ceil(blocks * bits / 8)); None if all are 2 ** (bits - 1), the operator's default.
    """
    bits = WIDTHS[str(zero.dtype)] if bits is None else bits
    summed, width = codes.shape
    count = scale.shape[0]
    zeros = np.ascontiguousarray(unsigned(zero, bits).T)
    rows = np.repeat(zeros, block, axis=1)
    rows[:, :summed] = unsigned(codes, bits).T
    packed = pack(rows.reshape(width, count, block), bits)
    central = bool((zeros == 1 << (bits - 1)).all())
    return packed, np.ascontiguousarray(scale.T), None if central else pack(zeros, bits)


def _write_product(found: Product, body: Body, names: edit.Names, accuracy_level: int, bits: int) -> None:
    """Replace one MatMul or Gemm. In place; its output keeps its name."""
    node, codes = found.node, found.codes
    integers, scale, zero = found.matrix()
    kind: Any = query.dtype(found.data)
    packed, scales, zeros = blocked(integers, scale, zero, block=codes.block or 0, bits=bits)
    stem = codes.tensor.name
    inputs: list[Tensor] = [
        found.data,
        edit.add_constant(body, f"{stem}_blocks", packed, names),
        edit.add_constant(body, f"{stem}_scales", scales.astype(kind), names),
    ]
    empty = Variable.empty()
    inputs.append(empty if zeros is None else edit.add_constant(body, f"{stem}_zero_points", zeros, names))
    if found.bias is not None:
        inputs += [empty, edit.add_constant(body, f"{node.name}_bias", found.bias.astype(kind), names)]
    while inputs[-1].is_empty():
        inputs.pop()
    attrs = {
        "K": int(integers.shape[0]),
        "N": int(integers.shape[1]),
        "bits": bits,
        "block_size": int(codes.block or 0),
        "accuracy_level": accuracy_level,
    }
    output = node.outputs[0]
    edit.replace_output(node, 0, Variable(names.fresh(f"{node.name}_dequantized"), kind))
    product_of = output if found.addend is None else Variable(names.fresh(f"{node.name}_product"), kind, output.shape)
    stem = f"{node.name}_MatMulNBits"
    made = edit.add_node(body, "MatMulNBits", inputs, names=names, stem=stem, attrs=attrs, outputs=[product_of])
    made.domain = CONTRIB
    if found.addend is not None:
        terms = [product_of, found.addend]
        edit.add_node(body, "Add", terms, names=names, stem=f"{node.name}_Add", outputs=[output])


def _table(node: Node) -> Codes | str | None:
    """Return the quantized table whose rows a Gather reads, or the reason against it; None for other Gathers."""
    codes = dequantized(node.inputs[0])
    if codes is None or codes.values is None or codes.block is None:
        return None
    if codes.values.ndim != 2 or codes.axis != 1 or node.attrs.get("axis", 0) != 0:
        return "GatherBlockQuantized reads rows of a matrix with blocks along them"
    if query.dtype(node.outputs[0]) not in FLOATS:
        return f"GatherBlockQuantized gives float32 and float16, not {query.dtype(node.outputs[0])}"
    odd = _odd_block(codes)
    count = 8 // _held(codes) if odd is None else 1
    if codes.values.shape[1] % count:
        return f"its rows have {codes.values.shape[1]} values, and {count} codes share a byte"
    return odd or codes


def _write_table(node: Node, codes: Codes, body: Body, names: edit.Names, bits: int) -> None:
    """Replace one Gather of rows. In place; its output keeps its name."""
    values, zero = (pack(unsigned(part, bits), bits) for part in (np.asarray(codes.values), codes.zero))
    stem = codes.tensor.name
    inputs = [
        edit.add_constant(body, f"{stem}_blocks", values, names),
        node.inputs[1],
        edit.add_constant(body, f"{stem}_scales", codes.scale, names),
        edit.add_constant(body, f"{stem}_zero_points", zero, names),
    ]
    attrs = {"gather_axis": 0, "quantize_axis": 1, "block_size": int(codes.block or 0), "bits": bits}
    output = node.outputs[0]
    edit.replace_output(node, 0, Variable(names.fresh(f"{node.name}_dequantized"), output.dtype))
    stem = f"{node.name}_GatherBlockQuantized"
    made = edit.add_node(body, "GatherBlockQuantized", inputs, names=names, stem=stem, attrs=attrs, outputs=[output])
    made.domain = CONTRIB
