"""Block-wise weights of 2, 4 or 8 bits dequantized inside the op: MatMulNBits, GatherBlockQuantized, QMoE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.backends.onnxruntime import backend as ort
from sbonnx.backends.onnxruntime.ort_nbits import MIN_BLOCK
from sbonnx.export.conversion import Codes, Converted, Product, dequantized, product
from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit, query
from sbonnx.graph.storage.weights import release_pages, spill_pieces
from sbonnx.linear.embedding import EmbeddingTable, table_of
from sbonnx.ops import CONTRIB, EMBEDDING, EXPERTS
from sbonnx.planning import BITS
from sbonnx.report import Reason, Refusal
from sbonnx.spec import AT_ONCE, Array

STEP: Final = "keep weights in blocks"

WIDTHS: Final = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
"""Quantized types that MatMulNBits supports, and their bits: 3 bits are stored in 4, 5 to 7 in 8."""

TWO: Final = 2
"""Bit width that newer runtimes have kernels for; older ones store it in 4 bits."""

FLOATS: Final = (np.dtype(np.float32), np.dtype(np.float16))


def convert(graph: Graph, *, accuracy_level: int = 4, levels: Mapping[str, int] | None = None) -> Converted:
    """Turn products of block-wise dequantized weights into MatMulNBits, Gathers into GatherBlockQuantized. In place.

    Mixtures of experts become QMoE.

    Codes that several nodes read, in any scope, are written once. A Gather and a product of one matrix share the B of
    MatMulNBits, which GatherBlockQuantized reads through a Reshape to (V, bytes of a row).

    Args:
        accuracy_level: compute type of the kernel; 0: chosen by the kernel, 1: float32, 2: float16, 3: bfloat16, 4:
            int8, with the activations rounded to int8 per block.
        levels: other levels by the name of the product's node.

    Source: onnxruntime, contrib operators, MatMulNBits, GatherBlockQuantized and QMoE.
    """
    refusals: list[Refusal] = []
    products: list[tuple[Body, Product]] = []
    tables: list[tuple[Body, EmbeddingTable, Codes]] = []
    experts: list[tuple[Body, Node, tuple[Codes, Codes]]] = []
    for _, body in query.scopes(graph):
        for node in body.nodes:
            if node.op in EXPERTS:
                weights = _experts(node)
                if isinstance(weights, Reason):
                    refusals.append(Refusal(STEP, node.name, weights))
                elif weights is not None:
                    experts.append((body, node, weights))
                continue
            candidate = _table(node) if node.op in EMBEDDING else product(node)
            if isinstance(candidate, Product):
                candidate = _obstacle(candidate) or candidate
            if isinstance(candidate, Reason):
                refusals.append(Refusal(STEP, node.name, candidate))
            elif isinstance(candidate, Product):
                products.append((body, candidate))
            elif candidate is not None:
                tables.append((body, *candidate))
    writer = _BlockWriter(edit.Names(graph), accuracy_level, levels or {})
    for body, block_product in products:
        writer.product(block_product, body)
        release_pages()
    for body, table, codes in tables:
        writer.table(table, codes, body)
        release_pages()
    for body, node, weights in experts:
        writer.experts(node, weights, body)
        release_pages()
    edit.sweep(graph)
    edit.sort(graph)
    return Converted(writer.done, tuple(refusals))


def _obstacle(found: Product) -> Reason | None:
    """Return the reason why MatMulNBits cannot compute a product, or None."""
    codes = found.codes
    if codes.block is None or codes.axis != found.sum_axis:
        return Reason("scales-not-in-blocks", "MatMulNBits takes scales of blocks along the summed axis")
    if codes.scale.dtype not in FLOATS:
        return Reason(
            "type-not-supported", f"MatMulNBits takes float32 and float16, '{codes.tensor.name}' is {codes.scale.dtype}"
        )
    return _odd_block(codes)


def _odd_block(codes: Codes) -> Reason | None:
    block = codes.block or 0
    if block < MIN_BLOCK or block & (block - 1):
        return Reason(
            "block-or-width-not-supported",
            f"onnxruntime's kernels take blocks of a power of two from {MIN_BLOCK} up, these are of {block}",
        )
    if str(codes.zero.dtype) not in WIDTHS:
        return Reason(
            "block-or-width-not-supported",
            f"onnxruntime's kernels take codes of 4 and 8 bits, these are {codes.zero.dtype}",
        )
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


def packed_rows(codes: Array, bits: int) -> Array:
    """Return codes (V, H) as bytes, (V, ceil(H * bits / 8)), mapped from a scratch file if they are large."""
    count, length = codes.shape

    def pieces() -> Iterator[Array]:
        step = max(1, AT_ONCE // max(1, length))
        for start in range(0, count, step):
            yield np.ascontiguousarray(pack(unsigned(codes[start : start + step], bits), bits))
            release_pages()

    return spill_pieces(pieces(), (count, -(-length * bits // 8)))


def unsigned(codes: Array, bits: int) -> Array:
    """Convert codes or zero points to MatMulNBits' form: uint8, with signed values shifted to start at 0."""
    offset = 0 if str(codes.dtype).startswith("u") else 1 << (bits - 1)
    return np.asarray((codes.astype(np.int16) + offset).astype(np.uint8))


