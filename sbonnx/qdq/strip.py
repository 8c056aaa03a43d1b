"""Removal of Q/DQ pairs from a graph, with what pairs replaced or required.

A Relu or Clip that another tool deleted because the zero point replaces it is restored: with the zero point at the
lowest code, a QuantizeLinear maps all negative values to 0. Zero channels that
`backends.onnxruntime.convolutions` added for integer kernels are removed: only zero weights read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, edit, node_metadata, query
from sbonnx.ops import (
    ADDS,
    BOUNDS,
    CONCATS,
    DEQUANTIZE,
    MOVES_DATA,
    MULTIPLIES,
    NOT_NEGATIVE,
    PADS,
    PICKS_MAX,
    POOLS,
    QDQ,
    QUANTIZE,
    RECTIFIED,
    RECTIFIERS,
    RESIZES,
)
from sbonnx.planning import BITS
from sbonnx.qdq.arithmetic import dequantized, is_integer, limits, numbers
from sbonnx.qdq.from_qoperator import lift
from sbonnx.qdq.from_qoperator import unfold as unfold_integer_ops
from sbonnx.spec import Array

STORED = ("_quantized", "_rounded")
"""Suffixes of the names of stored weights; the float weight had the name without the suffix."""


def source_of(dequantize: Node) -> tuple[Tensor, bool]:
    """Return the source tensor of a pair, before its QuantizeLinear and sbonnx's Clip, and whether it holds codes."""
    tensor = dequantize.inputs[0]
    stored = query.packed(tensor)
    if stored is not None:
        return stored, True
    producer = query.producer(tensor)
    if producer is not None and producer.op in BOUNDS and BITS in producer.attrs:
        producer = query.producer(producer.inputs[0])
    if producer is None or producer.op not in QUANTIZE:
        return tensor, True
    tensor = producer.inputs[0]
    producer = query.producer(tensor)
    while producer is not None and producer.op in BOUNDS and BITS in producer.attrs:
        tensor = producer.inputs[0]
        producer = query.producer(tensor)
    return tensor, False


def strip(graph: Graph, *, unfold: bool = False) -> int:
    """Remove every pair: activations are rewired, weights and biases become float constants. In place.

    Pairs written by `qdq.insert` are removed completely: the same nodes, order and names as before, with the weights
    rounded to their quantized values. Pairs of other tools are removed in every form: per-channel, block-wise, small
    floats, and scales that are themselves quantized. A Relu or Clip that another tool deleted because the zero point
    replaces it is restored. Ops that moved codes move floats, and zero channels that were added for integer kernels are
    removed. A DequantizeLinear stays if its integers or its parameters are computed.

    Args:
        unfold: convert integer operators (QLinearConv, MatMulInteger, ...) to float first, see `qdq.unfold`.

    Returns:
        Number of removed DequantizeLinear nodes.
    """
    if unfold:
        unfold_integer_ops(graph)
    lifted = lift(graph, "remove pairs").nodes
    work = _Strip(graph)
    count = sum(work.scope(body) for _, body in query.scopes(graph))
    edit.sweep(graph)
    if work.restored or lifted:
        edit.sort(graph)
    if remove_added_channels(graph, work.convs):
        edit.sweep(graph)
    return count


class _Strip:
    """State of one removal: names, float constants and restored activations."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = edit.Names(graph)
        self.floats: dict[str, Constant] = {}
        self.restored: dict[int, Tensor] = {}
        self.convs: list[Node] = []

    def scope(self, body: Body) -> int:
        count = 0
        for node in list(body.nodes):
            if node.op in DEQUANTIZE and node.outputs:
                tensor = self.float_of(node, body)
                if tensor is not None:
                    if BITS in node.attrs:
                        self.convs += [
                            conv for conv, index in query.readers(node.outputs[0]) if conv.op == "Conv" and index == 1
                        ]
                    edit.replace_all_uses(node.outputs[0], tensor, graph=body)
                    count += 1
        return count

    def float_of(self, node: Node, body: Body) -> Tensor | None:
        """Return the tensor that replaces the output of a DequantizeLinear, or None if the node has to stay."""
        tensor, codes = source_of(node)
        if codes:
            value = query.unpacked(node.inputs[0])
            floats = None if value is None else dequantized(node, value)
            return None if floats is None else self.constant(node, tensor, floats)
        if isinstance(tensor, Constant):
            value = query.constant(tensor)
            return None if value is None else self.constant(node, tensor, value)
        quantize = query.producer(node.inputs[0])
        if quantize is None or lost(quantize) is None:
            return tensor
        if id(quantize) not in self.restored:
            self.restored[id(quantize)] = restore(quantize, body, self.names)
        return self.restored[id(quantize)]

    def constant(self, node: Node, stored: Tensor, values: Array) -> Constant:
        """Return a float constant with the weight's original name, if that is known and free."""
        stem = node_metadata(self.graph, node.name).get("sbonnx.tensor") or str(stored.name)
        for ending in STORED:
            stem = stem.removesuffix(ending)
        if stem == stored.name:
            if values is query.constant(stored) and isinstance(stored, Constant):
                return stored
            stem = f"{stem}_float"
        earlier = self.floats.get(stem)
        if earlier is not None and np.array_equal(query.constant(earlier), values):  # type: ignore[arg-type]
            return earlier
        floats = edit.add_constant(self.graph, stem, values, self.names)
        self.floats.setdefault(stem, floats)
        return floats


LANES: Final = 16
"""Widened channel counts are multiples of this, and fewer channels than this were added."""

FILL: Final = 2


