"""Sequences of tensors, as lists; exporters use them for chunk, unbind and stack with a dynamic count."""

from __future__ import annotations

from typing import Any

from sbonnx.torchnet.call import Call, Tensor, axis_of, ints, number

Sequence = list[Tensor]


def construct(call: Call, *parts: Tensor) -> Sequence:
    """ONNX SequenceConstruct."""
    return list(parts)


def empty(call: Call) -> Sequence:
    """ONNX SequenceEmpty."""
    return []


def at(call: Call, parts: Sequence, position: Any) -> Tensor:
    """ONNX SequenceAt."""
    return parts[int(number(position))]


def insert(call: Call, parts: Sequence, part: Tensor, position: Any = None) -> Sequence:
    """ONNX SequenceInsert; default: at the end."""
    place = len(parts) if position is None else axis_of(int(number(position)), len(parts))
    return [*parts[:place], part, *parts[place:]]


def erase(call: Call, parts: Sequence, position: Any = None) -> Sequence:
    """ONNX SequenceErase; default: the last tensor."""
    place = axis_of(-1 if position is None else int(number(position)), len(parts))
    return [*parts[:place], *parts[place + 1 :]]


def length(call: Call, parts: Sequence) -> Tensor:
    """ONNX SequenceLength."""
    return call.torch.tensor(len(parts))


def split(call: Call, x: Tensor, sizes: Any = None) -> Sequence:
    """ONNX SplitToSequence into parts of equal size, of given sizes, or of length 1."""
    axis = axis_of(call.integer("axis", 0), x.dim())
    if sizes is None:
        return list(x.unbind(axis) if not call.integer("keepdims", 1) else x.split(1, axis))
    one = sizes.dim() == 0 if hasattr(sizes, "dim") else not isinstance(sizes, (tuple, list))
    return list(x.split(int(number(sizes)) if one else ints(sizes), axis))


def concat(call: Call, parts: Sequence) -> Tensor:
    """ONNX ConcatFromSequence along an existing or a new axis."""
    join = call.torch.stack if call.integer("new_axis", 0) else call.torch.cat
    return join(parts, dim=call.integer("axis", 0))
