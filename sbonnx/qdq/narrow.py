"""Removal of zero channels that were added for onnxruntime's integer kernels, from float convolutions.

`backends.onnxruntime.alignment` widens tensors between convolutions with zero weights and biases: the added channels
hold zeros, and only zero weights read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sbonnx.graph import Constant, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import PADS, RECTIFIERS
from sbonnx.spec import Array

LANES: Final = 16
"""Widened channel counts are multiples of this, and fewer channels than this were added."""

FILL: Final = 2


def narrow(graph: Graph, convs: Iterable[Node]) -> int:
    """Remove added channels. In place; return the number of changed convolutions.

    Args:
        convs: convolutions whose weights were quantized by sbonnx; no others are changed.
    """
    known = {id(node): node for node in convs}
    if not known:
        return 0
    changed = sum(_unpadded(graph, pad, known) for pad in list(query.all_nodes(graph)) if pad.op in PADS)
    leaving = {id(tensor) for _, body in query.scopes(graph) for tensor in body.outputs}
    seen: set[int] = set()
    for node in known.values():
        if not query.is_depthwise(node) or id(node) in seen:
            continue
        region = _region(node, known, leaving)
        if region is None:
            continue
        seen.update(region.writers)
        by = min((_dead(writer) for writer in region.writers.values()), default=0)
        if 0 < by < LANES:
            changed += _cut(graph, region, by)
    return changed


# --- padding before convolutions --------------------------------------------------------------------------------------


def _unpadded(graph: Graph, pad: Node, known: dict[int, Node]) -> int:
    """Bypass a Pad that adds zero channels: its convolutions read its input and lose the matching weights."""
    by = _added_channels(pad)
    readers = query.readers(pad.outputs[0])
    convs = [node for node, index in readers if index == 0 and id(node) in known and node.attrs.get("group", 1) == 1]
    whole = len(convs) == len(readers) and all(query.constant(node.inputs[1]) is not None for node in convs)
    if not by or not convs or not whole or any(tensor is pad.outputs[0] for tensor in graph.outputs):
        return 0
    for node in convs:
        edit.replace_input(node, 0, pad.inputs[0])
        _slice(graph, node, 1, 1, by)
    return len(convs)


def _added_channels(pad: Node) -> int:
    """Return the number of zero channels that a Pad appends, or 0 if it does anything else."""
    pads = query.constant(pad.inputs[1]) if len(pad.inputs) > 1 else None
    fill = query.constant(pad.inputs[FILL]) if len(pad.inputs) > FILL and not pad.inputs[FILL].is_empty() else None
    if pads is None or pads.size < 4 or len(pad.inputs) > FILL + 1 or (fill is not None and fill.any()):
        return 0
    if query.attribute(pad, "mode", "constant") not in ("constant", b"constant"):
        return 0
    behind = pads.size // 2 + 1
    others = np.delete(pads, behind)
    return 0 if others.any() else max(int(pads[behind]), 0)


# --- between convolutions ---------------------------------------------------------------------------------------------


@dataclass
class Region:
    """Tensors with the same number of channels, and the convolutions that write and read them."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    writers: dict[int, Node] = field(default_factory=dict)
    readers: dict[int, Node] = field(default_factory=dict)


def _region(start: Node, known: dict[int, Node], leaving: set[int]) -> Region | None:
    """Collect the tensors with the channel count of a depthwise convolution; None if other ops read or write one."""
    region = Region()
    waiting: list[Tensor] = [start.inputs[0], start.outputs[0]]
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in region.tensors:
            continue
        writer = query.producer(tensor)
        if writer is None or id(tensor) in leaving:
            return None
        region.tensors[id(tensor)] = tensor
        ends = [(node, index) for node, index in query.readers(tensor)]
        if writer.op in RECTIFIERS:
            waiting.append(writer.inputs[0])
        elif id(writer) in known:
            region.writers[id(writer)] = writer
            waiting += [writer.inputs[0]] if query.is_depthwise(writer) else []
        else:
            return None
        for node, index in ends:
            if index == 0 and node.op in RECTIFIERS:
                waiting.append(node.outputs[0])
            elif index == 0 and id(node) in known and (query.is_depthwise(node) or node.attrs.get("group", 1) == 1):
                region.readers[id(node)] = node
                waiting += [node.outputs[0]] if query.is_depthwise(node) else []
            else:
                return None
    return region


def _dead(node: Node) -> int:
    """Count the trailing output channels with zero weights and biases; 0 if the width is not a multiple of `LANES`."""
    values = [query.constant(tensor) for tensor in node.inputs[1:3] if not tensor.is_empty()]
    if any(value is None for value in values):
        return 0
    flat = [np.asarray(value).reshape(np.asarray(value).shape[0], -1).any(axis=1) for value in values]
    live = np.flatnonzero(np.logical_or.reduce(flat))
    width = flat[0].size
    return 0 if width % LANES or not live.size else width - 1 - int(live[-1])


def _cut(graph: Graph, region: Region, by: int) -> int:
    for node in region.writers.values():
        if query.is_depthwise(node):
            node.attrs["group"] = int(node.attrs["group"]) - by
        for index in range(1, len(node.inputs)):
            if not node.inputs[index].is_empty():
                _slice(graph, node, index, 0, by)
    for key, node in region.readers.items():
        if key not in region.writers:
            _slice(graph, node, 1, 1, by)
    for tensor in region.tensors.values():
        shape = query.shape(tensor)
        if isinstance(tensor, Variable) and shape is not None and isinstance(shape[1], int):
            tensor.shape = [size if axis != 1 else shape[1] - by for axis, size in enumerate(shape)]
    return len({**region.writers, **region.readers})


def _slice(graph: Graph, node: Node, index: int, axis: int, by: int) -> None:
    """Cut the last `by` entries of an axis from input `index` of a node; keep its name if nothing else reads it."""
    old = node.inputs[index]
    value: Array = np.asarray(query.constant(old))
    cut = value[tuple(slice(0, -by) if at == axis else slice(None) for at in range(value.ndim))]
    if len(query.readers(old)) == 1:
        name, old.name = old.name, f"{old.name}/wide"
        new = Constant(name, np.ascontiguousarray(cut))
    else:
        new = edit.add_constant(graph, old.name, np.ascontiguousarray(cut), edit.Names(graph))
    edit.replace_input(node, index, new)
