"""Rules for the removal of channels: one small function per kind of op, in one table.

A channel is pinned (never removed) where an op would compute something else for the channels that remain: a norm or
softmax over the channels, a product that sums over them, an op without a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from sbonnx.channels import moving_ops
from sbonnx.channels.ids import varies
from sbonnx.channels.linear_ops import give_outputs, input_ids, layer_of
from sbonnx.graph import Body, Node, Tensor
from sbonnx.graph.query import attribute, constant, optional_input, rank, readers, shape
from sbonnx.ops import LINEAR, PICKS_MAX, POINTWISE, POOLS, REDUCES_ANY, SOFTMAX
from sbonnx.pruning.groups.removal_trace import LinearSides, RemovalTrace, target_places
from sbonnx.spec import Array

Rule = Callable[[RemovalTrace, Node, Body], None]


def _linear(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Linear op: new ids; a depthwise convolution passes its ids on, groups lose the same positions each."""
    layer = layer_of(trace, node)
    if layer is None:
        return
    inputs, group = input_ids(trace, node, layer), layer.group
    each_in, each_out = layer.in_channels // group, layer.out_channels // group
    apart = group > 1 and each_in == 1
    if apart:
        outputs = np.repeat(inputs, each_out)
    else:
        outputs = trace.ids.fresh((layer.out_channels,))
        if group > 1:
            why = f"it is removed together with other groups of '{node.name}'"
            for ids in (inputs.reshape(group, each_in), outputs.reshape(group, each_out)):
                trace.ids.unite(ids[:1], ids, why)
    trace.linears.append(LinearSides(node, layer, inputs, outputs))
    index = LINEAR[node.op].weight
    if node.op == "ConvTranspose" and not apart:
        trace.cut(node, index, layer.out_axis, outputs[:each_out])
    elif node.op != "ConvTranspose":
        trace.cut(node, index, layer.out_axis, outputs)
    if node.op != "Conv" or not apart:
        trace.cut(node, index, layer.in_axis, inputs[:each_in] if node.op == "Conv" else inputs)
    bias = optional_input(node, LINEAR[node.op].bias)
    if bias is not None and bias.shape and bias.shape[-1] > 1:
        trace.cut(node, LINEAR[node.op].bias or 0, len(bias.shape) - 1, outputs)
    give_outputs(trace, node, layer, outputs)


