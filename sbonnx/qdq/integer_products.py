"""Operands of integer operators as Q/DQ pairs, and products whose scaling is in the surrounding nodes.

The input layouts of the operators of ONNX and onnxruntime, the builder that adds Q/DQ nodes without duplicates, and the
conversion of dynamic quantization (MatMulInteger, ConvInteger) and MatMulNBits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import DYNAMIC_LSTM, MULTIPLIES
from sbonnx.qdq.arithmetic import QDQParams
from sbonnx.report import Fired, Reason, Refusal
from sbonnx.spec import Array


@dataclass(frozen=True)
class IntegerOperator:
    """Input layout of one integer operator, and the float operator that it computes.

    Attributes:
        op: the float operator.
        data: input indices of (codes, scale, zero point) of each operand.
        out: input index of the output's scale; its zero point follows.
        bias: input index of the int32 bias, whose scale is the product of the operands' scales, or None.
        axes: axis of each operand along which a vector of scales runs.
        passed: inputs that the float operator takes unchanged, before the operands.
        drop: attributes that the float operator does not have.
    """

    op: str
    data: tuple[tuple[int, int, int], ...]
    out: int
    bias: int | None = None
    axes: tuple[int, ...] = (-2, -1)
    passed: tuple[int, ...] = ()
    drop: tuple[str, ...] = ()


_ONE: Final = ((0, 1, 2),)
_TWO: Final = ((0, 1, 2), (3, 4, 5))

OPERATORS: Final[dict[str, IntegerOperator]] = {
    "QLinearConv": IntegerOperator("Conv", _TWO, 6, bias=8, axes=(0, 0)),
    "QLinearMatMul": IntegerOperator("MatMul", _TWO, 6),
    "QGemm": IntegerOperator("Gemm", _TWO, 7, bias=6),
    "QLinearAdd": IntegerOperator("Add", _TWO, 6),
    "QLinearMul": IntegerOperator("Mul", _TWO, 6),
    "QLinearWhere": IntegerOperator("Where", ((1, 2, 3), (4, 5, 6)), 7, passed=(0,)),
    "QLinearLeakyRelu": IntegerOperator("LeakyRelu", _ONE, 3),
    "QLinearSigmoid": IntegerOperator("Sigmoid", _ONE, 3),
    "QLinearSoftmax": IntegerOperator("Softmax", _ONE, 3, drop=("opset",)),
    "QLinearAveragePool": IntegerOperator("AveragePool", _ONE, 3, drop=("channels_last",)),
    "QLinearGlobalAveragePool": IntegerOperator("GlobalAveragePool", _ONE, 3, drop=("channels_last",)),
}
"""Operators with a fixed number of operands; QLinearConcat has any number, integer products have no output scale."""

CONCAT: Final = "QLinearConcat"

PRODUCTS: Final = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
"""Products whose int32 results are scaled by a Cast and a Mul afterwards: dynamic quantization."""

READS_FLOATS: Final = "DynamicQuantizeMatMul"

WITH_FLOAT_INPUT: Final = {READS_FLOATS: (1, 2, 3, 4), "MatMulIntegerToFloat": (1, 3, 5, 6)}
"""Input indices of the weight, its scale, its zero point and the bias."""

BLOCKED: Final = "MatMulNBits"

BLOCKED_TABLE: Final = "GatherBlockQuantized"

UNKNOWN: Final = frozenset({"QLinearReduceMean", "QAttention", "QEmbedLayerNormalization", "NhwcMaxPool", "QMoE"})
"""Known integer operators that are not rewritten: no kernel to check against, or no single float operator."""


CONTRIBUTED: Final = (
    (OPERATORS.keys() | WITH_FLOAT_INPUT.keys() | UNKNOWN | {CONCAT, BLOCKED, BLOCKED_TABLE, DYNAMIC_LSTM})
    - {"QLinearConv", "QLinearMatMul"}
)  # fmt: skip
"""Integer operators of onnxruntime's own domain."""


WHAT: Final = "write with Q/DQ"
"""Name of the step in refusals."""


