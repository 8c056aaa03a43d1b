"""Propagation rules of ops that move, select or average values, by which output channels are input channels."""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.channels.ids import FIXED, varies
from sbonnx.channels.trace import Rule, Shape, Trace
from sbonnx.graph import Body, Node, Tensor
from sbonnx.graph.query import attribute, constant, shape
from sbonnx.ops import PICKS_MAX, POOLS, REDUCES
from sbonnx.report.codes import Reason
from sbonnx.spec import Array


def _pool(trace: Trace, node: Node, body: Body) -> None:
    """Each output is a maximum or mean of one channel; windows are on axes 2 and up."""
    ids = trace.full(node.inputs[0])
    if ids is None or any(axis >= 2 for axis in varies(ids)):
        trace.refuse(node)
    else:
        trace.give(node.outputs[0], ids)


def _reduce(trace: Trace, node: Node, body: Body) -> None:
    """Mean or sum over axes along which the scale is constant."""
    ids = trace.full(node.inputs[0])
    given = constant(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1].name else attribute(node, "axes")
    if ids is None or given is None:
        trace.refuse(node)
        return
    axes = {int(axis) % ids.ndim for axis in np.asarray(given).reshape(-1)}
    if axes & set(varies(ids)):
        trace.refuse(node)
    elif attribute(node, "keepdims", 1):
        trace.give(node.outputs[0], ids)
    else:
        trace.give(node.outputs[0], np.squeeze(ids, tuple(axes)))


def _reshape(trace: Trace, node: Node, body: Body) -> None:
    """Reshape without reordering values."""
    ids, before, after = trace.full(node.inputs[0]), shape(node.inputs[0]), shape(node.outputs[0])
    moved = None if ids is None or before is None or after is None else reshaped(ids, before, after)
    if moved is None:
        trace.refuse(node, Reason("channels-not-preserved", f"{node.op} '{node.name}' does not preserve channels"))
    else:
        trace.give(node.outputs[0], moved)


def reshaped(ids: Array, before: Shape, after: Shape) -> Array | None:
    """Return the ids after a reshape; None if unknown dimensions make the position of channels ambiguous.

    Leading axes that are equal on both sides stay. Otherwise the axes from the first one with different channels on
    must be a block of known size at the end, and the new shape must end with a block of this size.
    """
    where = varies(ids)
    if not where:
        return ids.reshape((1,) * len(after))
    front = before[: where[-1] + 1]
    if None not in front and front == after[: len(front)]:
        return ids.reshape(ids.shape[: len(front)] + (1,) * (len(after) - len(front)))
    block = [size for size in before[where[0] :] if isinstance(size, int)]
    if len(block) < len(before) - where[0]:
        return None
    wanted, count = int(np.prod(block)), 1
    for place in reversed(range(len(after))):
        size = after[place]
        if not isinstance(size, int):
            return None
        count *= size
        if count == wanted:
            wide = np.broadcast_to(ids[(0,) * where[0]], block)
            return _narrow(wide.reshape([int(size) for size in after[place:] if isinstance(size, int)]))
        if count > wanted:
            return None
    return None


def _narrow(ids: Array) -> Array:
    """Reduce axes along which ids are constant to size 1."""
    for axis in varies(ids):
        first = np.take(ids, [0], axis)
        ids = first if (ids == first).all() else ids
    return ids


def _transpose(trace: Trace, node: Node, body: Body) -> None:
    ids = trace.full(node.inputs[0])
    if ids is None:
        trace.refuse(node)
        return
    order = attribute(node, "perm", list(reversed(range(ids.ndim))))
    trace.give(node.outputs[0], ids.transpose([int(axis) for axis in order]))


def _concat(trace: Trace, node: Node, body: Body) -> None:
    """Concatenate ids along the channel axis; along another axis all inputs get equal scales."""
    parts = [trace.full(tensor) for tensor in node.inputs]
    traced = [part for part in parts if part is not None]
    if len(traced) < sum(trace.known(tensor) is not None for tensor in node.inputs):
        trace.refuse(node)  # the rank of an input is unknown
        return
    if not traced:
        return
    rank, axis = traced[0].ndim, int(attribute(node, "axis")) % traced[0].ndim
    fixed = np.full((1,) * rank, FIXED, np.int64)
    states = [fixed if part is None else part for part in parts]
    lengths = [_length(tensor, axis) for tensor in node.inputs]
    if any(length is None for length in lengths):
        trace.refuse(node)
        return
    common = np.broadcast_shapes(*((*s.shape[:axis], 1, *s.shape[axis + 1 :]) for s in states))
    wide = []
    for state, length in zip(states, lengths, strict=True):
        target = (*common[:axis], length, *common[axis + 1 :])
        wide.append(np.broadcast_to(state, target))
    trace.give(node.outputs[0], np.concatenate(wide, axis))


