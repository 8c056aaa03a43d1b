"""Rounding of large weights some outputs at a time, so that float64 copies of the weight stay small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import WIDE, Moments
from sbonnx.rounding.base import Rounded, Rounder
from sbonnx.spec import Array, QParams

WEIGHTS: Final = 1 << 22
"""Weights that are rounded at a time, in layers with more than `WIDE` inputs; needs about 20 arrays of this size."""


@final
@dataclass(frozen=True)
class OutputSlice:
    """Some outputs of a layer with one matrix.

    Attributes:
        layout: of these outputs.
        index: selects them in the weight.
        scales: selects them in its scales and zero points.
    """

    layout: LinearLayer
    index: tuple[slice, ...]
    scales: tuple[slice, ...]

    def qparams(self, whole: QParams) -> QParams:
        """Return the scales and zero points of these outputs."""
        return QParams(whole.scale[self.scales], whole.zero_point[self.scales], whole.spec)


def output_slices(layout: LinearLayer, qparams: QParams) -> Iterator[OutputSlice]:
    """Yield the slices of `WEIGHTS` weights of a layer: one with everything if it is smaller, or scales are shared."""
    axis, count = layout.out_axis, layout.outputs
    step = max(WEIGHTS // max(layout.inputs, 1), 1)
    blocks = qparams.spec.block_size is not None and qparams.scale.ndim == 2
    place = axis if blocks else 0
    own = qparams.spec.axis is not None and (blocks or qparams.spec.axis == axis)
    fits = own and all(
        values.ndim > place and values.shape[place] == count for values in (qparams.scale, qparams.zero_point)
    )
    if layout.inputs <= WIDE or step >= count or layout.groups != 1 or len(layout.shape) != 2 or not fits:
        yield OutputSlice(layout, (), ())
        return
    for first in range(0, count, step):
        some = slice(first, min(first + step, count))
        shape = tuple(some.stop - first if at == axis else size for at, size in enumerate(layout.shape))
        index, scales = ((*[slice(None)] * before, some) for before in (axis, place))
        yield OutputSlice(replace(layout, shape=shape), index, scales)


def joined(slices: Sequence[OutputSlice], parts: Sequence[Array], *, scales: bool) -> Array:
    """Join arrays of the weight's shape, or of that of its scales, which belong to slices."""
    if len(parts) == 1:
        return parts[0]
    index = slices[0].scales if scales else slices[0].index
    return np.concatenate(parts, axis=len(index) - 1)


def round_in_slices(rounder: Rounder, weight: Array, qparams: QParams, moments: Moments) -> Rounded:
    """Round a weight, see `Rounder.round`; by slices if the outputs are independent in this method."""
    slices = list(output_slices(moments.layout, qparams)) if rounder.by_output else []
    if len(slices) < 2:
        return rounder.round(weight, qparams, moments)
    results = [
        rounder.round(
            weight[output_slice.index], output_slice.qparams(qparams), moments.with_layout(output_slice.layout)
        )
        for output_slice in slices
    ]
    losses, nearest = (
        [getattr(result, name) for result in results if getattr(result, name) is not None]
        for name in ("loss", "nearest")
    )
    codes = joined(slices, [result.codes for result in results], scales=False)
    return Rounded(codes, qparams, float(sum(losses)), float(sum(nearest)))
