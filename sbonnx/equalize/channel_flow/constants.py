"""The constants that take up a scale of channels: weights, biases, gains of norms, bounds of clips."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbonnx.graph import Body, Node, Tensor, Variable
from sbonnx.graph.edit import Names, add_constant, add_node, replace_input, replace_output
from sbonnx.graph.query import constant
from sbonnx.ops import LINEAR
from sbonnx.patterns.fuse.affine import Layout
from sbonnx.spec import Array


@dataclass(frozen=True)
class Weight:
    """A linear node with a constant weight that nothing else reads.

    A tensor x becomes x / s, channel by channel; so the weight becomes ``s_in * W / s_out``, its bias ``b / s_out``.

    Attributes:
        node, body: the node, and the scope that it stands in.
        view: how vectors over channels broadcast against the weight.
        inputs, outputs: ids of its channels, int64 (in channels,) and (out channels,).
        why: why the input is fixed, where that is known from the start.
    """

    node: Node
    body: Body
    view: Layout
    inputs: Array
    outputs: Array
    why: str | None = None

    @property
    def values(self) -> Array:
        """The weight as it is now."""
        found = constant(self.node.inputs[LINEAR[self.node.op].weight])
        assert found is not None
        return found

    @property
    def bias(self) -> Array | None:
        """The bias as it is now."""
        index = LINEAR[self.node.op].bias
        return None if index is None or index >= len(self.node.inputs) else constant(self.node.inputs[index])

    def set_values(self, values: Array, names: Names) -> None:
        """In place. The node reads `values`, in the type of the weight before, under the name of that."""
        set_constant(self.node, LINEAR[self.node.op].weight, values.astype(self.values.dtype), names)

    def set_bias(self, values: Array, names: Names) -> None:
        """In place. The node reads `values` as its bias, in the type of the weight; one is made where it had none."""
        index = LINEAR[self.node.op].bias
        assert index is not None
        values = values.astype(self.values.dtype)
        if index < len(self.node.inputs) and self.node.inputs[index].name:
            set_constant(self.node, index, values, names)
            return
        made = add_constant(self.body, f"{self.node.name}.bias", values, names)
        if index < len(self.node.inputs):  # left out with an empty name
            replace_input(self.node, index, made)
        else:
            self.node.inputs.append(made)

    def scaled(self, before: Array, after: Array) -> tuple[Array, Array | None]:
        """Weight and bias, float64; inputs over `before` (in channels,), outputs over `after` (out channels,)."""
        factor = before.reshape(self.view.inputs) / after.reshape(self.view.outputs)
        weight = (self.values.reshape(self.view.shape) * factor).reshape(self.values.shape)
        bias = self.bias
        if bias is None:
            return weight, None
        wide = bias if bias.size == 1 and after.size == 1 else np.broadcast_to(bias, (*bias.shape[:-1], after.size))
        return weight, wide / after


@dataclass(frozen=True)
class Vector:
    """A constant operand that becomes ``c * s[times] / s[over]``.

    Attributes:
        node, index: which input it is.
        times, over: ids that broadcast against the constant and do not enlarge it; None for no factor.
    """

    node: Node
    index: int
    times: Array | None
    over: Array | None


@dataclass(frozen=True)
class Ceiling:
    """The upper bound of a Clip from 0, which becomes a bound a channel: ``hi / s``.

    Attributes:
        node, body: the Clip and its scope.
        high: the bound.
        ids: of its output, with all axes.
    """

    node: Node
    body: Body
    high: float
    ids: Array


def set_constant(node: Node, index: int, values: Array, names: Names) -> None:
    """In place. A constant input of `node` has other values for it, under its name where nothing else reads it."""
    old = node.inputs[index]
    alone = len(old.outputs) == 1
    made = add_constant(node, old.name, np.ascontiguousarray(values).reshape(values.shape), names)
    replace_input(node, index, made)
    if alone:
        old.name, made.name = made.name, old.name


def put_ceiling(ceiling: Ceiling, bound: Array, names: Names) -> None:
    """In place. Clip(x, 0, high) becomes Min(Relu(x), bound); the Clip stays behind, read by nothing."""
    output = _freed(ceiling.node, names)
    relu = add_node(ceiling.body, "Relu", ceiling.node.inputs[:1], names=names, stem=f"{ceiling.node.name}/Relu")
    relu.outputs[0].dtype, relu.outputs[0].shape = output.dtype, output.shape
    high = add_constant(ceiling.body, f"{ceiling.node.name}/ceiling", bound, names)
    stem = f"{ceiling.node.name}/Min"
    add_node(ceiling.body, "Min", [relu.outputs[0], high], names=names, stem=stem, outputs=[output])


def put_relu(ceiling: Ceiling, names: Names) -> None:
    """In place. Clip(x, 0, high) becomes Relu(x); the Clip stays behind, read by nothing."""
    output = _freed(ceiling.node, names)
    stem = f"{ceiling.node.name}/Relu"
    add_node(ceiling.body, "Relu", ceiling.node.inputs[:1], names=names, stem=stem, outputs=[output])


def _freed(node: Node, names: Names) -> Tensor:
    """In place. The output of a node, which writes another one from now on."""
    output = node.outputs[0]
    replace_output(node, 0, Variable(names.fresh(f"{output.name}/before"), output.dtype, output.shape))
    return output
