"""Requirements of onnxruntime's CPU kernels on a Q/DQ graph, as queries on its nodes.

onnxruntime fuses ``DQ -> op -> Q`` into one integer kernel if all sides are quantized with a supported type. The
facts were measured by counting the kernels of optimized graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.graph import Constant, Node, Tensor, query
from sbonnx.linear.layer import channel_axes
from sbonnx.linting.model_view import Quantizer, View
from sbonnx.ops import (
    ADDS,
    CONCATS,
    INTEGER_ON_CPU,
    LINEAR,
    MATRIX_PRODUCTS,
    MOVES_DATA,
    MULTIPLIES,
    PICKS_MAX,
    QUANTIZE,
    RECTIFIERS,
    RESIZES,
)
from sbonnx.spec import Array

WEIGHTED: Final = INTEGER_ON_CPU & frozenset(LINEAR)
"""Ops with a weight that have an integer kernel."""

JOINS: Final = ADDS | MULTIPLIES | CONCATS | {"Where"}
"""Ops that compute on all their inputs and support different scales on them."""

_PICKS: Final = INTEGER_ON_CPU & (PICKS_MAX | {"ReduceMax", "ReduceMin"})
ONE_SCALE: Final = (MOVES_DATA - {"GatherND", "SpaceToDepth"}) | RESIZES | _PICKS
"""Ops that run directly on codes: the pairs before and after must have the same parameters."""

INTEGER: Final = INTEGER_ON_CPU | ONE_SCALE | RECTIFIERS
"""Ops with an integer kernel, alone or as a part of that of the op before."""

EPSILON: Final = float(np.finfo(np.float32).eps)
"""Tolerance by which a range may exceed a Clip that the following QuantizeLinear replaces: that of onnxruntime."""


@dataclass(frozen=True)
class WeightedOp:
    """A Conv, Gemm or MatMul, and the DequantizeLinear nodes of its inputs, None for float inputs."""

    node: Node
    x: Quantizer | None
    w: Quantizer | None
    bias: Quantizer | None

    @property
    def quantized(self) -> bool:
        """Whether the op reads codes on both sides."""
        return self.x is not None and self.w is not None

    @property
    def out_axis(self) -> int:
        """Output-channel axis of the weight, counted from the front."""
        rank = query.rank(self.node.inputs[1]) or (4 if self.node.op == "Conv" else 2)
        return channel_axes(self.node.op, self.node.attrs, rank)[0] or 0

    @property
    def groups(self) -> int:
        """Number of groups of a convolution."""
        return int(self.node.attrs.get("group", 1))

    @property
    def depthwise(self) -> bool:
        """Whether each group of a convolution reads one channel."""
        weight = query.shape(self.node.inputs[1])
        return self.node.op == "Conv" and self.groups > 1 and weight is not None and weight[1] == 1


def is_integer(kind: str | None) -> bool:
    """Return whether a quantized type is an integer type, not a small float."""
    return kind is not None and kind.lstrip("u").startswith("int")


def limits(kind: str) -> tuple[int, int]:
    """Return the lowest and highest value of an integer type."""
    bits = int("".join(letter for letter in kind if letter.isdigit()))
    return (0, (1 << bits) - 1) if kind.startswith("u") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def reach(one: Quantizer) -> tuple[float, float] | None:
    """Return the range (min, max) that codes with one scale represent; None if unknown."""
    if one.scale is None or one.scale.size != 1 or one.codes is None or not is_integer(one.codes):
        return None
    if one.has_zero and one.zero is None:
        return None
    zero = 0 if one.zero is None else int(one.zero.reshape(-1)[0])
    scale = float(one.scale.reshape(-1)[0])
    low, high = limits(one.codes)
    return (low - zero) * scale, (high - zero) * scale


def dequantized(view: View, tensor: Tensor) -> Quantizer | None:
    """Return the DequantizeLinear that writes a tensor."""
    pair = view.quantizer_of(tensor)
    return None if pair is None or pair.quantizes else pair


def before(view: View, one: Quantizer) -> Quantizer | None:
    """Return the QuantizeLinear before a DequantizeLinear."""
    other = view.quantizer_of(one.data)
    return other if other is not None and other.quantizes else None


def origin(view: View, one: Quantizer) -> Tensor:
    """Return the source of a quantizer: the floats before a QuantizeLinear, or the codes themselves."""
    quantize = before(view, one)
    return one.data if quantize is None else quantize.data


def axis_of(one: Quantizer) -> int | None:
    """Return the axis of a vector of scales, counted from the front; None for one scale, blocks and unknown ranks."""
    per_channel = (
        one.scale is not None and one.scale.ndim == 1 and one.scale.size > 1 and query.rank(one.data) is not None
    )
    return one.channel_axis if per_channel and not one.block else None


def steps(view: View, one: Quantizer) -> Array | None:
    """Return a dequantized constant in units of its scale, as float64: codes minus the zero point.

    None without a constant, for blocks, and for scales that do not match. Floats before a QuantizeLinear are divided by
    the scale but not rounded.
    """
    value, axis = query.constant(origin(view, one)), axis_of(one)
    if value is None or one.scale is None or not is_integer(one.codes) or (axis is None and one.scale.size > 1):
        return None
    if axis is not None and (axis >= value.ndim or one.scale.size != value.shape[axis]):
        return None
    along = [-1 if place == axis else 1 for place in range(value.ndim)]
    if before(view, one) is not None:
        with np.errstate(all="ignore"):  # another rule reports bad scales
            return np.asarray(value.astype(np.float64) / _along(one.scale, along))
    zero = np.zeros(1) if one.zero is None else one.zero
    if zero.size not in (1, one.scale.size):
        return None
    return np.asarray(value.astype(np.float64) - _along(zero, along if zero.size > 1 else [1] * value.ndim))


def stored_codes(view: View, one: Quantizer) -> Array | None:
    """Return the codes of a dequantized int8 constant as kernels read them, with the zero point, as float64."""
    in_steps = steps(view, one)
    if in_steps is None or one.zero is None:
        zero = np.zeros(1)
    else:
        zero = _along(one.zero, [-1 if one.zero.size > 1 and at == axis_of(one) else 1 for at in range(in_steps.ndim)])
    return None if in_steps is None else np.clip(np.rint(in_steps) + zero, -128, 127)


def _along(values: Array, shape: list[int]) -> Array:
    return np.asarray(values.astype(np.float64).reshape(shape))


def weighted(view: View) -> Iterator[WeightedOp]:
    """Iterate over every Conv, Gemm and MatMul."""
    for node in view.nodes:
        if node.op in WEIGHTED and len(node.inputs) > 1:
            at = LINEAR[node.op].bias
            has_bias = at is not None and len(node.inputs) > at and not node.inputs[at].is_empty()
            bias = dequantized(view, node.inputs[at]) if has_bias else None
            yield WeightedOp(node, dequantized(view, node.inputs[0]), dequantized(view, node.inputs[1]), bias)


def data_inputs(node: Node) -> list[Tensor]:
    """Return the data inputs of an op, without a bias."""
    count = 2 if node.op in WEIGHTED else len(node.inputs) if node.op in JOINS else 1
    first = int(node.op == "Where")  # its condition
    return [tensor for tensor in node.inputs[first:count] if not tensor.is_empty()]


def reads_pairs(view: View, node: Node) -> bool:
    """Return whether all data inputs of a node come from DequantizeLinear nodes."""
    read = data_inputs(node)
    return bool(read) and all(dequantized(view, tensor) is not None for tensor in read)


def only_quantized(view: View, tensor: Tensor) -> list[Quantizer]:
    """Return the QuantizeLinear nodes that read a tensor; none if it has other readers or is an output."""
    readers = query.readers(tensor)
    if view.leaves(tensor) or not all(reader.op in QUANTIZE and index == 0 for reader, index in readers):
        return []
    pairs = [view.quantizer_of(reader.outputs[0]) for reader, _ in readers]
    return [pair for pair in pairs if pair is not None]


def written(view: View, node: Node) -> list[Quantizer]:
    """Return the QuantizeLinear nodes on a node's output, after a Relu or Clip that they replace; else none."""
    rectifier = rectified(view, node)
    if rectifier is None:
        return only_quantized(view, node.outputs[0])
    behind = only_quantized(view, rectifier.outputs[0])
    return behind if all(folds(view, rectifier, node_behind) for node_behind in behind) else []


