"""Linear operators (Conv, ConvTranspose, Gemm, MatMul): layout of the weight, channels, scaling of channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from sbonnx.graph import Constant, Node
from sbonnx.ops import CONVOLUTIONS, LINEAR, MATRIX_PRODUCTS
from sbonnx.report.codes import Reason
from sbonnx.spec import Array, QParams, QuantSpec, pair_limits


def channel_axes(op: str, attributes: Mapping[str, Any], rank: int, index: int = 1) -> tuple[int | None, int | None]:
    """Return the axes of output and input channels of the weight of a linear op, counted from the front.

    Args:
        op: operator type.
        attributes: of the node, as graphsurgeon stores them.
        rank: of the weight.
        index: input that is the weight; 0 is possible for matrix products.

    Returns:
        None for an axis that does not exist; two None if this input is not the weight of a linear op.

    Source: ONNX Conv (weight M, C/group, *kernel), ConvTranspose (C, M/group, *kernel), Gemm, MatMul.
    """
    if op in CONVOLUTIONS and index == 1 and rank >= 2:
        return (0, 1) if op == "Conv" else (1, 0)
    if op not in MATRIX_PRODUCTS or index not in (0, 1) or rank == 0:
        return None, None
    if op == "Gemm":
        transposed = bool(attributes.get("transB" if index else "transA", 0))
        return (0, 1) if transposed == bool(index) else (1, 0)
    if rank == 1:
        return None, 0
    return (rank - 1, rank - 2) if index else (rank - 2, rank - 1)


def weight_index(node: Node) -> int | None:
    """Return the index of the constant weight among the inputs of a linear op; None if it has none."""
    if node.op not in LINEAR or len(node.inputs) < 2:
        return None
    if isinstance(node.inputs[1], Constant):
        return 1
    return 0 if node.op == "MatMul" and isinstance(node.inputs[0], Constant) else None


@final
@dataclass(frozen=True)
class LinearLayer:
    """A linear op with the layout of its weight: ``groups`` matrices of (outputs, inputs).

    The output of the op is, group by group, ``rows @ matrix.T + beta * bias``, with the rows of
    `sbonnx.linear.im2col.Geometry`: unfolded windows for a convolution, alpha times the input for Gemm.

    Attributes:
        op: "Conv", "ConvTranspose", "Gemm" or "MatMul".
        shape: of the weight in the file.
        out_axis, in_axis: axes of the weight that run over output and input channels (of a group).
        index: input that is the weight: 1, or 0 for MatMul with the constant on the left.
        group: of a convolution.
        trans_a: whether Gemm transposes its data input.
        alpha, beta: factors of Gemm.
    """

    op: str
    shape: tuple[int, ...]
    out_axis: int
    in_axis: int
    index: int = 1
    group: int = 1
    trans_a: bool = False
    alpha: float = 1.0
    beta: float = 1.0

    @staticmethod
    def of(node: Node) -> LinearLayer | Reason:
        """Return the layer of a node with a constant weight, or the reason why it has no such layer."""
        index = weight_index(node)
        if index is None:
            return (
                Reason("weight-computed", f"{node.op} has no constant weight")
                if node.op in LINEAR
                else Reason("not-linear", f"{node.op} is not a linear op")
            )
        return LinearLayer.of_shape(node.op, node.attrs, tuple(node.inputs[index].shape), index)

    @staticmethod
    def of_rows(node: Node) -> LinearLayer | None:
        """Return the layer of a node that multiplies rows of its first input with a constant weight; else None."""
        layer = LinearLayer.of(node)
        return layer if isinstance(layer, LinearLayer) and layer.index == 1 and 0 not in layer.shape else None

    @staticmethod
    def of_shape(
        op: str, attributes: Mapping[str, Any], shape: tuple[int, ...], index: int = 1
    ) -> LinearLayer | Reason:
        """Return the layer of a weight of `shape` at input `index`, or the reason why it has no such layer."""
        out_axis, in_axis = channel_axes(op, attributes, len(shape), index)
        group = int(attributes.get("group", 1)) if op in CONVOLUTIONS else 1
        if op in CONVOLUTIONS and (len(shape) < 3 or group < 1 or shape[0] % group):
            return Reason("shape-does-not-fit", f"a weight of shape {shape} does not fit group {group}")
        if out_axis is None or in_axis is None:
            return (
                Reason("weight-without-channels", f"a weight of rank {len(shape)} has no output channels")
                if op in LINEAR
                else Reason("not-linear", f"{op} is not linear")
            )
        if op != "Gemm":
            return LinearLayer(op, shape, out_axis, in_axis, index, group)
        if len(shape) != 2:
            return Reason("shape-does-not-fit", f"a weight of shape {shape} does not fit Gemm")
        alpha, beta = float(attributes.get("alpha", 1.0)), float(attributes.get("beta", 1.0))
        trans_a = bool(attributes.get("transA", 0))
        return LinearLayer(op, shape, out_axis, in_axis, index, 1, trans_a, alpha, beta)

    # -- sizes

    @property
    def kernel(self) -> tuple[int, ...]:
        """Spatial size of the window of a convolution; empty for other ops."""
        return self.shape[2:] if self.op in CONVOLUTIONS else ()

    @property
    def groups(self) -> int:
        """Number of matrices: groups of a convolution, batches of a MatMul weight."""
        return self.group if self.op in CONVOLUTIONS else math.prod(self.shape[:-2])

    @property
    def outputs(self) -> int:
        """Rows of a matrix: output channels per group."""
        return self.out_channels // self.group

    @property
    def inputs(self) -> int:
        """Columns of a matrix: input channels per group, times the taps of the kernel."""
        return self.in_channels // self.group * math.prod(self.kernel)

    @property
    def depthwise(self) -> bool:
        """Whether each group of several has one input and one output channel."""
        return self.group > 1 and self.in_channels == self.out_channels == self.group

    @property
    def out_channels(self) -> int:
        """Channels of the output. All batches of a MatMul weight have the same ones."""
        return self.shape[self.out_axis] * (self.group if self.op == "ConvTranspose" else 1)

    @property
    def in_channels(self) -> int:
        """Channels of the data input. All batches of a MatMul weight have the same ones."""
        return self.shape[self.in_axis] * (self.group if self.op == "Conv" else 1)

    @property
    def data_axis(self) -> int:
        """Channel axis of the data input; negative counts from the end."""
        if self.op in CONVOLUTIONS:
            return 1
        return -2 if self.trans_a or self.index == 0 else -1

    # -- views of the weight

    def matrices(self, weight: Array) -> Array:
        """Return `weight`, or any array of its shape, as (G, O, K). May share memory with `weight`."""
        if self.op in CONVOLUTIONS:
            return self.by_channel(weight).reshape(self.groups, self.outputs, self.inputs)
        return np.moveaxis(self.by_channel(weight)[0], 2, 0)

    def from_matrices(self, matrices: Array) -> Array:
        """Inverse of `matrices`: convert (G, O, K) to the layout in the file."""
        weight = np.empty(self.shape, matrices.dtype)
        wide = self.by_channel(weight)
        wide[...] = matrices.reshape(wide.shape) if self.op in CONVOLUTIONS else np.moveaxis(matrices, 0, 2)
        return weight

    def spread(self, values: Array, qparams: QParams) -> Array:
        """Broadcast scales or zero points of `qparams` to all weights, (G, O, K), dtype as `values`; read only."""
        wide = qparams.along(values, self.shape)
        return self.matrices(np.broadcast_to(wide, self.shape))

    def code_limits(self, ratio: Array, spec: QuantSpec) -> tuple[Array, Array]:
        """Return the lowest and the highest code of each weight, (G, O, K); read only.

        Args:
            ratio: weights in units of codes, (G, O, K).
            spec: their type; limits of pairs (`sbonnx.spec.pair_limits`) depend on the weights.
        """
        if not spec.pairs:
            return np.broadcast_to(float(spec.qmin), ratio.shape), np.broadcast_to(float(spec.qmax), ratio.shape)
        channels = self.in_channels // self.group
        low, high = (
            end.reshape(*ratio.shape[:2], -1, channels).swapaxes(2, 3).reshape(ratio.shape)
            for end in pair_limits(self.taps_first(ratio), channels)
        )
        return low, high

    def taps_first(self, matrices: Array) -> Array:
        """Return (G, O, K) with the columns in the order of channels-last kernels: taps, then input channels."""
        wide = matrices.reshape(*matrices.shape[:2], self.in_channels // self.group, -1)
        return np.asarray(wide.swapaxes(2, 3).reshape(matrices.shape))

    def by_channel(self, weight: Array) -> Array:
        """Return `weight` as (group, outputs, inputs, rest), a view; rest: taps of the kernel, or batches of a MatMul.

        Vectors over channels, reshaped to `out_shape` and `in_shape`, broadcast against it.
        """
        first, second = self.shape[:2] if self.op in CONVOLUTIONS else self.shape[-2:]
        wide = weight.reshape(self.groups, first // self.group, second, math.prod(self.kernel))
        wide = wide if self.out_axis < self.in_axis else wide.swapaxes(1, 2)
        return wide if self.op in CONVOLUTIONS else wide.transpose(3, 1, 2, 0)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape in which a vector over output channels broadcasts against `by_channel`."""
        return (self.group, self.out_channels // self.group, 1, 1)

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape in which a vector over input channels broadcasts against `by_channel`."""
        return (self.group, 1, self.in_channels // self.group, 1)

    def scale_outputs(self, weight: Array, scale: Array) -> Array:
        """Multiply `weight` by one number per output channel, or a scalar. Computed in float64, rounded once."""
        return self._scaled(weight, self._broadcast(scale, self.out_shape))

    def scale_inputs(self, weight: Array, scale: Array) -> Array:
        """Multiply `weight` by one number per input channel, or a scalar. Computed in float64, rounded once."""
        return self._scaled(weight, self._broadcast(scale, self.in_shape))

    def through(self, weight: Array, values: Array) -> Array:
        """Return the outputs for constant input channels, without alpha and bias, float64 (out channels,).

        Batches of a MatMul weight are summed.

        Args:
            values: one number per input channel, or a scalar.
        """
        wide = self.by_channel(weight.astype(np.float64)) * self._broadcast(values, self.in_shape)
        return np.asarray(wide.sum(axis=(2, 3)).reshape(-1))

    def with_one_output(self) -> LinearLayer:
        """Return the layer with one output per group: equal for layers that read their input in the same way."""
        if self.op in CONVOLUTIONS:
            shape = (self.group, *self.shape[1:]) if self.op == "Conv" else (self.shape[0], 1, *self.shape[2:])
            return replace(self, shape=shape)
        rank = len(self.shape)
        shape = (*self.shape[:-2], self.shape[self.in_axis], 1)
        return replace(self, shape=shape, out_axis=rank - 1, in_axis=rank - 2, beta=1.0)

    @staticmethod
    def _broadcast(values: Array, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(values, (math.prod(shape),)).reshape(shape)

    def _scaled(self, weight: Array, factor: Array) -> Array:
        """Multiply without a full copy in float64; return `weight` itself if all factors are 1."""
        if (factor == 1.0).all():
            return weight
        out = np.empty_like(weight, order="C", subok=False)
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(self.by_channel(weight), factor, out=self.by_channel(out), dtype=np.float64, casting="unsafe")
        return out