class Unfolder:
    """State of one conversion: names, created pairs, converted operators and refusals."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = edit.Names(graph)
        self.fired: list[Fired] = []
        self.refusals: list[Refusal] = []
        self._made: dict[tuple[int, ...], Tensor] = {}
        self._products: dict[tuple[int, ...], Tensor] = {}

    # --- building blocks ----------------------------------------------------------------------------------------------

    def dequantize(
        self, body: Body, codes: Tensor, scale: Tensor, zero: Tensor | None, axis: int | None, block: int = 0
    ) -> Tensor:
        """Add a DequantizeLinear, or reuse one with the same codes and parameters, and return its output."""
        key = (id(body), id(codes), id(scale), -1 if zero is None else id(zero))
        if key not in self._made:
            inputs = [codes, self.scalar(scale), *([] if zero is None else [self.scalar(zero)])]
            out = self.variable(f"{codes.name}_DequantizeLinear_Output", query.dtype(scale), query.shape(codes))
            attrs, shape, rank = {"block_size": block} if block else {}, query.shape(scale), query.rank(codes)
            if shape and axis is not None and not all(dim == 1 for dim in shape):
                attrs = {"axis": axis if axis >= 0 or rank is None else axis + rank, **attrs}
            name = self.names.fresh(f"{codes.name}_DequantizeLinear")
            body.nodes.append(Node("DequantizeLinear", name, attrs, inputs, [out]))
            self._made[key] = out
        return self._made[key]

    def quantize(self, body: Body, node: Node, floats: Tensor, scale: Tensor, zero: Tensor | None) -> None:
        """Add a QuantizeLinear that computes the first output of `node` from floats."""
        inputs = [floats, self.scalar(scale), *([] if zero is None else [self.scalar(zero)])]
        quantize_node = Node("QuantizeLinear", self.names.fresh(f"{node.name}_QuantizeLinear"), {}, inputs, [])
        body.nodes.append(quantize_node)
        self.take_output(node, quantize_node)

    def take_output(self, node: Node, made: Node) -> None:
        """Move the first output of `node` to `made`."""
        output = node.outputs[0]
        edit.replace_output(node, 0, self.variable(f"{output.name}/gone", None, None))
        made.outputs.append(output)

    def variable(self, stem: str, dtype: Any, shape: Any) -> Variable:
        """Create a tensor with a unique name."""
        return Variable(self.names.fresh(stem), dtype, None if shape is None else list(shape))

    def scalar(self, tensor: Tensor) -> Tensor:
        """Return a constant of one value as a scalar: Q and DQ treat a vector of length 1 as one channel."""
        value = query.constant(tensor)
        if value is None or value.ndim == 0 or value.size != 1:
            return tensor
        key = (id(tensor),)
        if key not in self._products:
            self._products[key] = edit.add_constant(self.graph, f"{tensor.name}_scalar", value.reshape(()), self.names)
        return self._products[key]

    def product(self, one: Tensor, other: Tensor) -> Tensor | None:
        """Return the product of two constant scales, or None if one is computed."""
        key = (id(one), id(other))
        left, right = query.constant(one), query.constant(other)
        if left is None or right is None:
            return None
        if key not in self._products:
            values = np.asarray(_flat(left) * _flat(right), left.dtype)
            self._products[key] = edit.add_constant(self.graph, f"{one.name}_{other.name}", values, self.names)
        return self._products[key]


def _flat(values: Array) -> Array:
    return values.reshape(()) if values.size == 1 else values.reshape(-1)


DYNAMIC: Final = "DynamicQuantizeLinear"

BLOCKS_SINCE: Final = 21
"""First opset whose DequantizeLinear supports blocks."""


def rewrite(work: Unfolder, body: Body, node: Node) -> Reason | None:
    """Rewrite one product as a float product of a dequantized weight. In place; return a reason on failure."""
    if node.op in PRODUCTS:
        return _scaled_later(work, body, node)
    if node.op in WITH_FLOAT_INPUT:
        return _with_float(work, body, node)
    if node.op == BLOCKED:
        return _blocked(work, body, node)
    if node.op == BLOCKED_TABLE:
        return _blocked_table(work, body, node)
    return Reason("no-float-operator", f"{node.op} has no single float operator")


def _float_input(codes: Tensor) -> Tensor | None:
    """Return the float input of the DynamicQuantizeLinear that writes `codes`, or None."""
    maker = query.producer(codes)
    if maker is None or maker.op != DYNAMIC or maker.outputs[0] is not codes:
        return None
    floats: Tensor = maker.inputs[0]
    return floats


def _scaled_later(work: Unfolder, body: Body, node: Node) -> Reason | None:
    """Rewrite ``Cast(MatMulInteger(DynamicQuantizeLinear(x), w)) * (sx * sw)`` as MatMul of x and DQ(w)."""
    x = _float_input(node.inputs[0])
    if x is None:
        return Reason("scale-not-dynamic", "its activation does not come from a DynamicQuantizeLinear")
    scaling = _scaling(node)
    if scaling is None:
        return Reason("scales-do-not-follow", "no Cast and Mul with the scales follow it")
    multiply, other = scaling
    scale = _weight_scale(other, node.inputs[0].inputs[0].outputs[1])
    if scale is None:
        return Reason("scale-not-constant", "the scale of its weight is computed")
    kind = query.dtype(x) or np.dtype(np.float32)
    values = scale.reshape(-1) if scale.size > 1 else scale.reshape(())
    stored = edit.add_constant(work.graph, f"{node.name}_weight_scale", values.astype(kind), work.names)
    zero = query.optional_input(node, 3)
    value = query.constant(zero)
    if zero is not None and value is not None and value.shape != values.shape:
        shaped = np.broadcast_to(value.reshape(-1) if value.size > 1 else value.reshape(()), values.shape)
        zero = edit.add_constant(work.graph, f"{node.name}_weight_zero_point", np.array(shaped), work.names)
    weight = work.dequantize(body, node.inputs[1], stored, zero, 0 if node.op == "ConvInteger" else -1)
    product = Node(PRODUCTS[node.op], node.name, dict(node.attrs), [x, weight], [])
    body.nodes.append(product)
    result = work.variable(f"{multiply.outputs[0].name}_float", kind, query.shape(multiply.outputs[0]))
    product.outputs.append(result)
    edit.replace_all_uses(multiply.outputs[0], result, graph=body)
    return None


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
    if maker is None or maker.op not in MULTIPLIES or not any(factor_input is sx for factor_input in maker.inputs):
        return None
    others = [factor_input for factor_input in maker.inputs if factor_input is not sx]
    return query.constant(others[0]) if others else None


def _with_float(work: Unfolder, body: Body, node: Node) -> Reason | None:
    """Rewrite onnxruntime's fused forms, whose activation is float or comes from a DynamicQuantizeLinear."""
    weight, scale, zero, bias = WITH_FLOAT_INPUT[node.op]
    x = node.inputs[0] if node.op == READS_FLOATS else _float_input(node.inputs[0])
    if x is None:
        return Reason("scale-not-dynamic", "its activation does not come from a DynamicQuantizeLinear")
    factor = work.dequantize(body, node.inputs[weight], node.inputs[scale], query.optional_input(node, zero), -1)
    _product(work, body, node, [x, factor], query.optional_input(node, bias))
    return None


