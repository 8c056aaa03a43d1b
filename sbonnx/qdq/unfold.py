"""Conversion of integer operators (QOperator form, dynamic quantization, MatMulNBits) to Q/DQ pairs and float ops.

``QLinearConv(x, sx, zx, w, sw, zw, sy, zy, b)`` is by definition ``Q(Conv(DQ(x), DQ(w), DQ(b)), sy, zy)`` with the
scale ``sx * sw`` for the int32 bias (ONNX operator reference, QLinearConv). The same holds for the other operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import INTEGER_OPS, STANDARD_DOMAINS
from sbonnx.qdq import layouts
from sbonnx.qdq import unfold_products as products
from sbonnx.qdq.layouts import LAYOUTS, Layout
from sbonnx.qdq.lift import lift
from sbonnx.qdq.unfolder import WHAT, Unfolder, optional
from sbonnx.report import Fired, Refusal


def is_integer_op(node: Node) -> bool:
    """Return whether an operator computes in integers itself, in ONNX's domain or in onnxruntime's."""
    domain = node.domain or ""
    if domain in STANDARD_DOMAINS:
        return node.op in INTEGER_OPS
    return domain == layouts.MICROSOFT and node.op in layouts.CONTRIBUTED


def unfold(graph: Graph) -> tuple[tuple[Fired, ...], tuple[Refusal, ...]]:
    """Write every integer operator as a float operator between Q/DQ pairs. In place.

    Operators that only move codes (MaxPool, Reshape, ... between them) are also put between pairs. Dynamic quantization
    loses its rounding of the activation, which no pair can express; weights keep their codes.

    Returns:
        Rewritten operators (operator and node), and refusals with the reason.
    """
    work = Unfolder(graph)
    for _, body in list(query.scopes(graph)):
        _scope(work, body)
    if work.fired:
        edit.sweep(graph)
        edit.sort(graph)
    lifted = lift(graph, WHAT)
    work.fired += [Fired(f"{WHAT}: {node.op}", str(node.name)) for node in lifted.nodes]
    if lifted.nodes:
        edit.sweep(graph)
        edit.sort(graph)
    return tuple(work.fired), (*work.refusals, *lifted.refusals)


def _scope(work: Unfolder, body: Body) -> None:
    gone: set[int] = set()
    for node in list(body.nodes):
        if not is_integer_op(node) or node.op == products.DYNAMIC:
            continue
        why = _rewriter(node)(work, body, node)
        if why is None:
            work.fired.append(Fired(f"{WHAT}: {node.op}", str(node.name)))
            gone.add(id(node))
            for at in range(len(node.inputs)):
                edit.replace_input(node, at, Variable(""))
        else:
            work.refusals.append(Refusal(WHAT, str(node.name), why))
    body.nodes = [node for node in body.nodes if id(node) not in gone]


def _rewriter(node: Node) -> Callable[[Unfolder, Body, Node], str | None]:
    if node.op in LAYOUTS:
        return _by_layout
    return _concat if node.op == layouts.CONCAT else products.rewrite


def _by_layout(work: Unfolder, body: Body, node: Node) -> str | None:
    """Rewrite an operator of the table. Return the reason why it cannot be rewritten, or None."""
    layout = LAYOUTS[node.op]
    if node.attrs.get("channels_last", 0):
        return "its channels come last, which the float operator does not know"
    bias = None
    if layout.bias is not None and optional(node, layout.bias) is not None:
        bias = _bias(work, body, node, layout)
        if bias is None:
            return "the scale of its bias is computed"
    operands = [
        work.dequantize(body, node.inputs[codes], node.inputs[scale], optional(node, zero), axis)
        for (codes, scale, zero), axis in zip(layout.data, _axes(node, layout), strict=False)
    ]
    inputs = [*(node.inputs[at] for at in layout.passed), *operands, *([] if bias is None else [bias])]
    attrs = {name: value for name, value in node.attrs.items() if name not in layout.drop}
    _write(work, body, node, layout.op, attrs, inputs, layout.out)
    return None


def _axes(node: Node, layout: Layout) -> tuple[int, ...]:
    if layout.op != "Gemm":
        return layout.axes
    return (1 if node.attrs.get("transA", 0) else 0, 0 if node.attrs.get("transB", 0) else 1)


def _bias(work: Unfolder, body: Body, node: Node, layout: Layout) -> Tensor | None:
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
    scale = optional(node, out)
    if scale is None:  # QGemm without an output scale returns floats
        made = Node(op, node.name, attrs, inputs, [])
        body.nodes.append(made)
        work.take_output(node, made)
        return
    floats = work.variable(f"{output.name}_float", query.dtype(scale), query.shape(output))
    body.nodes.append(Node(op, node.name, attrs, inputs, [floats]))
    work.quantize(body, node, floats, scale, optional(node, out + 1))


def _concat(work: Unfolder, body: Body, node: Node) -> str | None:
    """Rewrite a QLinearConcat: scale and zero point of the output come first, then three inputs per operand."""
    operands = [
        work.dequantize(body, node.inputs[at], node.inputs[at + 1], optional(node, at + 2), None)
        for at in range(2, len(node.inputs), 3)
    ]
    _write(work, body, node, "Concat", dict(node.attrs), operands, 0)
    return None
