"""Attention masks: tensors whose large negative numbers only reach softmaxes, where they become zeros."""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.graph import Body, Graph, Node, Tensor, edit, query
from sbonnx.ops import CARRIES_MASK, SOFTMAX

LEAST_MASK: Final = -1e4
"""Masks below are replaced by this number where they are quantized: the exp of either is 0 next to any score."""


def mask_ways(graph: Graph) -> dict[str, bool]:
    """Return the names of float tensors that only reach softmaxes, through sums, products and data movement.

    A value far below the others, minus infinity included, has the same effect there as any other one.

    Returns:
        By name, whether all readers are softmaxes.
    """
    direct_masks: dict[str, bool] = {}
    for _, body in query.scopes(graph):
        outputs = {tensor.name for tensor in body.outputs}
        tensors = [tensor for node in reversed(list(body.nodes)) for tensor in node.outputs]
        for tensor in [*tensors, *body.inputs]:
            readers = query.readers(tensor)
            if not readers or tensor.name in outputs or getattr(query.dtype(tensor), "kind", "") != "f":
                continue
            direct = [reader.op in SOFTMAX and index == 0 for reader, index in readers]
            if all(
                is_direct or _carries(reader, direct_masks)
                for (reader, _), is_direct in zip(readers, direct, strict=True)
            ):
                direct_masks[tensor.name] = all(direct)
    return direct_masks


def _carries(node: Node, found: dict[str, bool]) -> bool:
    return node.op in CARRIES_MASK and bool(node.outputs) and node.outputs[0].name in found


def bound_masks(graph: Graph) -> list[str]:
    """Replace numbers below `LEAST_MASK` in constant masks. In place; return the names of the nodes that read them."""
    ways, names = mask_ways(graph), edit.Names(graph)
    return [node.name for _, body in query.scopes(graph) for node in body.nodes if _bound(node, body, ways, names)]


def _bound(node: Node, body: Body, ways: dict[str, bool], names: edit.Names) -> bool:
    changed = False
    for index, tensor in enumerate(list(node.inputs)) if _carries(node, ways) else ():
        values = _float_constant(tensor)
        if values is not None and (values < LEAST_MASK).any():
            held = np.maximum(values, np.asarray(LEAST_MASK, values.dtype))
            edit.replace_input(node, index, edit.add_constant(body, tensor.name, held, names))
            changed = True
    return changed


def _float_constant(tensor: Tensor) -> np.ndarray | None:
    if getattr(query.dtype(tensor), "kind", "") != "f":
        return None
    return query.constant(tensor)
