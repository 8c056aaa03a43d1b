"""Applies channel scales to the constants that absorb them."""

from __future__ import annotations

import numpy as np

from sbonnx.channels.ids import along
from sbonnx.equalize.scale_trace import Clips, ConstantEditor, Traced, Vector, put_ceiling, put_relu
from sbonnx.graph import Graph
from sbonnx.graph.constant_edits import ConstantEdit
from sbonnx.graph.edit import sort, sweep
from sbonnx.graph.query import constant
from sbonnx.report.codes import Reason
from sbonnx.spec import Array


def apply(graph: Graph, traced: Traced, scales: Array, *, clips: Clips = "channels") -> Reason | None:
    """Divide every traced tensor x by s, in place. The function of the graph is unchanged up to rounding.

    Factors are computed in float64, and each constant is rounded once to its own type.

    Args:
        scales: s by group, float64 (groups,), positive, 1 for fixed groups.
        clips: the setting that the graph was traced with.

    Returns:
        the reason if nothing was changed: a constant would not be finite; else None.
    """
    s = scales[traced.groups.of]
    editor = ConstantEditor(graph)
    scaled = [weight.scaled(s[weight.inputs], s[weight.outputs]) for weight in traced.weights]
    vectors = [_scaled(vector, s) for vector in traced.vectors]
    for (values, bias), weight in zip(scaled, traced.weights, strict=True):
        largest = float(np.finfo(weight.values.dtype.type).max)
        if not all(np.abs(array).max(initial=0) <= largest for array in (values, bias) if array is not None):
            return Reason("scaled-weight-not-finite", f"the weight or bias of '{weight.node.name}' would not be finite")
    for weight, (values, bias) in zip(traced.weights, scaled, strict=True):
        if (s[weight.inputs] != 1).any() or (s[weight.outputs] != 1).any():
            edit = ConstantEdit("channels", inputs=s[weight.inputs], outputs=s[weight.outputs])
            weight.set_values(values, editor, edit)
            if bias is not None:
                weight.set_bias(bias, editor)
    for vector, (values, factor) in zip(traced.vectors, vectors, strict=True):
        if (factor != 1).any():
            editor.replace(vector.node, vector.index, values, ConstantEdit("times", factor))
    for ceiling in traced.ceilings:
        factor = s[ceiling.ids]
        if clips == "relu":
            put_relu(ceiling, editor.names)
        elif (factor != 1).any():
            put_ceiling(ceiling, (ceiling.high / factor).astype(np.float32), editor.names)
    for name, normal in list(graph.info.normals.items()):
        ids = traced.ids.get(name)
        over = along(ids, 1, len(normal.mean))
        if over is not None:
            graph.info.normals[name] = normal.through(1 / s[over])
        elif ids is not None and (s[ids] != 1).any():
            del graph.info.normals[name]  # its channels are no longer in the layout that the batch norm had
    sweep(graph)
    sort(graph)
    return None


def _scaled(vector: Vector, s: Array) -> tuple[Array, Array]:
    """Return the scaled constant in its type, and the factor of its values."""
    old = constant(vector.node.inputs[vector.index])
    assert old is not None
    times = np.float64(1) if vector.times is None else s[vector.times]
    over = np.float64(1) if vector.over is None else s[vector.over]
    return (old * times / over).reshape(old.shape).astype(old.dtype), np.asarray(times / over)
