"""Data movement, ops that return shapes, and sequences of tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sbonnx.torchnet.call import Call, Tensor, Unfit, axis_of, number, numbers


def reshape(call: Call, x: Tensor, shape: Tensor | None = None) -> Tensor:
    """ONNX Reshape: 0 copies the input dimension, unless allowzero is set."""
    wanted = call.listed("shape", shape) or []
    if not call.integer("allowzero", 0):
        wanted = [x.shape[at] if size == 0 else size for at, size in enumerate(wanted)]
    return x.reshape(wanted)


def flatten(call: Call, x: Tensor) -> Tensor:
    """ONNX Flatten to a matrix: axes before `axis` by the other axes."""
    axis = axis_of(call.integer("axis", 1), x.dim())
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def transpose(call: Call, x: Tensor) -> Tensor:
    order = call.integers("perm")
    return x.permute(order if order is not None else list(range(x.dim()))[::-1])


def squeeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = call.listed("axes", axes)
    gone = {axis_of(axis, x.dim()) for axis in chosen} if chosen is not None else None
    kept = [n for at, n in enumerate(x.shape) if (at not in gone if gone is not None else n != 1)]
    return x.reshape(kept)


def unsqueeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = call.listed("axes", axes) or []
    rank = x.dim() + len(chosen)
    for axis in sorted(axis_of(axis, rank) for axis in chosen):
        x = x.unsqueeze(axis)
    return x


def split(call: Call, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    """ONNX Split into the given sizes, else into equal parts, one for each output; the last one may be smaller."""
    axis = axis_of(call.integer("axis", 0), x.dim())
    parts = call.listed("split", sizes)
    if parts is None:
        count = call.integer("num_outputs", call.outputs)
        part = -(-x.shape[axis] // count)
        parts = [part] * (count - 1) + [x.shape[axis] - part * (count - 1)]
    return tuple(call.torch.split(x, parts, dim=axis))


def slice_(
    call: Call,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    """ONNX Slice, with starts and ends as attributes before opset 10; supports negative steps."""
    begins, stops = call.listed("starts", starts) or [], call.listed("ends", ends) or []
    along = call.listed("axes", axes) or list(range(len(begins)))
    strides = [1] * len(begins) if steps is None else numbers(steps)
    for axis, begin, stop, step in zip(along, begins, stops, strides, strict=True):
        axis = axis_of(axis, x.dim())
        end = None if step < 0 and stop < -x.shape[axis] else stop  # a negative step may run past the first value
        picked = range(x.shape[axis])[slice(begin, end, step)]
        if step == 1:
            x = x.narrow(axis, picked.start, len(picked))
        else:
            x = x.index_select(axis, call.torch.tensor(list(picked), dtype=call.torch.int64, device=x.device))
    return x


def nonnegative(call: Call, indices: Tensor, x: Tensor, size: Any) -> Tensor:
    """Return non-negative indices on the device of x."""
    picks = indices.to(x.device).to(call.torch.int64)
    return call.torch.where(picks < 0, picks + size, picks)


def gather(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    """ONNX Gather: negative indices count from the end."""
    axis = axis_of(call.integer("axis", 0), x.dim())
    picks = nonnegative(call, indices, x, x.shape[axis])
    y = x.index_select(axis, picks.reshape(-1))
    return y.reshape([*x.shape[:axis], *picks.shape, *x.shape[axis + 1 :]])


def gather_elements(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = axis_of(call.integer("axis", 0), x.dim())
    picks = nonnegative(call, indices, x, x.shape[axis])
    if any(n != m for at, (n, m) in enumerate(zip(picks.shape, x.shape, strict=True)) if at != axis):
        for at, n in enumerate(picks.shape):
            x = x if at == axis else x.narrow(at, 0, n)
    return call.torch.gather(x, axis, picks)


def depth_to_space(call: Call, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    block = call.integer("blocksize", 1)
    if call.text("mode", "DCR") == "DCR":
        y = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // block**2, block, block, h, w).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(n, c // block**2, h * block, w * block)


def space_to_depth(call: Call, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    block = call.integer("blocksize", 1)
    order = (0, 3, 5, 1, 2, 4) if call.text("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    y = x.reshape(n, c, h // block, block, w // block, block).permute(order)
    return y.reshape(n, c * block**2, h // block, w // block)


def pad(
    call: Call, x: Tensor, pads: Tensor | None = None, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    """ONNX Pad with modes constant, reflect, edge and wrap; negative pads crop.

    Raises:
        Unfit: another mode.
    """
    given = call.listed("pads", pads) or []
    along = range(x.dim()) if axes is None else [axis_of(axis, x.dim()) for axis in numbers(axes)]
    half = len(given) // 2
    sides = {axis: (given[at], given[at + half]) for at, axis in enumerate(along)}
    mode = call.text("mode", "constant")
    fill = call.number("value", 0.0) if value is None else number(value)
    for axis, (before, after) in sides.items():
        size = x.shape[axis]
        x = x.narrow(axis, max(-before, 0), size - max(-before, 0) - max(-after, 0))
        before, after = max(before, 0), max(after, 0)
        if mode != "constant" and (before or after):
            picks = _outside(mode, before, x.shape[axis], after)
            x = x.index_select(axis, call.torch.tensor(picks, dtype=call.torch.int64, device=x.device))
    if mode != "constant":
        return x
    flat = [max(side, 0) for axis in reversed(range(x.dim())) for side in sides.get(axis, (0, 0))]
    return call.torch.nn.functional.pad(x, flat, value=fill)


def _outside(mode: str, before: int, size: int, after: int) -> list[int]:
    """Return the source index of each position of a padded axis."""
    wide = np.arange(-before, size + after)
    if mode == "edge":
        sources = np.clip(wide, 0, size - 1)
    elif mode == "reflect":
        period = max(2 * (size - 1), 1)
        sources = np.abs((wide + size - 1) % period - (size - 1))
    elif mode == "wrap":
        sources = wide % size
    else:
        raise Unfit(f"Pad mode '{mode}' is not supported")
    return [int(at) for at in sources]


def shape(call: Call, x: Tensor) -> Tensor:
    """ONNX Shape, or its part from start to end. The result is on the CPU, because its values are read."""
    part = list(x.shape)[call.integer("start", 0) : call.attributes.get("end")]
    return call.torch.tensor(part, dtype=call.torch.int64)


def constant_of_shape(call: Call, wanted: Tensor) -> Tensor:
    value = call.attributes.get("value")
    filled = np.zeros((), np.float32) if value is None else np.asarray(value).reshape(())
    return call.torch.from_numpy(np.array(filled)).expand(numbers(wanted))


def range_(call: Call, start: Tensor, limit: Tensor, step: Tensor) -> Tensor:
    """ONNX Range. For Python numbers, the type is the attribute dtype, the name of a torch dtype."""
    kind = call.attributes.get("dtype") or (start.dtype if hasattr(start, "dtype") else None)
    kind = getattr(call.torch, kind) if isinstance(kind, str) else kind
    return call.torch.arange(number(start), number(limit), number(step), dtype=kind)


Sequence = list[Tensor]
"""ONNX sequence: exporters use it for chunk, unbind and stack with a dynamic count."""


def sequence_insert(call: Call, parts: Sequence, part: Tensor, position: Any = None) -> Sequence:
    """ONNX SequenceInsert; default: at the end."""
    place = len(parts) if position is None else axis_of(int(number(position)), len(parts))
    return [*parts[:place], part, *parts[place:]]


def sequence_erase(call: Call, parts: Sequence, position: Any = None) -> Sequence:
    """ONNX SequenceErase; default: the last tensor."""
    place = axis_of(-1 if position is None else int(number(position)), len(parts))
    return [*parts[:place], *parts[place + 1 :]]


def split_to_sequence(call: Call, x: Tensor, sizes: Any = None) -> Sequence:
    """ONNX SplitToSequence into parts of equal size, of given sizes, or of length 1."""
    axis = axis_of(call.integer("axis", 0), x.dim())
    if sizes is None:
        return list(x.unbind(axis) if not call.integer("keepdims", 1) else x.split(1, axis))
    equal = sizes.dim() == 0 if hasattr(sizes, "dim") else not isinstance(sizes, (tuple, list))
    return list(x.split(int(number(sizes)) if equal else numbers(sizes), axis))


def concat_from_sequence(call: Call, parts: Sequence) -> Tensor:
    """ONNX ConcatFromSequence along an existing or a new axis."""
    join = call.torch.stack if call.integer("new_axis", 0) else call.torch.cat
    return join(parts, dim=call.integer("axis", 0))
