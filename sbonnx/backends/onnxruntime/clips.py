"""Clip on integer codes for activations of fewer than 8 bits, so that the Clip does not block an integer kernel.

``Q(Clip(x, (qmin - z) s, (qmax - z) s))`` and ``Clip(Q(x), qmin, qmax)`` give the same codes: rounding is monotonic.
onnxruntime fuses a Conv into a QLinearConv only if a QuantizeLinear follows directly, and has a Clip kernel for 8-bit
integers.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import QUANTIZE

INPUTS: Final = 3
"""Number of inputs of a Clip with both bounds, and of a QuantizeLinear with a zero point."""


def clip_codes(graph: Graph) -> list[str]:
    """Move a Clip after the QuantizeLinear that is its only reader, so that it clips codes. In place, in every scope.

    Return one sentence per change.
    """
    done: list[str] = []
    names = edit.Names(graph)
    for _, body in query.scopes(graph):
        outputs = {id(tensor) for tensor in body.outputs}
        for node in list(body.nodes):
            found = _clipped(node, outputs)
            if found is not None:
                _move(body, node, *found, names)
                done.append(f"{node.name}: clips codes")
    if done:
        edit.sweep(graph)
        edit.sort(graph)
    return done


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


def _move(body: Body, clip: Node, quantize: Node, low: np.generic, high: np.generic, names: edit.Names) -> None:
    """Let the QuantizeLinear read the input of the Clip, and append a Clip on its codes. In place."""
    codes: Tensor = quantize.outputs[0]
    edit.replace_input(quantize, 0, clip.inputs[0])
    wide = Variable(names.fresh(f"{codes.name}_wide"), dtype=codes.dtype, shape=codes.shape)
    edit.replace_output(quantize, 0, wide)
    ends = [
        edit.add_constant(body, f"{codes.name}_{name}", np.asarray(end), names)
        for name, end in (("low", low), ("high", high))
    ]
    edit.add_node(body, "Clip", [wide, *ends], names=names, stem=clip.name, attrs=dict(clip.attrs), outputs=[codes])
