"""Sums of onnxruntime's integer kernels on x86 CPUs without 8-bit dot products, computed in numpy on any CPU.

`sbonnx.backends.onnxruntime.paired_sums` says which two products such kernels add in 16 bits. A saturating sum is

    sum of (x - x zero) * (w - w zero)  +  sum over pairs of clip(p, -32768, 32767) - p,   p = x0 * w0 + x1 * w1

where x and w are codes. The second sum has only the pairs of weights that can exceed 16 bits, those with
|w0 + w1| > `PAIR_SUM`. Sums are equal to those of the kernels bit for bit, and so are outputs in codes; float outputs
may differ in the last bit, because a kernel may multiply and add in one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from sbonnx.linear.im2col import geometry_of
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import LINEAR
from sbonnx.qdq.integer_products import OPERATORS, IntegerOperator
from sbonnx.spec import PAIR_SUM, Array

ABSENT: Final = -1
"""Index of an input that an operator does not have."""

LAYOUTS: Final[Mapping[str, IntegerOperator]] = {
    **{name: layout for name, layout in OPERATORS.items() if layout.op in LINEAR},
    "MatMulIntegerToFloat": IntegerOperator("MatMul", ((0, 2, 4), (1, 3, 5)), ABSENT, bias=6),
    "MatMulInteger": IntegerOperator("MatMul", ((0, ABSENT, 2), (1, ABSENT, 3)), ABSENT),
}
"""Input layouts of the kernels that add in 16 bits. ConvInteger does not: its weight is the left factor."""

INT16: Final = np.iinfo(np.int16)

AT_ONCE: Final = 1 << 20
"""Values of rows, and products of pairs, that are computed at a time."""


def can_saturate(op: str, attributes: Mapping[str, Any], weight: Array) -> bool:
    """Return whether two products of a kernel with this weight (codes) and uint8 inputs can exceed 16 bits."""
    layer = _layer(op, attributes, weight)
    codes = layer.taps_first(layer.matrices(weight))
    return weight.dtype == np.int8 and not _single(layer) and any(_pairs(matrix)[0].size for matrix in codes)


def compute(op: str, attributes: Mapping[str, Any], inputs: Sequence[Array | None]) -> Array:
    """Compute the output of a kernel of `LAYOUTS` with saturating sums.

    Args:
        op: its type.
        attributes: of the node.
        inputs: of the node; None: left out.
    """

    def given(index: int | None) -> Array | None:
        value = inputs[index] if index is not None and 0 <= index < len(inputs) else None
        return value.reshape(()) if value is not None and value.size == 1 else value

    layout = LAYOUTS[op]
    (x, w), (x_zero, w_zero) = (
        [inputs[operand[0]] for operand in layout.data],
        [given(operand[2]) for operand in layout.data],
    )
    assert x is not None and w is not None
    sums = _convolved if layout.op == "Conv" else _multiplied
    total = sums(op, attributes, x, _number(x_zero), w, _number(w_zero))
    x_scale, w_scale = (given(operand[1]) for operand in layout.data)
    if x_scale is not None and w_scale is not None:
        total = _scaled(total, x_scale * w_scale, layout, attributes, given)
    channels_first = layout.op == "Conv" and not attributes.get("channels_last")
    return np.ascontiguousarray(np.moveaxis(total, -1, 1)) if channels_first else total


def _scaled(total: Array, scale: Array, layout: IntegerOperator, attributes: Mapping[str, Any], given: Any) -> Array:
    """Scale the sums, of which the last axis are the channels, to codes or floats. Source: MlasRequantizeOutput."""
    scale, bias = scale * np.float32(attributes.get("alpha", 1.0)), given(layout.bias)
    if bias is not None and bias.dtype == np.int32:
        total, bias = total + bias, None
    out_scale, out_zero = (
        given(layout.out) if layout.out > 0 else None,
        given(layout.out + 1) if layout.out > 0 else None,
    )
    if out_scale is None:
        floats = total.astype(scale.dtype) * scale
        return floats if bias is None else floats + bias
    kind = np.dtype(np.uint8) if out_zero is None else out_zero.dtype
    ends, zero = np.iinfo(kind), np.float32(_number(out_zero))
    codes = np.clip(total.astype(np.float32) * (scale / out_scale), ends.min - zero, ends.max - zero)
    return np.asarray((np.rint(codes) + zero).astype(kind))


def _number(zero: Array | None) -> Array:
    return np.zeros((), np.int32) if zero is None else zero.astype(np.int32)


def _layer(op: str, attributes: Mapping[str, Any], weight: Array) -> LinearLayer:
    layer = LinearLayer.of_shape(LAYOUTS[op].op, attributes, weight.shape)
    if isinstance(layer, str):
        raise ValueError(layer)
    return layer


def _single(layer: LinearLayer) -> bool:
    """Return whether a convolution has one input and one output channel a group: its kernel adds in 32 bits."""
    return layer.op == "Conv" and layer.in_channels == layer.out_channels == layer.group


def _convolved(op: str, attributes: Mapping[str, Any], x: Array, x_zero: Array, w: Array, w_zero: Array) -> Array:
    """Compute the sums of a convolution, int32 (N, *positions, channels)."""
    x = x if attributes.get("channels_last") else np.moveaxis(x, 1, -1)
    layer = _layer(op, attributes, w)
    sources = geometry_of(layer, attributes).sources((x.shape[0], x.shape[-1], *x.shape[1:-1]))
    centred = w - (w_zero if w_zero.ndim == 0 else w_zero.reshape(-1, *(1,) * (w.ndim - 1)))
    weights = [
        _Matrix(codes, values, paired=not _single(layer))
        for codes, values in zip(*(layer.taps_first(layer.matrices(factor)) for factor in (w, centred)), strict=True)
    ]
    axes, shape = len(sources), tuple(len(source) for source in sources)
    padded = np.pad(x, [(0, 0), *[(0, 1)] * axes, (0, 0)], constant_values=int(x_zero))  # `sources` mark padding so
    total = np.empty((x.shape[0], *shape, layer.out_channels), np.int32)
    wide = [
        source.reshape(
            [len(source) if at == axis else 1 for at in range(axes)] + [-1 if at == axis else 1 for at in range(axes)]
        )
        for axis, source in enumerate(sources)
    ]
    step = max(1, AT_ONCE // max(int(np.prod(shape[1:])) * layer.inputs * layer.groups, 1))
    for image in range(x.shape[0]):
        for start in range(0, shape[0], step):
            place: tuple[Any, ...] = (image, wide[0][start : start + step], *wide[1:])
            windows = padded[place]
            rows = windows.reshape(*windows.shape[:axes], -1, layer.groups, x.shape[-1] // layer.groups)
            part = total[image, start : start + step].reshape(-1, layer.groups, layer.outputs)
            for group, weight in enumerate(weights):
                own = rows[..., group, :].reshape(len(part), -1)
                part[:, group] = weight.sums(own, x_zero)  # `part` shares the memory of `total`
    return total


def _multiplied(op: str, attributes: Mapping[str, Any], x: Array, x_zero: Array, w: Array, w_zero: Array) -> Array:
    """Compute the sums of a matrix product, int32."""
    if w.ndim == 1:
        return np.asarray(_multiplied(op, attributes, x, x_zero, w[:, None], w_zero)[..., 0])
    layer = _layer(op, attributes, w)
    along = w_zero[:, None] if w_zero.ndim == 1 and layer.out_axis == 0 else w_zero
    weights = [
        _Matrix(codes, values) for codes, values in zip(layer.matrices(w), layer.matrices(w - along), strict=True)
    ]
    x = x.T if layer.trans_a else x
    if w.ndim == 2:
        return weights[0].sums(x.reshape(-1, x.shape[-1]), x_zero).reshape(*x.shape[:-1], -1)
    batch = np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    which = np.broadcast_to(np.arange(len(weights)).reshape(w.shape[:-2]), batch)
    rows = np.broadcast_to(x, (*batch, *x.shape[-2:]))
    total = [weights[which[at]].sums(rows[at], x_zero) for at in np.ndindex(batch)]
    return np.stack(total).reshape(*batch, x.shape[-2], -1)


def _pairs(codes: Array) -> tuple[Array, Array]:
    """Return the rows and the numbers of the pairs of (O, K) codes that can exceed 16 bits with uint8 inputs."""
    even = codes[:, : codes.shape[1] // 2 * 2].astype(np.int16)
    output, pair = np.nonzero(np.abs(even[:, 0::2] + even[:, 1::2]) > PAIR_SUM)  # of one sign, or they sum to less
    return output, pair


class _Matrix:
    """A weight of (outputs, inputs) in the order of the kernel.

    Args:
        codes: its codes.
        centred: the same minus the zero point.
        paired: the kernel adds two products in 16 bits, if codes are int8 and inputs uint8.
    """

    def __init__(self, codes: Array, centred: Array, *, paired: bool = True) -> None:
        self.codes = codes
        self.centred = centred.T.astype(np.float64)  # sums are exact: they are below 2**53
        self.output, self.pair = _pairs(codes if paired and codes.dtype == np.int8 else codes[:0])

    def sums(self, rows: Array, zero: Array) -> Array:
        """Return the sums of rows of codes, int32 (rows, outputs)."""
        total = np.empty((len(rows), len(self.codes)), np.int32)
        step = max(1, AT_ONCE // max(rows.shape[1], 1))
        for start in range(0, len(rows), step):
            own = rows[start : start + step]
            part = ((own.astype(np.float64) - zero) @ self.centred).astype(np.int64).astype(np.int32)
            if own.dtype == np.uint8:
                for outputs, change in self._changes(own):
                    part[:, outputs] += change
            total[start : start + step] = part
        return total

    def _changes(self, rows: Array) -> Iterator[tuple[Array, Array]]:
        """Yield outputs, each once, and the change of their sums by saturation, int32 (rows, outputs)."""
        columns = np.ascontiguousarray(rows.T)
        most = columns.max(axis=1, initial=0).astype(np.int32)
        first, second = 2 * self.pair, 2 * self.pair + 1
        left, right = (self.codes[self.output, at].astype(np.int32) for at in (first, second))
        reached = np.flatnonzero(np.abs(most[first] * left + most[second] * right) > INT16.max)
        step = max(1, AT_ONCE // max(len(rows), 1))
        for start in range(0, len(reached), step):
            own = reached[start : start + step]
            sums = columns[first[own]] * left[own, None] + columns[second[own]] * right[own, None]
            outputs, begins = np.unique(self.output[own], return_index=True)  # ascending, as `_pairs` returns them
            yield outputs, np.add.reduceat(np.clip(sums, INT16.min, INT16.max) - sums, begins, axis=0).T
