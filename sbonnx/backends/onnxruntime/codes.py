"""Data movement on integer codes where onnxruntime would use float kernels.

onnxruntime moves pairs past Transpose, Slice and the like by itself, but not past Pad. Padding codes with the zero
point is equal to padding with zero.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.backends.base import PAD_VALUE, fills_zero
from sbonnx.graph import Graph, Node, Variable, edit, query
from sbonnx.ops import DEQUANTIZE, PADS, QUANTIZE

PADDED: Final = ("int8", "uint8")
"""Quantized types that onnxruntime's Pad supports."""


def pad_codes(graph: Graph) -> list[str]:
    """Replace DequantizeLinear, Pad, QuantizeLinear with one scale by a Pad of codes, in place and in every scope.

    Return one sentence per change.
    """
    done: list[str] = []
    names = edit.Names(graph)
    for _, body in query.scopes(graph):
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
            done.append(f"{node.name}: pads codes")
    if done:
        edit.sweep(graph)
        edit.sort(graph)
    return done


def _one_scale(before: Node, after: list[Node]) -> bool:
    """Return whether every reader quantizes with the DequantizeLinear's scale and zero point, both per tensor."""
    if not after or any(node.op not in QUANTIZE for node in after):
        return False
    for index in (1, 2):
        found = [query.constant(node.inputs[index]) if len(node.inputs) > index else None for node in (before, *after)]
        values = [value for value in found if value is not None and value.size == 1]
        if len(values) < len(found) or any(value != values[0] for value in values):
            return False
    return True