def _product(work: Unfolder, body: Body, node: Node, inputs: list[Tensor], bias: Tensor | None) -> None:
    """Replace `node` by a MatMul, followed by an Add if it has a bias."""
    if bias is None:
        last = Node("MatMul", node.name, {}, inputs, [])
        body.nodes.append(last)
        work.take_output(node, last)
        return
    output = node.outputs[0]
    product = work.variable(f"{output.name}_product", query.dtype(output), query.shape(output))
    body.nodes.append(Node("MatMul", node.name, {}, inputs, [product]))
    last = Node("Add", work.names.fresh(f"{node.name}_bias"), {}, [product, bias], [])
    body.nodes.append(last)
    work.take_output(node, last)


def _blocked(work: Unfolder, body: Body, node: Node) -> Reason | None:
    """Rewrite a MatMulNBits: codes in blocks along the reduction axis, packed from the lowest bits of each byte."""
    if query.optional_input(node, 4) is not None:
        return Reason("rows-reordered", "its rows are in another order (g_idx)")
    bits, block = int(node.attrs["bits"]), int(node.attrs["block_size"])
    rows, columns = int(node.attrs["K"]), int(node.attrs["N"])
    packed, scales = (query.constant(node.inputs[at]) for at in (1, 2))
    given = query.optional_input(node, 3)
    zeros = query.constant(given)
    if packed is None or scales is None or bits not in (2, 4, 8) or (given is not None and zeros is None):
        return Reason("weight-computed", "its weight is computed, or not of 2, 4 or 8 bits")
    if zeros is not None and zeros.dtype != np.uint8:
        return Reason("zero-points-are-floats", "its zero points are floats")
    codes, numbers = unpacked(packed, scales, zeros, (rows, columns, bits, block))
    weight = _in_blocks(work, body, str(node.inputs[1].name), codes, numbers)
    _product(work, body, node, [node.inputs[0], weight], query.optional_input(node, 5))
    return None


