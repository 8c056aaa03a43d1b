"""Propagation rules for channel scales: one small function per kind of op, in one table.

For an input x / s, an op gives y / s (`_same`), or y with another scale that its constants absorb (linear ops, norms).
For all other ops the input is not scaled.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.channels import moving_ops
from sbonnx.channels.ids import varies
from sbonnx.channels.linear_ops import give_outputs, input_ids, layer_of
from sbonnx.channels.trace import is_float
from sbonnx.equalize.scale_trace import Ceiling, Rule, ScaleTrace, Vector, Weight, number
from sbonnx.graph import Body, Node
from sbonnx.graph.query import attribute, constant, shape
from sbonnx.ops import LINEAR
from sbonnx.report.codes import Reason
from sbonnx.spec import Array


def _same(trace: ScaleTrace, node: Node, body: Body) -> None:
    """Element-wise ops with y(c x) = c y(x) for c > 0."""
    trace.give(node.outputs[0], trace.known(node.inputs[0]))


def _prelu(trace: ScaleTrace, node: Node, body: Body) -> None:
    """PRelu is homogeneous for any constant slope."""
    if constant(node.inputs[1]) is None:
        trace.refuse(node)
    else:
        _same(trace, node, body)


def _clip(trace: ScaleTrace, node: Node, body: Body) -> None:
    """Clip from 0 to infinity acts like Relu; from 0 to a number it gets one bound per channel."""
    bounds = [number(tensor) for tensor in node.inputs[1:]] if len(node.inputs) > 1 else []
    lo = bounds[0] if bounds else attribute(node, "min")
    hi = bounds[1] if len(bounds) > 1 and node.inputs[2].name else attribute(node, "max", np.inf)
    ids = trace.full(node.inputs[0])
    if ids is None:
        trace.refuse(node)
    elif lo == 0.0 and hi == np.inf:
        trace.give(node.outputs[0], ids)
    elif lo != 0.0 or hi is None or trace.clips == "keep":
        trace.refuse(node, Reason("clips-all-channels", f"Clip '{node.name}' clips all channels at one number"))
    else:
        trace.give(node.outputs[0], ids)
        trace.ceilings.append(Ceiling(node, body, float(hi), ids))


def _linear(trace: ScaleTrace, node: Node, body: Body) -> None:
    """Linear op: absorbs the scales of its input and output if its weight is a constant that nothing else reads."""
    layer = layer_of(trace, node)
    if layer is None:
        return
    inputs, outputs = input_ids(trace, node, layer), trace.ids.fresh((layer.out_channels,))
    trace.weights.append(Weight(node, body, layer, inputs, outputs, trace.why.get(id(node.inputs[0]))))
    give_outputs(trace, node, layer, outputs)


def _add(trace: ScaleTrace, node: Node, body: Body) -> None:
    """Both operands get one scale; a constant vector absorbs it."""
    place = next((index for index, tensor in enumerate(node.inputs) if constant(tensor) is not None), None)
    if place is not None:
        _add_constant(trace, node, place)
        return
    left, right = (trace.known(tensor) for tensor in node.inputs)
    if left is None or right is None:
        trace.refuse(
            node, Reason("reads-unscaled-tensor", f"{node.op} '{node.name}' reads another tensor that is not scaled")
        )
        return
    why = Reason("reads-unscaled-channels", f"{node.op} '{node.name}' reads channels that are not scaled")
    trace.give(node.outputs[0], trace.ids.unite(left, right, why))


def _add_constant(trace: ScaleTrace, node: Node, place: int) -> None:
    values = constant(node.inputs[place])
    ids = trace.known(node.inputs[1 - place])
    assert values is not None
    if ids is None:
        return
    if not values.any():
        trace.give(node.outputs[0], ids)
    elif is_float(node.inputs[place]) and _fits(ids, values):
        trace.vectors.append(Vector(node, place, None, ids))
        trace.give(node.outputs[0], ids)
    else:
        trace.refuse(node, Reason("adds-to-all-channels", f"{node.op} '{node.name}' adds one number to all channels"))


def _fits(ids: Array, values: Array) -> bool:
    """Return whether a constant can absorb scales without broadcasting to a larger shape."""
    try:
        return int(np.prod(np.broadcast_shapes(ids.shape, values.shape))) == values.size
    except ValueError:
        return False


def _mul(trace: ScaleTrace, node: Node, body: Body) -> None:
    """A gate passes the scale of its factor; a constant vector has a scale itself; a scalar changes nothing."""
    place = next((index for index, tensor in enumerate(node.inputs) if constant(tensor) is not None), None)
    if place is None:
        traced_ids = [ids for ids in map(trace.known, node.inputs) if ids is not None]
        if len(traced_ids) == 1:
            trace.give(node.outputs[0], traced_ids[0])
        else:
            trace.refuse(node)
        return
    values = constant(node.inputs[place])
    assert values is not None
    ids = trace.known(node.inputs[1 - place])
    vector = values.size > 1 and len(varies(values)) == 1 and is_float(node.inputs[place])
    if not vector or (ids is not None and not _fits(ids, values)):
        trace.give(node.outputs[0], ids)
        return
    fresh = trace.ids.fresh(values.shape)
    trace.vectors.append(Vector(node, place, ids, fresh))
    trace.give(node.outputs[0], fresh)


def _div(trace: ScaleTrace, node: Node, body: Body) -> None:
    """The dividend is scaled, the divisor is not."""
    trace.keep(node.inputs[1], Reason("divided-by", f"Div '{node.name}' divides by it"))
    _same(trace, node, body)


def _norm(trace: ScaleTrace, node: Node, body: Body) -> None:
    """Norm over the last axes: gain and shift absorb the scale of its output."""
    trace.keep(node.inputs[0], Reason("normalized-over", f"{node.op} '{node.name}' normalizes over it"))
    gain = constant(node.inputs[1])
    if gain is None or gain.ndim == 0 or not _own_constants(node):
        return
    _gains(trace, node, gain.shape)


def _channel_norm(trace: ScaleTrace, node: Node, body: Body) -> None:
    """Norm with gain and shift per channel, axis 1."""
    trace.keep(node.inputs[0], Reason("normalized-over", f"{node.op} '{node.name}' normalizes over it"))
    gain, size = constant(node.inputs[1]), shape(node.inputs[0])
    if gain is None or gain.ndim != 1 or not _own_constants(node) or size is None or size[1:2] != gain.shape:
        return
    _gains(trace, node, (gain.size, *(1,) * (len(size) - 2)))


def _own_constants(node: Node) -> bool:
    """Return whether gain and shift, if present, are float constants."""
    return all(constant(tensor) is not None and is_float(tensor) for tensor in node.inputs[1:3] if tensor.name)


def _gains(trace: ScaleTrace, node: Node, size: tuple[int, ...]) -> None:
    ids = trace.ids.fresh(size)
    for index in range(1, min(3, len(node.inputs))):
        if node.inputs[index].name:
            values = constant(node.inputs[index])
            assert values is not None
            trace.vectors.append(Vector(node, index, None, ids.reshape(values.shape)))
    trace.give(node.outputs[0], ids)


RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(LINEAR, _linear),
    "Relu": _same,
    "LeakyRelu": _same,
    "Identity": _same,
    "Abs": _same,
    "Neg": _same,
    "PRelu": _prelu,
    "Clip": _clip,
    "Add": _add,
    "Sub": _add,
    "Mul": _mul,
    "Div": _div,
    "LayerNormalization": _norm,
    "RMSNormalization": _norm,
    "BatchNormalization": _channel_norm,
    "InstanceNormalization": _channel_norm,
    "GroupNormalization": _channel_norm,
    **moving_ops.RULES,
}
"""Rules by op type. Inputs of all other ops are not scaled."""
