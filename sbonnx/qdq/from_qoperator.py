"""Conversion of integer operators (QOperator form, dynamic quantization, MatMulNBits) to Q/DQ pairs and float ops.

``QLinearConv(x, sx, zx, w, sw, zw, sy, zy, b)`` is by definition ``Q(Conv(DQ(x), DQ(w), DQ(b)), sy, zy)`` with the
scale ``sx * sw`` for the int32 bias (ONNX operator reference, QLinearConv). The same holds for the other operators.
Ops on integer codes between a QuantizeLinear and a DequantizeLinear become ops on floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import (
    CONTRIB,
    DYNAMIC_LSTM,
    EMBEDDING,
    INTEGER_OPS,
    LINEAR,
    MOVES_DATA,
    PADS,
    PICKS_MAX,
    QDQ,
    QUANTIZE,
    RECURRENT,
    STANDARD_DOMAINS,
)
from sbonnx.qdq import integer_products
from sbonnx.qdq.arithmetic import QDQParams, numbers
from sbonnx.qdq.from_dynamic_lstm import rewrite_lstm
from sbonnx.qdq.integer_products import OPERATORS, WHAT, IntegerOperator, Unfolder
from sbonnx.report import Fired, Reason, Refusal
from sbonnx.spec import Array


def is_integer_op(node: Node) -> bool:
    """Return whether an operator computes in integers itself, in ONNX's domain or in onnxruntime's."""
    return _computes_integers(node.op, node.domain or "")


def is_quantized_op(op: str, domain: str) -> bool:
    """Return whether only quantized models have an operator: Q/DQ, or computed in integers."""
    return op in QDQ or _computes_integers(op, domain)


def _computes_integers(op: str, domain: str) -> bool:
    if domain in STANDARD_DOMAINS:
        return op in INTEGER_OPS
    return domain == CONTRIB and op in integer_products.CONTRIBUTED


def unfold(graph: Graph) -> tuple[tuple[Fired, ...], tuple[Refusal, ...]]:
    """Write every integer operator as a float operator between Q/DQ pairs. In place.

    Operators that only move codes (MaxPool, Reshape, ... between them) are also put between pairs. Dynamic quantization
    loses its rounding of the activation, which no pair can express; weights keep their codes.

    Returns:
        Rewritten operators (operator and node), and refusals with the reason.
    """
    work = Unfolder(graph)
    decoded = _pair_decoded(work, graph)
    for _, body in list(query.scopes(graph)):
        _scope(work, body)
    if work.fired or decoded:
        edit.sweep(graph)
        edit.sort(graph)
    lifted = lift(graph, WHAT)
    work.fired += [Fired(f"{WHAT}: {node.op}", str(node.name)) for node in lifted.nodes]
    if lifted.nodes:
        edit.sweep(graph)
        edit.sort(graph)
    return tuple(work.fired), (*work.refusals, *lifted.refusals)


def _pair_decoded(work: Unfolder, graph: Graph) -> int:
    """Write weights that a Cast and a Mul decode as Q/DQ pairs: of recurrent operators, and rows of tables. In place.

    `backends.decoded_weights.decode_at_load` and `decode_rows` write them so. Return how many were written.
    """
    count = 0
    for _, body in list(query.scopes(graph)):
        for node in [node for node in body.nodes if node.op == "Mul"]:
            maker = query.producer(node.inputs[0])
            if maker is None or maker.op != "Cast":
                continue
            rows = query.producer(maker.inputs[0])
            if rows is not None and rows.op in EMBEDDING and len(query.readers(rows.outputs[0])) == 1:
                source, scale, uses = rows.inputs[0], _scale_of_rows(node.inputs[1], rows), [(rows, 0)]
            else:
                uses = [use for use in query.readers(node.outputs[0]) if _is_weight(*use)]
                rows, source, scale = None, maker.inputs[0], query.constant(node.inputs[1])
            codes = query.constant(source)
            if not uses or codes is None or codes.dtype not in (np.int8, np.uint8) or scale is None:
                continue
            axes = [axis for axis, size in enumerate(scale.shape) if size > 1]
            if len(axes) > 1 or scale.ndim not in (0, codes.ndim):
                continue
            values = scale.reshape(-1 if axes else ())
            factors = edit.add_constant(graph, f"{node.name}_scale", values, work.names)
            decoded = work.dequantize(body, source, factors, None, axes[0] if axes else None)
            for user, index in uses:
                edit.replace_input(user, index, decoded)
            if rows is not None:
                rows.outputs[0].dtype = values.dtype
                edit.replace_all_uses(node.outputs[0], rows.outputs[0], graph=body)
            count += 1
    return count


def _is_weight(user: Node, index: int) -> bool:
    """Return whether input `index` of a node is a weight: of a recurrent or a linear op."""
    return user.op in RECURRENT or (user.op in LINEAR and index == LINEAR[user.op].weight)


def _scale_of_rows(factor: Tensor, rows: Node) -> Array | None:
    """Return the scales of a table: one number, or one a row, read with the indices that a Gather reads rows with."""
    maker = query.producer(factor)
    if maker is None:
        scale = query.constant(factor)
        return scale if scale is not None and scale.ndim == 0 else None
    same = maker.op in EMBEDDING and maker.inputs[1] is rows.inputs[1]
    in_rows = maker.attrs.get("axis", 0) == 0 and rows.attrs.get("axis", 0) == 0
    return query.constant(maker.inputs[0]) if same and in_rows else None


def _scope(work: Unfolder, body: Body) -> None:
    gone: set[int] = set()
    for node in list(body.nodes):
        if not is_integer_op(node) or node.op == integer_products.DYNAMIC:
            continue
        own = _by_layout if node.op in OPERATORS else integer_products.rewrite
        why = REWRITES.get(node.op, own)(work, body, node)
        if why is None:
            work.fired.append(Fired(f"{WHAT}: {node.op}", str(node.name)))
            gone.add(id(node))
            for at in range(len(node.inputs)):
                edit.replace_input(node, at, Variable(""))
        else:
            work.refusals.append(Refusal(WHAT, str(node.name), why))
    body.nodes = [node for node in body.nodes if id(node) not in gone]


def _by_layout(work: Unfolder, body: Body, node: Node) -> Reason | None:
    """Rewrite an operator of the table. Return the reason why it cannot be rewritten, or None."""
    layout = OPERATORS[node.op]
    if node.attrs.get("channels_last", 0):
        return Reason("channels-last", "its channels come last, which the float operator does not know")
    bias = None
    if query.optional_input(node, layout.bias) is not None:
        bias = _bias(work, body, node, layout)
        if bias is None:
            return Reason("scale-not-constant", "the scale of its bias is computed")
    axes = layout.axes
    if layout.op == "Gemm":
        axes = (1 if node.attrs.get("transA", 0) else 0, 0 if node.attrs.get("transB", 0) else 1)
    operands = [
        work.dequantize(body, node.inputs[codes], node.inputs[scale], query.optional_input(node, zero), axis)
        for (codes, scale, zero), axis in zip(layout.data, axes, strict=False)
    ]
    inputs = [*(node.inputs[at] for at in layout.passed), *operands, *([] if bias is None else [bias])]
    attrs = {name: value for name, value in node.attrs.items() if name not in layout.drop}
    _write(work, body, node, layout.op, attrs, inputs, layout.out)
    return None


def _bias(work: Unfolder, body: Body, node: Node, layout: IntegerOperator) -> Tensor | None:
    """Dequantize the bias: codes times the product of the operands' scales (QGemm: also times alpha)."""
    assert layout.bias is not None
    scale = work.product(node.inputs[layout.data[0][1]], node.inputs[layout.data[1][1]])
    if scale is None:
        return None
    alpha = float(node.attrs.get("alpha", 1.0))
    if alpha != 1.0:
        values = np.asarray(query.constant(scale))
        scale = edit.add_constant(
            work.graph, f"{node.name}_bias_scale", np.asarray(values * alpha, values.dtype), work.names
        )
    codes = node.inputs[layout.bias]
    rank = query.rank(codes) or 1
    return work.dequantize(body, codes, scale, None, rank - 1)