def _length(tensor: Tensor, axis: int) -> int | None:
    size = shape(tensor)
    length = None if size is None or axis >= len(size) else size[axis]
    return length if isinstance(length, int) else None


def _split(trace: Trace, node: Node, body: Body) -> None:
    ids = trace.full(node.inputs[0])
    axis = int(attribute(node, "axis", 0))
    lengths = [] if ids is None else [_length(output, axis % ids.ndim) for output in node.outputs]
    if ids is None or (ids.shape[axis] > 1 and None in lengths):
        trace.refuse(node)
        return
    start = 0
    for output, length in zip(node.outputs, lengths, strict=True):
        part = ids
        if ids.shape[axis] > 1 and length is not None:
            part = np.take(ids, np.arange(start, start + length), axis)
            start += length
        trace.give(output, part)


def _slice(trace: Trace, node: Node, body: Body) -> None:
    ids = trace.full(node.inputs[0])
    values = [constant(tensor) if tensor.name else None for tensor in node.inputs[1:]]
    if ids is None or len(values) < 2 or values[0] is None or values[1] is None:
        trace.refuse(node)
        return
    starts, ends = values[0].reshape(-1), values[1].reshape(-1)
    given = values[2] if len(values) > 2 else None
    axes = np.arange(len(starts)) if given is None else given.reshape(-1)
    steps = values[3] if len(values) > 3 else None
    strides = np.ones(len(starts), np.int64) if steps is None else steps.reshape(-1)
    size = shape(node.inputs[0]) or ()
    for axis, start, end, step in zip(axes.tolist(), starts.tolist(), ends.tolist(), strides.tolist(), strict=True):
        if ids.shape[axis] == 1:
            continue
        if size[axis] != ids.shape[axis] or step < 0:
            trace.refuse(node)
            return
        ids = np.take(ids, np.arange(ids.shape[axis])[slice(start, end, step)], axis)
    trace.give(node.outputs[0], ids)


def _gather(trace: Trace, node: Node, body: Body) -> None:
    """Gather with constant indices along one axis."""
    ids, places = trace.full(node.inputs[0]), constant(node.inputs[1])
    if ids is None or places is None:
        trace.refuse(node)
        return
    axis = int(attribute(node, "axis", 0)) % ids.ndim
    picked = places if ids.shape[axis] > 1 else np.zeros((1,) * places.ndim, np.int64)
    trace.give(node.outputs[0], np.take(ids, picked, axis))


def _pad(trace: Trace, node: Node, body: Body) -> None:
    """Zero padding has any scale; otherwise the padding must contain values of the same channel."""
    ids, mode = trace.full(node.inputs[0]), attribute(node, "mode", "constant")
    given = constant(node.inputs[1]) if len(node.inputs) > 1 else attribute(node, "pads")
    value = constant(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2].name else np.zeros(())
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3].name else None
    if ids is None or given is None or value is None or (mode == "constant" and value.any()):
        trace.refuse(node)
        return
    pads = np.asarray(given).reshape(2, -1)
    where = range(pads.shape[1]) if axes is None else [int(axis) % ids.ndim for axis in axes.reshape(-1)]
    widths = np.zeros((ids.ndim, 2), np.int64)
    widths[list(where)] = pads.T
    touched = [axis for axis in varies(ids) if widths[axis].any()]
    if touched and (mode != "constant" or (widths < 0).any()):
        trace.refuse(node)
        return
    for axis in touched:
        sides = []
        for width in widths[axis].tolist():
            rim = (*ids.shape[:axis], width, *ids.shape[axis + 1 :])
            sides.append(trace.ids.fresh(rim))
        ids = np.concatenate([sides[0], ids, sides[1]], axis)
    trace.give(node.outputs[0], ids)


def _resize(trace: Trace, node: Node, body: Body) -> None:
    """Weighted means of values of one channel."""
    ids = trace.full(node.inputs[0])
    before, after = shape(node.inputs[0]), shape(node.outputs[0])
    outside = attribute(node, "coordinate_transformation_mode", "") == "tf_crop_and_resize"
    if ids is None or before is None or after is None or outside:
        trace.refuse(node)
    elif all(isinstance(before[axis], int) and before[axis] == after[axis] for axis in varies(ids)):
        trace.give(node.outputs[0], ids)
    else:
        trace.refuse(node)


RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(POOLS | PICKS_MAX, _pool),
    **dict.fromkeys(REDUCES, _reduce),
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Pad": _pad,
    "Resize": _resize,
}
"""Rules by op type."""
