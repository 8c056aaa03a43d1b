"""im2col: the input of a linear op as the rows that it multiplies with its weight, all of them or a subset."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np

from sbonnx.errors import ModelError
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import CONVOLUTIONS
from sbonnx.spec import Array

AUTO_PADS = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")

SMALL_SHARE = 0.25
"""Up to this share of an input's elements are gathered one by one; above, channels are made contiguous first."""


@final
@dataclass(frozen=True)
class Geometry:
    """Input geometry of a linear op: output = alpha-scaled rows @ matrix.T, group by group.

    A row of a convolution is the window of one output position, flattened as (input channels of the group, *kernel)
    like the matrices of its `LinearLayer`; padding is 0. Rows are numbered by (batch, *output positions) for a
    convolution, by (batch axes that the weight does not have, rows) for MatMul, and by the rows of Gemm.

    Attributes:
        layer: the op and the layout of its weight, which is not on the left.
        strides, dilations: one per spatial axis; empty if the op is not a convolution, as are the next four.
        pads: begin of all axes, then end of all axes.
        auto_pad: one of `AUTO_PADS`.
        output_padding: of ConvTranspose.
        output_shape: of ConvTranspose, spatial; None if it follows from the other attributes.
    """

    layer: LinearLayer
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    auto_pad: str = "NOTSET"
    output_padding: tuple[int, ...] = ()
    output_shape: tuple[int, ...] | None = None

    @property
    def kernel(self) -> tuple[int, ...]:
        """Spatial size of the window; empty if the op is not a convolution."""
        return self.layer.kernel

    @property
    def channels(self) -> int:
        """Input channels per group of a convolution; K for other ops."""
        return self.layer.in_channels // self.layer.group

    @property
    def stacks(self) -> bool:
        """Whether inputs stacked along the leading axis have the rows of each, one after the other."""
        return bool(self.kernel) or not (self.layer.trans_a or len(self.layer.shape) > 2)

    def count(self, shape: Sequence[int]) -> int:
        """Return the number of rows of an input of `shape`.

        Raises:
            ValueError: the op cannot read such an input.
        """
        shape = tuple(shape)
        if self.kernel:
            self._check(shape)
            return shape[0] * math.prod(self._extent(axis, size)[1] for axis, size in enumerate(shape[2:]))
        if self.layer.op == "MatMul":
            batch, _, rest = self._batches(shape)
            return math.prod((*(batch[axis] for axis in rest), *shape[-2:-1]))
        return shape[1 if self.layer.trans_a else 0]

    def sources(self, shape: Sequence[int]) -> list[Array]:
        """Return the input index that each tap reads at each output position, for each spatial axis.

        `shape` is that of an input (N, C, *space).

        Returns:
            Arrays (positions, taps) of int64, read only; the size of the axis marks an index in the padding.
        """
        self._check(tuple(shape))
        return list(_sources(self, tuple(shape[2:])))

    def rows(self, x: Array, picks: Array | None = None) -> Array:
        """Return the rows of an input, float32 (G, n, K); may share memory with `x`.

        Args:
            x: the op's input.
            picks: indices of the rows to return; None: all. Only these rows are unfolded.

        Raises:
            ValueError: the op cannot read `x`.
        """
        x = x if x.dtype == np.float32 else x.astype(np.float32)
        if self.kernel:
            return self._windows(x, picks)
        rows = self._matrix_rows(x, picks)
        return rows if self.layer.alpha == 1.0 else rows * np.float32(self.layer.alpha)

    def _check(self, shape: tuple[int, ...]) -> None:
        channels = self.layer.in_channels
        if len(shape) != 2 + len(self.kernel) or shape[1] != channels:
            raise ValueError(f"{self.layer.op} of {channels} channels in {len(self.kernel)}-D cannot read {shape}")

    def source(self, axis: int, size: int) -> Array:
        """Return the index table of one axis with `size` entries, see `sources`.

        Source: ONNX Conv: index = position * stride + tap * dilation - pad; ConvTranspose: the inverse.
        """
        begin, positions = self._extent(axis, size)
        stride, dilation = self.strides[axis], self.dilations[axis]
        position, tap = np.ogrid[:positions, : self.kernel[axis]]
        if self.layer.op == "Conv":
            place = position * stride + tap * dilation - begin
            inside = (place >= 0) & (place < size)
        else:
            place, rest = np.divmod(position + begin - tap * dilation, stride)
            inside = (rest == 0) & (place >= 0) & (place < size)
        return np.where(inside, place, size).astype(np.int64)

    def _extent(self, axis: int, size: int) -> tuple[int, int]:
        """Return the padding at the begin of an axis and the number of output positions.

        Source: ONNX Conv and ConvTranspose. For cases they leave undefined, onnxruntime's conv_transpose_attributes.h:
        padding is at least 0, and the larger half is at the begin except for SAME_UPPER.
        """
        stride, window = self.strides[axis], (self.kernel[axis] - 1) * self.dilations[axis] + 1
        begin, end = self.pads[axis], self.pads[axis + len(self.kernel)]
        if self.layer.op == "Conv":
            if self.auto_pad in ("NOTSET", "VALID"):
                return begin, max((size + begin + end - window) // stride + 1, 0)
            positions = -(-size // stride)
            return self._halves((positions - 1) * stride + window - size)[0], positions
        whole = (size - 1) * stride + window + self.output_padding[axis]
        if self.output_shape is not None:
            positions = self.output_shape[axis]
            return self._halves(whole - positions)[0], positions
        if self.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            begin, end = self._halves(whole - size * stride)
        return begin, whole - begin - end

    def _halves(self, padding: int) -> tuple[int, int]:
        padding = max(padding, 0)
        small = padding // 2
        return (small, padding - small) if self.auto_pad == "SAME_UPPER" else (padding - small, small)

    def _windows(self, x: Array, picks: Array | None) -> Array:
        """Return the rows of a convolution, (G, n, K)."""
        tables = self.sources(x.shape)
        space, groups = x.shape[2:], self.layer.groups
        shape = (x.shape[0], *(len(table) for table in tables))
        picks = np.arange(math.prod(shape)) if picks is None else np.asarray(picks)
        batch, *positions = np.unravel_index(picks, shape)
        place, outside = np.zeros((picks.size, 1), np.int64), np.zeros((picks.size, 1), bool)
        for table, position, size in zip(tables, positions, space, strict=True):
            taps = table[position]
            place = (place[:, :, None] * size + np.minimum(taps, size - 1)[:, None, :]).reshape(picks.size, -1)
            outside = (outside[:, :, None] | (taps == size)[:, None, :]).reshape(picks.size, -1)
        flat = x.reshape(*x.shape[:2], -1)
        if place.size > SMALL_SHARE * flat[:, 0].size:
            flat = np.ascontiguousarray(flat.transpose(0, 2, 1)).transpose(0, 2, 1)
        windows = flat[batch[:, None], :, place]
        windows[outside] = 0.0
        wide = windows.reshape(picks.size, place.shape[1], groups, self.channels).transpose(2, 0, 3, 1)
        return np.ascontiguousarray(wide).reshape(groups, picks.size, self.layer.inputs)

    def _matrix_rows(self, x: Array, picks: Array | None) -> Array:
        """Return the rows of Gemm or MatMul, (G, n, K)."""
        if self.layer.op != "MatMul":
            rows = (x.T if self.layer.trans_a else x)[None]
            return rows if picks is None else rows[:, picks]
        x = x.reshape(1, -1) if x.ndim == 1 else x
        batch, own, rest = self._batches(x.shape)
        wide = np.broadcast_to(x, (*batch, *x.shape[-2:])).transpose(*own, *rest, len(batch), len(batch) + 1)
        rows_shape = tuple(batch[axis] for axis in rest) + x.shape[-2:-1]
        if picks is None:
            return np.asarray(wide.reshape(self.layer.groups, math.prod(rows_shape), self.layer.inputs))
        chosen = wide[(slice(None),) * len(own) + np.unravel_index(np.asarray(picks), rows_shape)]
        return np.asarray(chosen.reshape(self.layer.groups, len(picks), self.layer.inputs))

    def _batches(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], list[int], list[int]]:
        """Return the batch shape of a MatMul output, the axes that the weight has (its groups), and all other axes."""
        if shape[-1] != self.layer.inputs:
            raise ValueError(f"MatMul of {self.layer.inputs} inputs cannot read {shape}")
        batch = np.broadcast_shapes(shape[:-2], self.layer.shape[:-2])
        weight = (1,) * (len(batch) - len(self.layer.shape[:-2])) + self.layer.shape[:-2]
        own = [axis for axis, size in enumerate(weight) if size > 1]
        return batch, own, [axis for axis, size in enumerate(weight) if size == 1]


@lru_cache(maxsize=64)
def _sources(geometry: Geometry, space: tuple[int, ...]) -> tuple[Array, ...]:
    """Compute the tables of `Geometry.sources`. Cached, because samples usually have one size."""
    tables = tuple(geometry.source(axis, size) for axis, size in enumerate(space))
    for table in tables:
        table.setflags(write=False)
    return tables


def reads_padding(layer: LinearLayer, attributes: Mapping[str, Any]) -> bool:
    """Return whether some output of a layer depends on less than the whole kernel.

    In this case a constant added to the input is not equivalent to a constant added to the output.
    """
    if layer.op not in CONVOLUTIONS:
        return False
    taps, auto_pad = math.prod(layer.kernel), attributes.get("auto_pad", "NOTSET")
    pads = auto_pad == "NOTSET" and any(attributes.get("pads", ()))
    if layer.op == "Conv":
        return pads or (auto_pad in ("SAME_UPPER", "SAME_LOWER") and taps != 1)
    pointwise = taps == 1 and all(stride == 1 for stride in attributes.get("strides", ()))
    return pads or not pointwise or any(attributes.get("output_padding", ())) or "output_shape" in attributes


def geometry_of(layer: LinearLayer, attributes: Mapping[str, Any], *, name: str = "") -> Geometry:
    """Create the input geometry of a linear node.

    Args:
        layer: the op and the layout of its weight.
        attributes: of the node, as graphsurgeon stores them.
        name: of the node, for error messages.

    Raises:
        ModelError: an attribute does not have one number for each axis, or auto_pad is unknown.
    """
    op, axes = layer.op, len(layer.kernel)
    if op not in CONVOLUTIONS:
        return Geometry(layer)
    auto_pad = str(attributes.get("auto_pad", "NOTSET"))
    if auto_pad not in AUTO_PADS:
        raise ModelError(f"{op} '{name}': auto_pad is '{auto_pad}', which ONNX does not know; one of {AUTO_PADS} is")

    def numbers(key: str, default: int, count: int = axes) -> tuple[int, ...]:
        values = tuple(int(value) for value in attributes.get(key) or (default,) * count)
        if len(values) != count:
            raise ModelError(f"{op} '{name}': {key} has {len(values)} numbers, and its weight asks for {count}")
        return values

    wanted = attributes.get("output_shape")  # onnxruntime also accepts it with batch and channels in front
    return Geometry(
        layer,
        strides=numbers("strides", 1),
        dilations=numbers("dilations", 1),
        pads=numbers("pads", 0, 2 * axes) if auto_pad == "NOTSET" else (0,) * 2 * axes,
        auto_pad=auto_pad,
        output_padding=numbers("output_padding", 0) if op == "ConvTranspose" else (0,) * axes,
        output_shape=tuple(int(size) for size in wanted)[-axes:] if wanted and op == "ConvTranspose" else None,
    )