def rectified(view: View, node: Node) -> Node | None:
    """Return the Relu or Clip that is the only reader of a node's output."""
    readers = query.readers(node.outputs[0])
    if view.leaves(node.outputs[0]) or len(readers) != 1 or readers[0][1] != 0:
        return None
    return readers[0][0] if readers[0][0].op in RECTIFIERS else None


def folds(view: View, rectifier: Node, quantize: Quantizer) -> bool:
    """Return whether a QuantizeLinear clamps at least as tightly as the Relu or Clip before it, making it redundant."""
    values = reach(quantize)
    low, high = (0.0, float("inf")) if rectifier.op == "Relu" else _bounds(view, rectifier)
    if values is None or low is None or high is None:
        return False
    return low - values[0] <= EPSILON and values[1] - high <= EPSILON


def _bounds(view: View, clip: Node) -> tuple[float | None, float | None]:
    """Return the bounds of a Clip, infinite if absent; None for one that is computed."""
    bounds: list[float | None] = []
    for index, name, absent in ((1, "min", -float("inf")), (2, "max", float("inf"))):
        if len(clip.inputs) > index and not clip.inputs[index].is_empty():
            value = view.value(clip.inputs[index])
            bounds.append(None if value is None else float(value.reshape(-1)[0]))
        else:
            bounds.append(float(clip.attrs.get(name, absent)))
    return bounds[0], bounds[1]


def runs_in_integers(view: View, node: Node) -> bool:
    """Return whether onnxruntime has an integer kernel for the node with its current pairs."""
    if not reads_pairs(view, node):
        return False
    if node.op in MATRIX_PRODUCTS:  # their outputs may stay float
        return True
    return node.op in INTEGER and bool(written(view, node))


def is_stored(view: View, one: Quantizer) -> bool:
    """Return whether the source of a pair is a constant, without data movement in between."""
    return isinstance(origin(view, one), Constant)