def _write(
    work: Unfolder, body: Body, node: Node, op: str, attrs: dict[str, Any], inputs: list[Tensor], out: int
) -> None:
    """Replace an integer operator by a float one, keeping the node's name; add a Q if it has an output scale."""
    output = node.outputs[0]
    scale = query.optional_input(node, out)
    if scale is None:  # QGemm without an output scale returns floats
        float_node = Node(op, node.name, attrs, inputs, [])
        body.nodes.append(float_node)
        work.take_output(node, float_node)
        return
    floats = work.variable(f"{output.name}_float", query.dtype(scale), query.shape(output))
    body.nodes.append(Node(op, node.name, attrs, inputs, [floats]))
    work.quantize(body, node, floats, scale, query.optional_input(node, out + 1))


def _concat(work: Unfolder, body: Body, node: Node) -> Reason | None:
    """Rewrite a QLinearConcat: scale and zero point of the output come first, then three inputs per operand."""
    operands = [
        work.dequantize(body, node.inputs[at], node.inputs[at + 1], query.optional_input(node, at + 2), None)
        for at in range(2, len(node.inputs), 3)
    ]
    _write(work, body, node, "Concat", dict(node.attrs), operands, 0)
    return None


REWRITES: Final = {integer_products.CONCAT: _concat, DYNAMIC_LSTM: rewrite_lstm}
"""Rewrites of operators with layouts of their own."""

