"""Conversion of onnxruntime's DynamicQuantizeLSTM to an LSTM whose weights are dequantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from sbonnx.graph import Body, Node, Tensor, edit, query
from sbonnx.qdq.integer_products import Unfolder
from sbonnx.report import Reason

RECURRENT_INPUTS: Final = ((1, 8, 9), (2, 10, 11))
"""Input indices of codes, scales and zero points of both weights of a DynamicQuantizeLSTM, after those of an LSTM."""


def rewrite_lstm(work: Unfolder, body: Body, node: Node) -> Reason | None:
    """Rewrite a DynamicQuantizeLSTM as an LSTM, whose weights (directions, gates, inputs) are transposed back."""
    weights = [_gates(work, body, [query.optional_input(node, at) for at in places]) for places in RECURRENT_INPUTS]
    if any(weight is None for weight in weights):
        return Reason("weight-computed", "its weights or their scales are computed")
    inputs = [node.inputs[0], *weights, *node.inputs[3 : RECURRENT_INPUTS[0][1]]]
    layer = Node("LSTM", node.name, dict(node.attrs), inputs, [])
    body.nodes.append(layer)
    for index, output in enumerate(list(node.outputs)):
        edit.replace_output(node, index, work.variable(f"{output.name}/gone", None, None))
        layer.outputs.append(output)
    return None


def _gates(work: Unfolder, body: Body, operand: Sequence[Tensor | None]) -> Tensor | None:
    """Return the dequantized weight of an LSTM: behind a pair if both directions share their scales, else constant."""
    values = [query.constant(tensor) for tensor in operand]
    if operand[0] is None or any(
        value is None and tensor is not None for value, tensor in zip(values, operand, strict=True)
    ):
        return None
    codes, scale = (np.asarray(value) for value in values[:2])
    zero = np.zeros(scale.shape, codes.dtype) if values[2] is None else values[2]
    turned = np.ascontiguousarray(codes.transpose(0, 2, 1))
    rows = [part.reshape(len(codes), -1) for part in (scale, zero)]
    stem = str(operand[0].name)
    if any((part != part[0]).any() for part in rows):
        steps = turned.astype(np.float32) - rows[1][:, :, None].astype(np.float32)
        floats = np.asarray(steps * rows[0][:, :, None], np.float32)
        return edit.add_constant(work.graph, f"{stem}_float", floats, work.names)
    shape = (-1,) if rows[0].shape[1] > 1 else ()
    values_of = {"rows": turned, "row_scales": rows[0][0].reshape(shape), "row_zero_points": rows[1][0].reshape(shape)}
    stored, scales, zeros = (
        edit.add_constant(work.graph, f"{stem}_{name}", part, work.names) for name, part in values_of.items()
    )
    return work.dequantize(body, stored, scales, zeros, 1)