def blocked(
    codes: Array, scale: Array, zero: Array, *, block: int, bits: int | None = None
) -> tuple[Array, Array, Array]:
    """Compute B, scales and zero points of MatMulNBits.

        B[n, b, i] = codes[b * block + i, n] + offset, packed into bytes; beyond K the zero point

    Args:
        codes: (K, N), int4, uint4, int8 or uint8.
        scale, zero: (ceil(K / block), N).
        bits: storage bits of a code; None: those of its type.

    Returns:
        B: uint8, (N, blocks, block * bits / 8), mapped from a scratch file if it is large. scales: (N, blocks). zero
        points: uint8, (N, ceil(blocks * bits / 8)), also where they are the operator's default, which differed between
        its kernels.
    """
    bits = WIDTHS[str(zero.dtype)] if bits is None else bits
    summed, width = codes.shape
    count = scale.shape[0]
    zeros = np.ascontiguousarray(unsigned(zero, bits).T)

    def pieces() -> Iterator[Array]:
        step = max(1, AT_ONCE // max(1, summed))
        for start in range(0, width, step):
            part = slice(start, start + step)
            rows = np.repeat(zeros[part], block, axis=1)
            rows[:, :summed] = unsigned(codes[:, part], bits).T
            yield pack(rows.reshape(-1, count, block), bits)
            release_pages()

    packed = spill_pieces(pieces(), (width, count, block * bits // 8))
    return packed, np.ascontiguousarray(scale.T), pack(zeros, bits)


@dataclass(frozen=True)
class _Stored:
    """Constants of one weight as MatMulNBits reads it.

    Attributes:
        blocks: B, uint8, (N, blocks, bytes of a block).
        scales: (N, blocks).
        zeros: uint8, (N, bytes of a row).
    """

    blocks: Tensor
    scales: Tensor
    zeros: Tensor


@dataclass
class _BlockWriter:
    """State of one conversion.

    Attributes:
        names: used names.
        accuracy_level, levels: see `convert`.
        done: number of created nodes by op type.
        stored: constants by the DequantizeLinear that they replace, and the factor of the product.
        biases: constants by the bias that they replace, and its factor.
        tables: constants by the DequantizeLinear that they replace, and whether its matrix was transposed.
    """

    names: edit.Names
    accuracy_level: int
    levels: Mapping[str, int]
    done: Counter[str] = field(default_factory=Counter)
    stored: dict[tuple[int, float], _Stored] = field(default_factory=dict)
    biases: dict[tuple[int, float], Tensor] = field(default_factory=dict)
    tables: dict[tuple[int, bool], list[Tensor]] = field(default_factory=dict)

    def constants(self, found: Product, body: Body) -> _Stored:
        """Return the constants of a product's weight, written once for all products that read it."""
        codes = found.codes
        key = (id(codes.node), found.alpha)
        if key not in self.stored:
            integers, scale, zero = found.matrix()
            packed, scales, zeros = blocked(integers, scale, zero, block=codes.block or 0, bits=_held(codes))
            stem = codes.tensor.name
            self.stored[key] = _Stored(
                edit.add_constant(body, f"{stem}_blocks", packed, self.names),
                edit.add_constant(body, f"{stem}_scales", scales.astype(codes.scale.dtype), self.names),
                edit.add_constant(body, f"{stem}_zero_points", zeros, self.names),
            )
        return self.stored[key]

    def product(self, found: Product, body: Body) -> None:
        """Replace one MatMul or Gemm. In place; its output keeps its name."""
        node, codes, names = found.node, found.codes, self.names
        kind: Any = codes.scale.dtype  # that of the input, even where shape inference does not know it
        stored = self.constants(found, body)
        inputs: list[Tensor] = [found.data, stored.blocks, stored.scales, stored.zeros]
        if found.bias is not None:
            inputs += [Variable.empty(), self.bias(found, found.bias.astype(kind), body)]
        width, summed = codes.tensor.shape if found.turned else codes.tensor.shape[::-1]
        attrs = {
            "K": int(summed),
            "N": int(width),
            "bits": _held(codes),
            "block_size": int(codes.block or 0),
            "accuracy_level": self.levels.get(node.name, self.accuracy_level),
        }
        output = node.outputs[0]
        edit.replace_output(node, 0, Variable(names.fresh(f"{node.name}_dequantized"), kind))
        product_of = output
        if found.addend is not None:
            product_of = Variable(names.fresh(f"{node.name}_product"), kind, output.shape)
        self._add(body, "MatMulNBits", inputs, stem=node.name, attrs=attrs, output=product_of)
        if found.addend is not None:
            terms = [product_of, found.addend]
            edit.add_node(body, "Add", terms, names=names, stem=f"{node.name}_Add", outputs=[output])

    def bias(self, found: Product, values: Array, body: Body) -> Tensor:
        """Return the constant of a product's bias, written once for all products that read it with one factor."""
        key = (id(found.node.inputs[2]), float(found.node.attrs.get("beta", 1.0)))
        if key not in self.biases:
            self.biases[key] = edit.add_constant(body, f"{found.node.name}_bias", values, self.names)
        return self.biases[key]

    def rows(self, table: EmbeddingTable, codes: Codes, body: Body) -> list[Tensor]:
        """Return data, scales and zero points of a table that no product shares, written once for all its Gathers."""
        key = (id(codes.node), table.turned)
        if key not in self.tables:
            bits, stem = _held(codes), codes.tensor.name
            values, scale, zero = np.asarray(codes.values), codes.scale, codes.zero
            if table.turned:
                values, scale, zero = values.T, scale.T, zero.T
            packed, zeros = packed_rows(values, bits), pack(unsigned(zero, bits), bits)
            arrays = {"blocks": packed, "scales": scale, "zero_points": zeros}
            self.tables[key] = [
                edit.add_constant(body, f"{stem}_{name}", np.ascontiguousarray(array), self.names)
                for name, array in arrays.items()
            ]
        return self.tables[key]

    def table(self, table: EmbeddingTable, codes: Codes, body: Body) -> None:
        """Replace one Gather of rows. In place; its output keeps its name."""
        node, bits, stem = table.gather, _held(codes), codes.tensor.name
        shared = self.stored.get((id(codes.node), 1.0))
        sizes = codes.tensor.shape
        length = sizes[table.row_axis]
        if shared is not None and length % (codes.block or 1) == 0:
            shape = np.asarray([sizes[1 - table.row_axis], length * bits // 8], np.int64)
            rows = Variable(self.names.fresh(f"{stem}_rows"), np.dtype(np.uint8), tuple(shape.tolist()))
            reshaped = [shared.blocks, edit.add_constant(body, f"{stem}_rows_shape", shape, self.names)]
            edit.add_node(body, "Reshape", reshaped, names=self.names, stem=f"{stem}_Reshape", outputs=[rows])
            data: list[Tensor] = [rows, shared.scales, shared.zeros]
        else:
            data = self.rows(table, codes, body)
        attrs = {"gather_axis": 0, "quantize_axis": 1, "block_size": int(codes.block or 0), "bits": bits}
        output = node.outputs[0]
        edit.replace_output(node, 0, Variable(self.names.fresh(f"{node.name}_dequantized"), output.dtype))
        inputs = [data[0], node.inputs[1], *data[1:]]
        self._add(body, "GatherBlockQuantized", inputs, stem=node.name, attrs=attrs, output=output)

    def experts(self, node: Node, weights: tuple[Codes, Codes], body: Body) -> None:
        """Replace one MoE. In place; its output keeps its name."""
        inputs = [*node.inputs, *(Variable.empty() for _ in range(6 - len(node.inputs)))]
        stored: list[list[Tensor]] = []
        for codes in weights:
            count, width, length = codes.tensor.shape
            bits, stem = _held(codes), codes.tensor.name
            packed = packed_rows(np.asarray(codes.values).reshape(count * width, length), bits)
            zeros = pack(unsigned(codes.zero, bits), bits)
            arrays = {"rows": packed.reshape(count, width, -1), "scales": codes.scale, "zero_points": zeros}
            stored.append(
                [edit.add_constant(body, f"{stem}_{name}", array, self.names) for name, array in arrays.items()]
            )
        (first, first_scales, first_zeros), (second, second_scales, second_zeros) = stored
        kept = [Variable.empty() for _ in range(3)]
        projections = [first, first_scales, inputs[3], second, second_scales, inputs[5], *kept]
        widths = [_held(codes) for codes in weights]
        attrs = {
            **node.attrs,
            "expert_weight_bits": widths[0],
            "fc2_expert_weight_bits": widths[1],
            "block_size": int(weights[0].block or 0),
            "accuracy_level": self.levels.get(node.name, self.accuracy_level),
        }
        output = node.outputs[0]
        edit.replace_output(node, 0, Variable(self.names.fresh(f"{node.name}_dequantized"), output.dtype))
        every = [*inputs[:2], *projections, first_zeros, second_zeros]
        self._add(body, "QMoE", every, stem=node.name, attrs=attrs, output=output)

    def _add(
        self, body: Body, op: str, inputs: list[Tensor], *, stem: str, attrs: Mapping[str, Any], output: Tensor
    ) -> None:
        added = edit.add_node(body, op, inputs, names=self.names, stem=f"{stem}_{op}", attrs=attrs, outputs=[output])
        added.domain = CONTRIB
        self.done[op] += 1


def _experts(node: Node) -> tuple[Codes, Codes] | Reason | None:
    """Return the quantized weights of both projections of a MoE, or the reason against it; None for float ones."""
    weights = [dequantized(tensor) for index in EXPERTS[node.op] if (tensor := query.optional_input(node, index))]
    quantized = [codes for codes in weights if codes is not None]
    if not quantized:
        return None
    if len(quantized) != 2 or len(weights) != 2 or any(codes.shape is None or codes.axis != 2 for codes in quantized):
        return Reason("scales-not-in-blocks", "QMoE takes two weights, both with blocks along the summed axis")
    if not ort.has_experts():
        return Reason("no-integer-kernel", "QMoE needs a newer onnxruntime")
    first, second = quantized
    if first.block != second.block:
        return Reason("scales-not-in-blocks", "QMoE takes blocks of one size")
    return _odd_block(first) or _odd_block(second) or (first, second)


def _table(node: Node) -> tuple[EmbeddingTable, Codes] | Reason | None:
    """Return the quantized table whose rows a Gather reads, or the reason against it; None for other Gathers."""
    table = table_of(node)
    codes = dequantized(node.inputs[0] if table is None else table.matrix)
    if codes is None or codes.shape is None or codes.block is None:
        return None
    if table is None or len(codes.shape) != 2 or codes.axis != table.row_axis:
        return Reason("scales-not-in-blocks", "GatherBlockQuantized reads rows of a matrix with blocks along them")
    if codes.scale.dtype not in FLOATS:
        return Reason("type-not-supported", f"GatherBlockQuantized gives float32 and float16, not {codes.scale.dtype}")
    odd = _odd_block(codes)
    count = 8 // _held(codes) if odd is None else 1
    length = codes.shape[table.row_axis]
    if length % count:
        return Reason("rows-share-bytes", f"its rows have {length} values, and {count} codes share a byte")
    if odd is None and count == 2 and length // codes.block % count:
        return Reason(
            "rows-misread",
            f"its rows have {length // codes.block} blocks: onnxruntime before 1.27 misreads their zero points",
        )
    return odd or (table, codes)