def _pointwise(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Element-wise op: channels that are combined are removed together.

    A tensor of size 1 along the channels broadcasts and passes. An activation without ids pins the others.
    """
    size = rank(node.outputs[0])
    given = [(tensor, trace.known(tensor)) for tensor in node.inputs if tensor.name]
    if all(ids is None for _, ids in given):
        return
    full = [trace.full(tensor) for tensor, ids in given if ids is not None]
    if size is None or any(ids is None for ids in full):
        trace.refuse(node)
        return
    wide = {id(tensor): _aligned(ids, size) for tensor, ids in zip(_known(given), full, strict=True) if ids is not None}
    axes = {axis for ids in wide.values() for axis in varies(ids)}
    result: Array | None = None
    for tensor, ids in given:
        if ids is None:
            continue
        if _broadcasts(tensor, size, axes):
            trace.keep(tensor, f"{node.op} '{node.name}' combines it with all channels")
            continue
        why = f"{node.op} '{node.name}' combines it with channels that are pinned"
        one = wide[id(tensor)]
        result = one if result is None else trace.ids.unite(result, one, why)
    if result is None:
        return
    for index, tensor in enumerate(node.inputs):
        if tensor.name and trace.known(tensor) is None:
            _other_operand(trace, node, index, result)
    trace.give(node.outputs[0], result)


def _known(given: list[tuple[Tensor, Array | None]]) -> list[Tensor]:
    return [tensor for tensor, ids in given if ids is not None]


def _aligned(ids: Array, size: int) -> Array:
    """Return ids with `size` axes: broadcasting aligns the last ones."""
    return ids.reshape((1,) * (size - ids.ndim) + ids.shape)


def _broadcasts(tensor: Tensor, size: int, axes: set[int]) -> bool:
    """Return whether a tensor has one entry along each of these axes of an output with `size` axes."""
    dims = shape(tensor)
    if dims is None:
        return False
    dims = (1,) * (size - len(dims)) + tuple(dims)
    return bool(axes) and all(dims[axis] == 1 for axis in axes)


def _other_operand(trace: RemovalTrace, node: Node, index: int, ids: Array) -> None:
    """Slice a constant operand along `ids`; an activation without ids pins them unless it broadcasts."""
    tensor = node.inputs[index]
    values, axes = constant(tensor), varies(ids)
    if values is None:
        if not _broadcasts(tensor, ids.ndim, set(axes)):
            trace.ids.pin(ids, f"{node.op} '{node.name}' combines it with '{tensor.name}', whose channels are pinned")
        return
    for axis in axes:
        place = axis - (ids.ndim - values.ndim)
        if place >= 0 and values.shape[place] > 1:
            trace.cut(node, index, place, np.moveaxis(ids, axis, 0).reshape(ids.shape[axis], -1)[:, 0])


def _batch_norm(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Norm with its own numbers for each channel of axis 1, which are sliced."""
    ids = trace.full(node.inputs[0])
    vectors = [constant(tensor) for tensor in node.inputs[1:]]
    if ids is None or set(varies(ids)) - {1} or any(vector is None for vector in vectors) or len(node.outputs) > 1:
        trace.refuse(node)
        return
    if varies(ids):
        for index in range(1, len(node.inputs)):
            trace.cut(node, index, 0, ids.reshape(-1))
    trace.give(node.outputs[0], ids)


def _last_axes_norm(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Norm over the axes from `axis` on; channels on the axes before it pass."""
    ids = trace.full(node.inputs[0])
    if ids is None or len(node.outputs) > 1:
        trace.refuse(node)
    elif any(axis >= int(attribute(node, "axis", -1)) % ids.ndim for axis in varies(ids)):
        trace.refuse(node, f"{node.op} '{node.name}' normalizes over it")
    else:
        trace.give(node.outputs[0], ids)


def _softmax(trace: RemovalTrace, node: Node, body: Body) -> None:
    ids = trace.full(node.inputs[0])
    if ids is None or int(attribute(node, "axis", -1)) % ids.ndim in varies(ids):
        trace.refuse(node, f"{node.op} '{node.name}' normalizes over it")
    else:
        trace.give(node.outputs[0], ids)


def _pool(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Pools over other axes than the channels; positions of maxima count through all channels and pin them."""
    if any(tensor.outputs or any(tensor is output for output in body.outputs) for tensor in node.outputs[1:]):
        trace.refuse(node, f"the positions that {node.op} '{node.name}' finds are read")
    else:
        moving_ops.RULES["MaxPool"](trace, node, body)


def _reshape(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Reshape to a target whose sizes along the channels are constants, which are rewritten."""
    places = target_places(node)
    if places is None:
        trace.refuse(node, f"the target of Reshape '{node.name}' is computed")
        return
    moving_ops.RULES["Reshape"](trace, node, body)
    ids = trace.full(node.outputs[0])
    if ids is not None and any(places[axis] is None for axis in varies(ids)):
        trace.keep(node.outputs[0], f"the target of Reshape '{node.name}' is computed")


def _slice(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Slice without steps along the channels: the limits are rewritten."""
    ids, steps = trace.full(node.inputs[0]), optional_input(node, 4)
    strides = None if steps is None else constant(steps)
    if ids is not None and steps is not None and (strides is None or (strides != 1).any()):
        axes = optional_input(node, 3)
        places = None if axes is None else constant(axes)
        if strides is None or (axes is not None and places is None):
            trace.refuse(node)
            return
        where = range(len(strides)) if places is None else [int(axis) % ids.ndim for axis in places.reshape(-1)]
        if any(step != 1 and axis in varies(ids) for step, axis in zip(strides.reshape(-1), where, strict=True)):
            trace.refuse(node, f"Slice '{node.name}' takes channels at a step")
            return
    moving_ops.RULES["Slice"](trace, node, body)


def _gather(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Gather by a constant vector of indices along the channels, which are renumbered."""
    ids, places = trace.full(node.inputs[0]), constant(node.inputs[1])
    axis = None if ids is None else int(attribute(node, "axis", 0)) % ids.ndim
    shrinks = axis is not None and trace.shrinking.get(id(node.inputs[0])) == axis
    if ids is None or places is None or (shrinks and places.ndim > 1):
        trace.refuse(node)
        return
    moving_ops.RULES["Gather"](trace, node, body)
    if shrinks and places.ndim == 0:
        trace.keep(node.outputs[0], f"Gather '{node.name}' picks this channel alone")


def _expand(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Expand to a constant target, which is rewritten, along other axes than the channels."""
    ids, size = trace.full(node.inputs[0]), rank(node.outputs[0])
    if ids is None or size is None or constant(node.inputs[1]) is None:
        trace.refuse(node)
    else:
        trace.give(node.outputs[0], _aligned(ids, size))


def _resize(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Resize along other axes than the channels; constant sizes are rewritten."""
    sizes = optional_input(node, 3)
    if sizes is not None and constant(sizes) is None:
        trace.refuse(node, f"the sizes of Resize '{node.name}' are computed")
    else:
        moving_ops.RULES["Resize"](trace, node, body)


def _depth_to_space(trace: RemovalTrace, node: Node, body: Body) -> None:
    """All channels that make one output channel are removed together."""
    ids, block = trace.full(node.inputs[0]), int(attribute(node, "blocksize", 1)) ** 2
    if ids is None or set(varies(ids)) - {1}:
        trace.refuse(node)
        return
    if not varies(ids):
        trace.give(node.outputs[0], ids)
        return
    flat = ids.reshape(-1)
    parts = flat.reshape(-1, block) if attribute(node, "mode", "DCR") == "CRD" else flat.reshape(block, -1).T
    outputs = trace.ids.unite(parts[:, :1], parts, f"it is removed with other channels of '{node.name}'")[:, 0]
    trace.give(node.outputs[0], outputs.reshape(1, -1, 1, 1))


def _space_to_depth(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Each channel becomes one output channel for each place in a block."""
    ids, block = trace.full(node.inputs[0]), int(attribute(node, "blocksize", 1)) ** 2
    if ids is None or set(varies(ids)) - {1}:
        trace.refuse(node)
    elif not varies(ids):
        trace.give(node.outputs[0], ids)
    else:
        trace.give(node.outputs[0], np.tile(ids.reshape(-1), block).reshape(1, -1, 1, 1))


def _size(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Sizes of tensors with channels pin these, unless only other dimensions are read."""
    ids = trace.full(node.inputs[0])
    if ids is None or not varies(ids):
        trace.keep(node.inputs[0], f"{node.op} '{node.name}' reads its size")
        return
    start, end = int(attribute(node, "start", 0)), attribute(node, "end", None)
    axes = list(range(ids.ndim))[slice(start, None if end is None else int(end))]
    read: set[int] = set()
    for reader, _ in readers(node.outputs[0]):
        places = constant(reader.inputs[1]) if reader.op == "Gather" and node.op == "Shape" else None
        read |= set(axes) if places is None else {axes[int(place)] for place in places.reshape(-1)}
    if any(tensor is node.outputs[0] for tensor in body.outputs) or node.op != "Shape" or read & set(varies(ids)):
        trace.keep(node.inputs[0], f"{node.op} '{node.name}' reads its size")


RULES: Final[dict[str, Rule]] = {
    **moving_ops.RULES,
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(POOLS | PICKS_MAX, _pool),
    **dict.fromkeys(REDUCES_ANY, moving_ops.RULES["ReduceMean"]),
    **dict.fromkeys(LINEAR, _linear),
    **dict.fromkeys(SOFTMAX, _softmax),
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _batch_norm,
    "LayerNormalization": _last_axes_norm,
    "RMSNormalization": _last_axes_norm,
    "Reshape": _reshape,
    "Slice": _slice,
    "Gather": _gather,
    "Expand": _expand,
    "Resize": _resize,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Shape": _size,
    "Size": _size,
}
"""Rules by op type. Channels that other ops read are pinned."""