FILL: Final = 2
"""Index of Pad's fill value."""

MOVERS: Final = MOVES_DATA | PICKS_MAX | PADS


@dataclass(frozen=True)
class Lifted:
    """Result of `lift`.

    Attributes:
        nodes: the converted ops, which now have float inputs and outputs.
        refusals: ops that were not converted, with the reason.
    """

    nodes: tuple[Node, ...]
    refusals: tuple[Refusal, ...]


def lift(graph: Graph, what: str) -> Lifted:
    """Write ``Q -> op -> DQ`` as ``Q -> DQ -> op -> Q -> DQ`` with the same scales, for ops that only move values.

    In place. Quantization commutes with moving values, so the results are equal. A Pad fills with the dequantized value
    of its fill code.

    Args:
        what: name of the step in refusals.
    """
    names = edit.Names(graph)
    nodes: list[Node] = []
    refusals: list[Refusal] = []
    for _, body in list(query.scopes(graph)):
        for node in list(body.nodes):
            source = query.producer(node.inputs[0]) if node.inputs else None
            if node.op not in MOVERS or source is None or source.op not in QUANTIZE:
                continue
            parameters = numbers(source)
            if parameters is None or parameters.scale.size != 1:
                why = Reason("scale-not-constant", f"{node.op} moves codes whose scale is computed, or one of many")
                refusals.append(Refusal(what, str(node.name), why))
                continue
            _lift(node, source, parameters, body, names)
            nodes.append(node)
    if nodes:
        edit.sort(graph)
    return Lifted(tuple(nodes), tuple(refusals))


def _lift(node: Node, source: Node, found: QDQParams, body: Body, names: edit.Names) -> None:
    codes: Tensor = node.inputs[0]
    pair = source.inputs[1:]
    before = _like(codes, names.fresh(f"{codes.name}_float"), found)
    dequantize = Node(
        "DequantizeLinear", names.fresh(f"{codes.name}_DequantizeLinear"), dict(source.attrs), [], [before]
    )
    dequantize.inputs.extend([codes, *pair])
    edit.replace_input(node, 0, before)
    body.nodes.append(dequantize)
    fill = query.constant(query.optional_input(node, FILL)) if node.op in PADS else None
    if fill is not None:
        floats = np.asarray(found.dequantize(fill.reshape(())))
        edit.replace_input(node, FILL, edit.add_constant(body, f"{node.name}_fill", floats, names))
    for index, output in enumerate(list(node.outputs)):
        floats_out = _like(output, names.fresh(f"{output.name}_float"), found)
        edit.replace_output(node, index, floats_out)
        after = Node("QuantizeLinear", names.fresh(f"{node.name}_QuantizeLinear"), dict(source.attrs), [], [output])
        after.inputs.extend([floats_out, *pair])
        body.nodes.append(after)


def _like(tensor: Tensor, name: str, found: QDQParams) -> Variable:
    shape = query.shape(tensor)
    return Variable(name, found.scale.dtype, None if shape is None else list(shape))
