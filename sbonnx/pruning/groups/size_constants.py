"""Rewrites constants and attributes that hold sizes of axes from which channels are removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.graph import Body, Node, Tensor
from sbonnx.graph.edit import Names, add_constant, replace_input, set_constant
from sbonnx.graph.query import attribute, constant, optional_input, shape
from sbonnx.pruning.groups.dimensions import along_axis
from sbonnx.pruning.groups.removal_trace import target_places
from sbonnx.spec import Array


@dataclass(frozen=True)
class Remaining:
    """Entries that remain of each tensor.

    Attributes:
        masks: by tensor name, bool; broadcasts against the tensor. Tensors without an entry are unchanged.
        names: allocator of names of constants.
        body: the scope of the nodes.
    """

    masks: Mapping[str, Array]
    names: Names
    body: Body

    def of(self, tensor: Tensor) -> Array | None:
        """Return the mask of a tensor with all its axes; None if it is unchanged."""
        mask, size = self.masks.get(tensor.name), shape(tensor)
        if mask is None or mask.all() or size is None:
            return None
        return mask.reshape((1,) * (len(size) - mask.ndim) + mask.shape)

    def counts(self, tensor: Tensor) -> dict[int, int]:
        """Return the number of remaining entries along each axis of a tensor that loses some."""
        mask = self.of(tensor)
        if mask is None:
            return {}
        lines = {axis: along_axis(mask, axis) for axis in range(mask.ndim)}
        return {axis: int(line.sum()) for axis, line in lines.items() if not line.all()}


def _target(left: Remaining, node: Node) -> None:
    """Target of Reshape: sizes that are copied from the input (0) or along the channels are written out."""
    counts, lost = left.counts(node.outputs[0]), left.counts(node.inputs[0])
    for axis, dim in enumerate(shape(node.outputs[0]) or ()):
        if not (axis in counts or axis in lost):
            continue
        place = (target_places(node) or [])[axis]
        if place is None:
            continue  # a computed size of another axis
        owner, index, position = place
        sizes = np.array(constant(owner.inputs[index]))
        old = int(sizes.reshape(-1)[position])
        if axis in counts and old != -1:
            sizes.reshape(-1)[position] = counts[axis]
        elif axis not in counts and old == 0 and isinstance(dim, int):
            sizes.reshape(-1)[position] = dim
        set_constant(owner, index, sizes, left.names)


def _expanded(left: Remaining, node: Node) -> None:
    target = constant(node.inputs[1])
    if target is None:
        return
    sizes, size = target.copy().reshape(-1), len(shape(node.outputs[0]) or ())
    for axis, count in left.counts(node.outputs[0]).items():
        place = axis - (size - len(sizes))
        if place >= 0 and sizes[place] != 1:
            sizes[place] = count
    set_constant(node, 1, sizes, left.names)


def _resized(left: Remaining, node: Node) -> None:
    sizes, counts = constant(optional_input(node, 3)), left.counts(node.outputs[0])
    if sizes is None or not counts:
        return
    given, size = attribute(node, "axes"), len(shape(node.inputs[0]) or ())
    axes = list(range(len(sizes))) if given is None else [int(axis) % size for axis in given]
    new = sizes.copy()
    for place, axis in enumerate(axes):
        new[place] = counts.get(axis, new[place])
    set_constant(node, 3, new, left.names)


def _split(left: Remaining, node: Node) -> None:
    """Lengths of the parts, as an input, equal or not."""
    size = len(shape(node.inputs[0]) or ())
    axis = int(attribute(node, "axis", 0)) % max(size, 1)
    if axis not in left.counts(node.inputs[0]):
        return
    lengths = [left.counts(output).get(axis, _length(output, axis)) for output in node.outputs]
    sizes = np.array(lengths, np.int64)
    node.attrs.pop("num_outputs", None)
    if optional_input(node, 1) is not None:
        set_constant(node, 1, sizes, left.names)
        return
    constant = add_constant(left.body, f"{node.name}.split", sizes, left.names)
    if len(node.inputs) > 1:  # optional input with an empty name
        replace_input(node, 1, constant)
    else:
        node.inputs.append(constant)


def _length(tensor: Tensor, axis: int) -> int:
    size = (shape(tensor) or ())[axis]
    assert isinstance(size, int)
    return size


def _sliced(left: Remaining, node: Node) -> None:
    mask = left.of(node.inputs[0])
    starts, ends = constant(node.inputs[1]), constant(node.inputs[2])
    if mask is None or starts is None or ends is None:
        return
    given = constant(optional_input(node, 3))
    axes = range(len(starts)) if given is None else [int(axis) % mask.ndim for axis in given.reshape(-1)]
    first, last = starts.copy().reshape(-1), ends.copy().reshape(-1)
    for place, axis in enumerate(axes):
        line = along_axis(mask, axis)
        if not line.all():
            begin, end, _ = slice(int(first[place]), int(last[place])).indices(len(line))
            first[place] = line[:begin].sum()
            last[place] = first[place] + line[begin:end].sum()
    set_constant(node, 1, first, left.names)
    set_constant(node, 2, last, left.names)


def _gathered(left: Remaining, node: Node) -> None:
    """Indices along the channels: those of removed channels are dropped, the others renumbered."""
    mask, places = left.of(node.inputs[0]), constant(node.inputs[1])
    if mask is None or places is None:
        return
    line = along_axis(mask, int(attribute(node, "axis", 0)) % mask.ndim)
    if line.all():
        return
    number, at = np.cumsum(line) - 1, places % len(line)
    new = number[at] if places.ndim == 0 else number[at[line[at]]]
    set_constant(node, 1, new.astype(places.dtype), left.names)


def _padded(left: Remaining, node: Node) -> None:
    mask = left.of(node.outputs[0])
    pads = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if mask is None or pads is None:
        return
    given = constant(optional_input(node, 3))
    widths = pads.copy().reshape(2, -1)
    axes = range(mask.ndim) if given is None else [int(axis) % mask.ndim for axis in given.reshape(-1)]
    for place, axis in enumerate(axes):
        line = along_axis(mask, axis)
        if not line.all():
            begin, end = (int(width) for width in widths[:, place])
            widths[:, place] = line[:begin].sum(), line[len(line) - end :].sum()
    set_constant(node, 1, widths.reshape(-1), left.names)


SIZES: Final[dict[str, Callable[[Remaining, Node], None]]] = {
    "Reshape": _target,
    "Expand": _expanded,
    "Resize": _resized,
    "Split": _split,
    "Slice": _sliced,
    "Gather": _gathered,
    "Pad": _padded,
}
"""By op type. `sbonnx.pruning.groups.removal_rules` gives channels to these ops only if their sizes are constants."""
