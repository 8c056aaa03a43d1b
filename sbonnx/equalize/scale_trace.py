"""Traces the scales of channels through a graph, to the constants that absorb them.

Weights, biases, gains of norms and bounds of Clips absorb scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sbonnx.channels.ids import ChannelGroups
from sbonnx.channels.trace import Trace, walk
from sbonnx.graph import Body, Graph, Node, Tensor, Variable
from sbonnx.graph.constant_edits import ConstantEdit, added_bias
from sbonnx.graph.edit import Names, add_constant, add_node, replace_input, replace_output, set_constant
from sbonnx.graph.query import constant, scopes
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import LINEAR
from sbonnx.report.codes import Reason
from sbonnx.spec import Array


class ConstantEditor:
    """Replaces constants of a graph in place, and records how they changed.

    Attributes:
        names: the names that are taken.
        edits: the record, that of the graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.names, self.edits = Names(graph), graph.info.edits

    def replace(self, node: Node, index: int, values: Array, edit: ConstantEdit) -> None:
        """Replace the constant input `index` of a node."""
        before = node.inputs[index].name
        set_constant(node, index, values, self.names)
        earlier = () if edit.kind == "is" else self.edits.get(before, ())
        self.edits[node.inputs[index].name] = (*earlier, edit)


@dataclass(frozen=True)
class Weight:
    """A linear node with a constant weight that nothing else reads.

    If a tensor x is divided by s per channel, the weight becomes ``s_in * W / s_out`` and the bias ``b / s_out``.

    Attributes:
        node, body: the node and its scope.
        layer: layout of the weight.
        inputs, outputs: ids of its channels, int64 (in channels,) and (out channels,).
        why: why the input cannot be scaled, if known from the start.
    """

    node: Node
    body: Body
    layer: LinearLayer
    inputs: Array
    outputs: Array
    why: Reason | None = None

    @property
    def values(self) -> Array:
        """The current weight."""
        weight = constant(self.node.inputs[self.layer.index])
        assert weight is not None
        return weight

    @property
    def bias(self) -> Array | None:
        """The current bias."""
        index = LINEAR[self.node.op].bias
        return None if index is None or index >= len(self.node.inputs) else constant(self.node.inputs[index])

    def set_values(self, values: Array, editor: ConstantEditor, edit: ConstantEdit) -> None:
        """Replace the weight in place, keeping its type and name; `edit` says how it changed."""
        editor.replace(self.node, self.layer.index, values.astype(self.values.dtype), edit)

    def set_bias(self, values: Array, editor: ConstantEditor) -> None:
        """Replace the bias in place, in the type of the weight. A bias is added if the node has none."""
        index = LINEAR[self.node.op].bias
        assert index is not None
        values = values.astype(self.values.dtype)
        if index < len(self.node.inputs) and self.node.inputs[index].name:
            editor.replace(self.node, index, values, ConstantEdit("is", values))
            return
        bias = add_constant(self.body, added_bias(self.node.name), values, editor.names)
        editor.edits[bias.name] = (ConstantEdit("is", values),)
        if index < len(self.node.inputs):  # optional input with an empty name
            replace_input(self.node, index, bias)
        else:
            self.node.inputs.append(bias)

    def scaled(self, before: Array, after: Array) -> tuple[Array, Array | None]:
        """Return weight and bias, float64, times `before` (in channels,) and over `after` (out channels,)."""
        factor = before.reshape(self.layer.in_shape) / after.reshape(self.layer.out_shape)
        weight = np.empty(self.values.shape)
        np.multiply(self.layer.by_channel(self.values), factor, out=self.layer.by_channel(weight))
        bias = self.bias
        if bias is None:
            return weight, None
        wide = bias if bias.size == 1 and after.size == 1 else np.broadcast_to(bias, (*bias.shape[:-1], after.size))
        return weight, wide / after


