"""Rule for products of two activations, and for operands that broadcast against channels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sbonnx.channels.ids import varies
from sbonnx.graph import Node, Tensor
from sbonnx.graph.query import constant, rank, shape
from sbonnx.pruning.groups.removal_choices import Layout, rows_along
from sbonnx.pruning.groups.removal_trace import ProductSides, RemovalTrace
from sbonnx.report.codes import Reason
from sbonnx.spec import Array


def aligned(ids: Array, size: int) -> Array:
    """Return ids with `size` axes: broadcasting aligns the last ones."""
    return ids.reshape((1,) * (size - ids.ndim) + ids.shape)


def broadcasts(tensor: Tensor, size: int, axes: set[int]) -> bool:
    """Return whether a tensor has one entry along each of these axes of an output with `size` axes."""
    return bool(axes) and all(_has_one(tensor, size, axis) for axis in axes)


def _has_one(tensor: Tensor, size: int, axis: int) -> bool:
    dims = shape(tensor)
    if dims is None:
        return False
    place = axis - (size - len(dims))
    return place < 0 or dims[place] == 1


def other_operand(trace: RemovalTrace, node: Node, index: int, ids: Array, axes: Iterable[int]) -> None:
    """Slice an operand without ids along these axes of the output, which has `ids`.

    Along an axis on which an activation has more than one entry, nothing is removed.
    """
    tensor = node.inputs[index]
    values = constant(tensor)
    for axis in axes:
        if _has_one(tensor, ids.ndim, axis):
            continue
        if values is None:
            why = Reason(
                "combined-with-pinned",
                f"{node.op} '{node.name}' combines it with '{tensor.name}', whose channels are pinned",
            )
            trace.hold(ids, [axis], why)
        elif ids.shape[axis] > 1:
            trace.cut(node, index, axis - (ids.ndim - values.ndim), rows_along(ids, axis))


def product(trace: RemovalTrace, node: Node) -> None:
    """Product of two activations, y = a b.

    It sums over the last axis of a, and over the last but one of b, along which nothing is removed. Rows of a are rows
    of y, columns of b are columns of y, and the axes before them (heads of attention) are axes of all three. If ids of
    y vary along several axes, heads are removed rather than columns: more layers lose weights with them.
    """
    size, ranks = rank(node.outputs[0]), [rank(tensor) for tensor in node.inputs[:2]]
    full = [trace.full(tensor) for tensor in node.inputs]
    constants = [trace.known(tensor) for tensor in node.inputs]
    unknown = any(ids is None and given is not None for ids, given in zip(full, constants, strict=True))
    if unknown or size is None or any(rank_of_input is None or rank_of_input < 2 for rank_of_input in ranks):
        trace.refuse(node)
        return
    left, right = (None if ids is None else aligned(ids, size) for ids in full)
    a, b = _summed(trace, node, left, size - 1), _summed(trace, node, right, size - 2)
    if a is None or b is None:
        given, index = (b, 0) if a is None else (a, 1)
        if given is not None:
            other_operand(trace, node, index, given, [axis for axis in varies(given) if axis < size - 2])
            _give(trace, node, given)
    else:
        _give(trace, node, _joined(trace, node, a, b))


def _give(trace: RemovalTrace, node: Node, ids: Array) -> None:
    trace.products.append(ProductSides(node, ids))
    trace.give(node.outputs[0], ids)


def _summed(trace: RemovalTrace, node: Node, ids: Array | None, axis: int) -> Array | None:
    """Return ids without the axis that is summed over."""
    if ids is None:
        return None
    kept = trace.hold(ids, [axis], Reason("summed-over", f"MatMul '{node.name}' sums over it"))
    return np.take(ids, [0], axis) if kept else None


def _joined(trace: RemovalTrace, node: Node, a: Array, b: Array) -> Array:
    """Return ids of the product of two activations with ids, and leave the choice of the axis that shrinks."""
    size = a.ndim
    for factor in (a, b):
        if not varies(factor):
            trace.ids.pin(factor, Reason("combined-with-all", f"MatMul '{node.name}' combines it with all channels"))
    ids = trace.ids.fresh(np.broadcast_shapes(a.shape, b.shape))
    options = []
    for axis in varies(ids):
        rows, pinned = [rows_along(ids, axis)], []
        for tensor, factor in zip(node.inputs, (a, b), strict=True):
            if factor.shape[axis] > 1:
                rows.append(rows_along(factor, axis))
            else:
                pinned.append(factor)
                if axis < size - 2 and not _has_one(tensor, size, axis):
                    pinned.append(ids)  # this factor has its own entries along the axis, which stay
        why = Reason("multiplied-with-pinned", f"MatMul '{node.name}' multiplies it with channels that stay")
        options.append(Layout((np.concatenate(rows, axis=1),), why, tuple(pinned), preferred=axis < size - 2))
    trace.choice(*options)
    return ids
