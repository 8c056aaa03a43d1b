"""Removal of weight zero points by subtracting them from the integer codes.

onnxruntime's integer kernels are made for weights with zero point 0: with one zero point per channel, a depthwise
convolution takes 20 times as long, and other kernels a fifth longer; release 1.23 does not run them. Codes of few bits
leave room in a byte for ``code - zero_point``, which represents the same value with zero point 0.
"""

from __future__ import annotations

import numpy as np

from sbonnx.graph import Body, Graph, Node, edit, query
from sbonnx.ops import DEQUANTIZE, LINEAR
from sbonnx.spec import SAFE_CODE, Array


def centre_weights(graph: Graph) -> list[str]:
    """Subtract the zero points from stored int8 weight codes where the result fits a byte. In place, in every scope.

    Args:
        graph: with Q/DQ pairs in place.

    Returns:
        One sentence per change.
    """
    done: list[str] = []
    names = edit.Names(graph)
    for _, body in query.scopes(graph):
        for node in list(body.nodes):
            if node.op in DEQUANTIZE and _before_weights(node):
                codes = _about_zero(node)
                if codes is not None:
                    _write(node, codes, body, names)
                    done.append(f"{node.name}: zero points taken into its codes")
    if done:
        edit.sweep(graph)
    return done


def _before_weights(node: Node) -> bool:
    """Return whether all readers of a DequantizeLinear are linear ops with quantized data that read it as weight."""
    uses = query.readers(node.outputs[0])
    return bool(uses) and all(_multiplies_codes(user, index) for user, index in uses)


def _multiplies_codes(user: Node, index: int) -> bool:
    linear = LINEAR.get(user.op)
    data = query.producer(user.inputs[0])
    return linear is not None and index == linear.weight and data is not None and data.op in DEQUANTIZE


def _about_zero(node: Node) -> Array | None:
    """Subtract the zero points from the codes; None if there are none, or if the results are too large."""
    codes = query.constant(node.inputs[0])
    zero = query.constant(node.inputs[2]) if len(node.inputs) > 2 and not node.inputs[2].is_empty() else None
    if codes is None or zero is None or codes.dtype != np.int8 or not zero.any() or node.attrs.get("block_size"):
        return None
    if zero.size > 1:
        axis = int(node.attrs.get("axis", 1)) % codes.ndim
        zero = zero.reshape([-1 if at == axis else 1 for at in range(codes.ndim)])
    steps = codes.astype(np.int16) - zero.astype(np.int16)
    reach = int(np.abs(steps).max(initial=0))
    before = int(np.abs(codes.astype(np.int16)).max(initial=0))
    return steps.astype(np.int8) if reach <= min(127, max(SAFE_CODE, before)) else None


def _write(node: Node, codes: Array, body: Body, names: edit.Names) -> None:
    """Let the node read `codes`, and a zero point of 0 of the same shape. In place."""
    zeros = np.zeros(tuple(node.inputs[2].shape), np.int8)
    for index, values in ((0, codes), (2, zeros)):
        edit.replace_input(node, index, edit.add_constant(body, str(node.inputs[index].name), values, names))