def _blocked_table(work: Unfolder, body: Body, node: Node) -> Reason | None:
    """Rewrite a GatherBlockQuantized of packed bytes, which may be the B of a MatMulNBits behind a Reshape."""
    data = node.inputs[0]
    before = query.producer(data)
    if before is not None and before.op == "Reshape":
        data = before.inputs[0]
    packed, scales = query.constant(data), query.constant(node.inputs[2])
    given = query.optional_input(node, 3)
    zeros = query.constant(given)
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs.get("block_size", 128))
    axes = int(node.attrs.get("gather_axis", 0)), int(node.attrs.get("quantize_axis", 1))
    if packed is None or scales is None or (given is not None and zeros is None):
        return Reason("table-computed", "its table is computed")
    if packed.dtype != np.uint8 or scales.ndim != 2 or axes[0] != 0 or axes[1] not in (1, -1):
        return Reason("table-not-packed", "its table is no matrix of packed bytes with blocks along its rows")
    columns = scales.shape[0]
    rows = packed.size // columns * 8 // bits
    codes, numbers = unpacked(packed, scales, zeros, (rows, columns, bits, block))
    turned = QDQParams(np.ascontiguousarray(numbers.scale.T), np.ascontiguousarray(numbers.zero.T), 1, block)
    table = _in_blocks(work, body, f"{data.name}_table", np.ascontiguousarray(codes.T), turned)
    gather = Node("Gather", node.name, {"axis": 0}, [table, node.inputs[1]], [])
    body.nodes.append(gather)
    work.take_output(node, gather)
    return None


def _in_blocks(work: Unfolder, body: Body, stem: str, codes: Array, numbers: QDQParams) -> Tensor:
    """Return the float values of codes in blocks: of a DequantizeLinear, or constant in opsets without blocks."""
    if work.graph.opset < BLOCKS_SINCE:
        weight: Tensor = edit.add_constant(work.graph, f"{stem}_float", numbers.dequantize(codes), work.names)
        return weight
    stored = edit.add_constant(work.graph, f"{stem}_quantized", codes, work.names)
    scale = edit.add_constant(work.graph, f"{stem}_scale", numbers.scale, work.names)
    zero = edit.add_constant(work.graph, f"{stem}_zero_point", numbers.zero, work.names)
    return work.dequantize(body, stored, scale, zero, numbers.axis, numbers.block or 0)


def unpacked(
    packed: Array, scales: Array, zeros: Array | None, sizes: tuple[int, int, int, int]
) -> tuple[Array, QDQParams]:
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
    numbers = QDQParams(np.ascontiguousarray(scale), np.ascontiguousarray(zero).astype(unsigned), 0, block)
    return np.ascontiguousarray(codes).astype(unsigned), numbers


def _bits(packed: Array, bits: int) -> Array:
    """Unpack bytes (N, B) to codes: two per byte for 4 bits, four for 2 bits, lowest bits first."""
    if bits == 8:
        return packed
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.asarray((packed[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(packed.shape[0], -1))
