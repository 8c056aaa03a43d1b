"""Rules for the removal of channels: one small function per kind of op, in one table.

A channel is pinned (never removed) where an op would compute something else for the channels that remain: a norm or
softmax over the channels, a product that sums over them, an op without a rule. If the channels of a tensor lie on
several axes and an op needs all entries along one of them (the channels of a head), they are removed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from sbonnx.channels import moving_ops
from sbonnx.channels.ids import varies
from sbonnx.channels.linear_ops import give_outputs, input_ids, layer_of
from sbonnx.graph import Body, Node
from sbonnx.graph.query import attribute, constant, optional_input, rank, readers
from sbonnx.ops import LINEAR, PICKS_MAX, POINTWISE, POOLS, REDUCES_ANY, SOFTMAX
from sbonnx.pruning.groups.product_rules import aligned, broadcasts, other_operand, product
from sbonnx.pruning.groups.removal_choices import Layout, rows_along
from sbonnx.pruning.groups.removal_trace import LinearSides, RemovalTrace, target_places
from sbonnx.report.codes import Reason
from sbonnx.spec import Array

Rule = Callable[[RemovalTrace, Node, Body], None]


def _linear(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Linear op: new ids for its outputs; a depthwise convolution passes its input ids on."""
    if node.op == "MatMul" and constant(node.inputs[1]) is None:
        product(trace, node)
        return
    layer = layer_of(trace, node, shared=True)
    if layer is None:
        return
    inputs, group = input_ids(trace, node, layer), layer.group
    each_in, each_out = layer.in_channels // group, layer.out_channels // group
    twin = trace.sharing(node.inputs[LINEAR[node.op].weight])
    if twin is not None and twin.layer != layer:
        trace.refuse(
            node,
            Reason(
                "weight-read-in-two-ways",
                f"'{node.name}' and '{twin.node.name}' read the same weight in different ways",
            ),
        )
        return
    if group > 1 and each_in == 1:
        outputs = np.repeat(inputs, each_out)
    else:
        outputs = trace.ids.fresh((layer.out_channels,)) if twin is None else twin.outputs
    if twin is not None:
        why = Reason("weight-is-shared", f"'{node.name}' and '{twin.node.name}' read the same weight")
        trace.ids.unite(inputs, twin.inputs, why)
        trace.ids.unite(outputs, twin.outputs, why)
    sides = LinearSides(node, layer, inputs, outputs)
    wide = (inputs.reshape(group, each_in), outputs.reshape(group, each_out))
    if group > 1 and each_in > 1:
        why = Reason(
            "removed-with-groups", f"it is removed together with other channels of '{node.name}', which works on groups"
        )
        trace.linear(
            sides,
            positions=Layout(tuple(ids.T for ids in wide), why),
            groups=Layout((np.concatenate(wide, axis=1),), why),
        )
    else:
        trace.linear(sides)
    index = LINEAR[node.op].weight
    trace.cut(node, index, layer.out_axis, wide[1].T if node.op == "ConvTranspose" else outputs)
    trace.cut(node, index, layer.in_axis, wide[0].T if node.op == "Conv" else inputs)
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
    tensors = (tensor for tensor, ids in given if ids is not None)
    wide = {id(tensor): aligned(ids, size) for tensor, ids in zip(tensors, full, strict=True) if ids is not None}
    axes = {axis for ids in wide.values() for axis in varies(ids)}
    result: Array | None = None
    for tensor, ids in given:
        if ids is None:
            continue
        if broadcasts(tensor, size, axes):
            trace.hold(
                wide[id(tensor)],
                range(size),
                Reason("combined-with-all", f"{node.op} '{node.name}' combines it with all channels"),
            )
            continue
        why = Reason("combined-with-pinned", f"{node.op} '{node.name}' combines it with channels that are pinned")
        broadcast = wide[id(tensor)]
        result = broadcast if result is None else trace.ids.unite(result, broadcast, why)
    if result is None:
        return
    for index, tensor in enumerate(node.inputs):
        if tensor.name and trace.known(tensor) is None:
            other_operand(trace, node, index, result, varies(result))
    trace.give(node.outputs[0], result)