@dataclass(frozen=True)
class Vector:
    """A constant operand that becomes ``c * s[times] / s[over]``.

    Attributes:
        node, index: the constant input of the node.
        times, over: ids that broadcast against the constant and do not enlarge it; None: no factor.
    """

    node: Node
    index: int
    times: Array | None
    over: Array | None


@dataclass(frozen=True)
class Ceiling:
    """The upper bound of a Clip from 0, which becomes one bound per channel: ``hi / s``.

    Attributes:
        node, body: the Clip and its scope.
        high: the bound.
        ids: of its output, with all axes.
    """

    node: Node
    body: Body
    high: float
    ids: Array


def put_ceiling(ceiling: Ceiling, bound: Array, names: Names) -> None:
    """Replace Clip(x, 0, high) by Min(Relu(x), bound) in place. The Clip remains without readers."""
    output = _freed(ceiling.node, names)
    relu = add_node(ceiling.body, "Relu", ceiling.node.inputs[:1], names=names, stem=f"{ceiling.node.name}/Relu")
    relu.outputs[0].dtype, relu.outputs[0].shape = output.dtype, output.shape
    high = add_constant(ceiling.body, f"{ceiling.node.name}/ceiling", bound, names)
    stem = f"{ceiling.node.name}/Min"
    add_node(ceiling.body, "Min", [relu.outputs[0], high], names=names, stem=stem, outputs=[output])


def put_relu(ceiling: Ceiling, names: Names) -> None:
    """Replace Clip(x, 0, high) by Relu(x) in place. The Clip remains without readers."""
    output = _freed(ceiling.node, names)
    stem = f"{ceiling.node.name}/Relu"
    add_node(ceiling.body, "Relu", ceiling.node.inputs[:1], names=names, stem=stem, outputs=[output])


def _freed(node: Node, names: Names) -> Tensor:
    """Detach the output of a node, in place, and return it. The node gets a new output."""
    output = node.outputs[0]
    replace_output(node, 0, Variable(names.fresh(f"{output.name}/before"), output.dtype, output.shape))
    return output


Clips = Literal["keep", "channels", "relu"]
"""Treatment of a Clip from 0 to a number.

"keep": its channels are not scaled. "channels": it becomes a Relu and a Min with one bound per channel. "relu": it
becomes a Relu (Nagel et al. 2019, section 5.1.1), which changes the function for values that were clipped.
"""


@dataclass
class ScaleTrace(Trace):
    """Mutable state of a trace of scales.

    Attributes:
        clips: see `Clips`.
        weights, vectors, ceilings: constants that absorb scales.
    """

    clips: Clips = "channels"
    weights: list[Weight] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    ceilings: list[Ceiling] = field(default_factory=list)


Rule = Callable[[ScaleTrace, Node, Body], None]


@dataclass(frozen=True)
class Traced:
    """Result of a trace: what can be scaled in a graph.

    Attributes:
        groups: channels with one scale each.
        ids: by tensor name; broadcasts against the tensor. Tensors without an entry are not scaled.
        weights, vectors, ceilings: constants that absorb scales.
    """

    groups: ChannelGroups
    ids: dict[str, Array]
    weights: tuple[Weight, ...]
    vectors: tuple[Vector, ...]
    ceilings: tuple[Ceiling, ...]


def trace(graph: Graph, rules: dict[str, Rule], clips: Clips = "channels") -> Traced:
    """Trace the scales of every scope of a graph with a table of rules.

    Inputs and outputs of the model and of bodies are not scaled, nor are tensors that bodies read from outside.
    """
    state = ScaleTrace(clips=clips)
    ids = walk(state, [body for _, body in scopes(graph)], rules)
    groups = state.ids.groups()
    return Traced(groups, ids, tuple(state.weights), tuple(state.vectors), tuple(state.ceilings))


def number(tensor: Tensor | None) -> float | None:
    """Return the value of a constant with one element, or None."""
    values = constant(tensor)
    return float(values.reshape(())) if values is not None and values.size == 1 else None