def remove_added_channels(graph: Graph, convs: Iterable[Node]) -> int:
    """Remove added channels. In place; return the number of changed convolutions.

    Args:
        convs: convolutions whose weights were quantized by sbonnx; no others are changed.
    """
    convs_by_id = {id(node): node for node in convs}
    if not convs_by_id:
        return 0
    changed = sum(_unpadded(graph, pad, convs_by_id) for pad in list(query.all_nodes(graph)) if pad.op in PADS)
    leaving = {id(tensor) for _, body in query.scopes(graph) for tensor in body.outputs}
    seen: set[int] = set()
    for node in convs_by_id.values():
        if not query.is_depthwise(node) or id(node) in seen:
            continue
        region = _region(node, convs_by_id, leaving)
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
    fill = query.constant(query.optional_input(pad, FILL))
    if pads is None or pads.size < 4 or len(pad.inputs) > FILL + 1 or (fill is not None and fill.any()):
        return 0
    if query.attribute(pad, "mode", "constant") not in ("constant", b"constant"):
        return 0
    behind = pads.size // 2 + 1
    others = np.delete(pads, behind)
    return 0 if others.any() else max(int(pads[behind]), 0)


# --- between convolutions ---------------------------------------------------------------------------------------------


@dataclass
class WidenedTensors:
    """Tensors with the same number of channels, and the convolutions that write and read them."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    writers: dict[int, Node] = field(default_factory=dict)
    readers: dict[int, Node] = field(default_factory=dict)


def _region(start: Node, known: dict[int, Node], leaving: set[int]) -> WidenedTensors | None:
    """Collect the tensors with the channel count of a depthwise convolution; None if other ops read or write one."""
    region = WidenedTensors()
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


def _cut(graph: Graph, region: WidenedTensors, by: int) -> int:
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


SIX: Final = 6.0
"""Upper bound of the Clip in mobile networks (ReLU6): a range that ends here is attributed to one, others to a Relu."""

CLOSE: Final = 1e-3
"""Relative tolerance around 6 for the end of a range: scales are single precision, calibrated on saturated data."""

DEPTH: Final = 64
"""Maximum number of preceding ops to search for a sign."""

_PASSES: Final = MOVES_DATA | PICKS_MAX | POOLS | QDQ
"""Ops whose output has the sign of their first input."""

_JOINS: Final = ADDS | MULTIPLIES | CONCATS
"""Ops whose output is not negative if no input is."""


def never_negative(tensor: Tensor, depth: int = DEPTH) -> bool:
    """Return whether the ops before a tensor provably keep it at 0 or above."""
    node = query.producer(tensor)
    if node is None or depth == 0:
        return _at_least_0(tensor)
    if node.op in NOT_NEGATIVE:
        return True
    if node.op in BOUNDS and node.op != "Min":
        others = node.inputs[1:2] if node.op == "Clip" else node.inputs
        written = float(node.attrs.get("min", -1.0))  # of a Clip before opset 11
        return written >= 0 or any(not operand.is_empty() and _at_least_0(operand) for operand in others)
    if node.op in _PASSES or (node.op in RESIZES and node.attrs.get("mode", "nearest") != "cubic"):
        return never_negative(node.inputs[0], depth - 1)
    return node.op in _JOINS and all(never_negative(operand, depth - 1) for operand in node.inputs)


def _at_least_0(tensor: Tensor) -> bool:
    value = query.constant(tensor)
    return value is not None and value.size > 0 and bool((value >= 0).all())


def lost(quantize: Node) -> tuple[float, float | None] | None:
    """Return the bounds of the Relu (0, None) or Clip that a QuantizeLinear replaces, or None.

    Pairs written by sbonnx come after the activations of the model, so none is lost there unless an attribute says so;
    graph inputs have none.
    """
    removed = quantize.attrs.get(RECTIFIED)
    if removed is not None:
        return float(removed[0]), float(removed[1]) if len(removed) > 1 else None
    parameters = numbers(quantize)
    if (
        BITS in quantize.attrs
        or parameters is None
        or parameters.scale.size != 1
        or not is_integer(parameters.zero.dtype)
    ):
        return None
    low, high = limits(parameters.zero.dtype)
    zero = int(parameters.zero.reshape(-1)[0])
    source = quantize.inputs[0]
    if zero != low or query.producer(source) is None or never_negative(source):
        return None
    top = float((high - low) * parameters.scale.astype(np.float64).reshape(-1)[0])
    return 0.0, SIX if abs(top - SIX) <= CLOSE * SIX else None


def restore(quantize: Node, scope: Body, names: edit.Names) -> Tensor:
    """Restore the Relu or Clip that a QuantizeLinear replaces, and return its output: the float tensor to quantize.

    In place. The new node is appended to `scope`, which has to be sorted afterwards.
    """
    source: Tensor = quantize.inputs[0]
    bounds = lost(quantize)
    if bounds is None:
        return source
    low, high = bounds
    if high is None:
        node = edit.add_node(scope, "Relu", [source], names=names, stem=f"{source.name}/Relu")
    else:
        kind = query.dtype(source) or np.dtype(np.float32)
        ends = [edit.add_constant(scope, f"{source.name}/{which}", np.array(end, kind), names)
                for which, end in (("low", low), ("high", high))]  # fmt: skip
        node = edit.add_node(scope, "Clip", [source, *ends], names=names, stem=f"{source.name}/Clip")
    out: Tensor = node.outputs[0]
    shape = query.shape(source)
    out.dtype, out.shape = query.dtype(source), None if shape is None else list(shape)
    return out