def _batch_norm(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Norm with its own numbers for each channel of axis 1, which are sliced."""
    ids = trace.full(node.inputs[0])
    vectors = [constant(tensor) for tensor in node.inputs[1:]]
    if ids is None or any(vector is None for vector in vectors) or len(node.outputs) > 1:
        trace.refuse(node)
        return
    why = Reason("normalized-over", f"{node.op} '{node.name}' normalizes over it")
    if node.op == "InstanceNormalization" and not trace.hold(ids, range(2, ids.ndim), why):
        trace.refuse(node, why)
        return
    if 1 in varies(ids):
        for index in range(1, len(node.inputs)):
            trace.cut(node, index, 0, rows_along(ids, 1))
    trace.give(node.outputs[0], ids)


def _last_axes_norm(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Norm over the axes from `axis` on; channels on the axes before it pass."""
    ids = trace.full(node.inputs[0])
    if ids is None or len(node.outputs) > 1:
        trace.refuse(node)
        return
    first = int(attribute(node, "axis", -1)) % ids.ndim
    _over_axes(trace, node, ids, range(first, ids.ndim))


def _over_axes(trace: RemovalTrace, node: Node, ids: Array, axes: Iterable[int]) -> None:
    """Norm or softmax over some axes: channels on other axes, such as heads, pass."""
    why = Reason("normalized-over", f"{node.op} '{node.name}' normalizes over it")
    if trace.hold(ids, axes, why):
        trace.give(node.outputs[0], ids)
    else:
        trace.refuse(node, why)


def _softmax(trace: RemovalTrace, node: Node, body: Body) -> None:
    ids = trace.full(node.inputs[0])
    if ids is None:
        trace.refuse(node)
    else:
        _over_axes(trace, node, ids, [int(attribute(node, "axis", -1))])


def _reduce(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Reduction: along reduced axes nothing is removed; channels on other axes pass."""
    ids = trace.full(node.inputs[0])
    given = constant(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1].name else attribute(node, "axes")
    if ids is None or given is None:
        trace.refuse(node)
        return
    axes = sorted({int(axis) % ids.ndim for axis in np.asarray(given).reshape(-1)})
    if not trace.hold(ids, axes, Reason(trace.refusal.code, f"{node.op} '{node.name}' {trace.refusal}")):
        trace.refuse(node)
        return
    for axis in axes:
        ids = np.take(ids, [0], axis)
    trace.give(node.outputs[0], ids if attribute(node, "keepdims", 1) else np.squeeze(ids, tuple(axes)))


def _pool(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Pools over other axes than the channels; positions of maxima count through all channels and pin them."""
    if any(tensor.outputs or any(tensor is output for output in body.outputs) for tensor in node.outputs[1:]):
        trace.refuse(node, Reason("positions-are-read", f"the positions that {node.op} '{node.name}' finds are read"))
    else:
        moving_ops.RULES["MaxPool"](trace, node, body)


def _reshape(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Reshape to a target whose sizes along the channels are constants, which are rewritten."""
    places = target_places(node)
    if places is None:
        trace.refuse(node, Reason("reshape-computed", f"the target of Reshape '{node.name}' is computed"))
        return
    moving_ops.RULES["Reshape"](trace, node, body)
    ids = trace.full(node.outputs[0])
    if ids is not None and any(places[axis] is None for axis in varies(ids)):
        trace.keep(node.outputs[0], Reason("reshape-computed", f"the target of Reshape '{node.name}' is computed"))


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
            trace.refuse(node, Reason("slice-with-step", f"Slice '{node.name}' takes channels at a step"))
            return
    moving_ops.RULES["Slice"](trace, node, body)


def _gather(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Gather by a constant vector of indices along the channels, which are renumbered."""
    ids, places = trace.full(node.inputs[0]), constant(node.inputs[1])
    if ids is None or places is None:
        trace.refuse(node)
        return
    why = Reason("gathered-alone", f"Gather '{node.name}' picks this channel alone")
    if places.ndim != 1 and not trace.hold(ids, [int(attribute(node, "axis", 0))], why):
        trace.refuse(node, why)
        return
    moving_ops.RULES["Gather"](trace, node, body)


def _expand(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Expand to a constant target, which is rewritten, along other axes than the channels."""
    ids, size = trace.full(node.inputs[0]), rank(node.outputs[0])
    if ids is None or size is None or constant(node.inputs[1]) is None:
        trace.refuse(node)
    else:
        trace.give(node.outputs[0], aligned(ids, size))


def _resize(trace: RemovalTrace, node: Node, body: Body) -> None:
    """Resize along other axes than the channels; constant sizes are rewritten."""
    sizes = optional_input(node, 3)
    if sizes is not None and constant(sizes) is None:
        trace.refuse(node, Reason("resize-computed", f"the sizes of Resize '{node.name}' are computed"))
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
    outputs = trace.ids.unite(
        parts[:, :1], parts, Reason("removed-with-groups", f"it is removed with other channels of '{node.name}'")
    )[:, 0]
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
        trace.keep(node.inputs[0], Reason("size-is-read", f"{node.op} '{node.name}' reads its size"))
        return
    start, end = int(attribute(node, "start", 0)), attribute(node, "end", None)
    axes = list(range(ids.ndim))[slice(start, None if end is None else int(end))]
    read: set[int] = set()
    for reader, _ in readers(node.outputs[0]):
        places = constant(reader.inputs[1]) if reader.op == "Gather" and node.op == "Shape" else None
        read |= set(axes) if places is None else {axes[int(place)] for place in places.reshape(-1)}
    if any(tensor is node.outputs[0] for tensor in body.outputs) or node.op != "Shape":
        read = set(range(ids.ndim))
    trace.hold(ids, read, Reason("size-is-read", f"{node.op} '{node.name}' reads its size"))


RULES: Final[dict[str, Rule]] = {
    **moving_ops.RULES,
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(POOLS | PICKS_MAX, _pool),
    **dict.fromkeys(REDUCES_ANY, _reduce),
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
