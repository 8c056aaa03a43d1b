"""Means of the input activations of linear ops, for bias correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from sbonnx.linear.im2col import Geometry
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments.lags import tap_sums
from sbonnx.spec import Array


@dataclass(frozen=True)
class Means:
    """Mean input activations of a linear op in the float network (x) and in the quantized network (x').

    Attributes:
        layout: of the op's weight; G groups of K inputs.
        rows: number of rows, or the sum of their weights.
        mean: of x, float64 (G, K).
        mean_quantized: of x', float64 (G, K); the same object if only one network was run.
    """

    layout: LinearLayer
    rows: float
    mean: Array
    mean_quantized: Array

    def mean_error(self, weight: Array, quantized: Array) -> Array:
        """Compute the mean over rows of W x - V x', float64 (G, O), of W and V (G, O, K): the bias correction."""
        w, v = weight.astype(np.float64), quantized.astype(np.float64)
        return np.asarray(np.einsum("gok,gk->go", w, self.mean) - np.einsum("gok,gk->go", v, self.mean_quantized))


@final
class MeanSums:
    """Accumulator of the means of one op's input activations.

    Samples may be added in any order. All rows are used and none is unfolded: the inputs of a convolution are summed
    per position in float64. Memory per stream: K numbers of 8 bytes a group, and the float64 size of one sample for a
    convolution.

    Args:
        geometry: of the op.
        two_streams: every sample has a float and a quantized input.
    """

    def __init__(self, geometry: Geometry, *, two_streams: bool) -> None:
        self._layout, self._geometry = geometry.layer, geometry
        self._totals = [np.zeros((self._layout.groups, self._layout.inputs)) for _ in range(2 if two_streams else 1)]
        self._planes: list[Array] = []
        self._count = 0.0

    def add(
        self,
        x: Array,
        quantized: Array | None = None,
        *,
        sample: int | Sequence[int],
        weights: Array | None = None,
    ) -> None:
        """Accumulate the op's input activations of one or several samples, as `MomentSums.add`.

        Raises:
            ValueError: wrong number of streams, streams of different shapes, or an input that the op cannot read.
        """
        streams = (x,) if quantized is None else (x, quantized)
        if len(streams) != len(self._totals) or streams[-1].shape != x.shape:
            raise ValueError(f"{[stream.shape for stream in streams]} do not fit these means")
        samples = 1 if isinstance(sample, int) else len(sample)
        rows_of_sample = self._geometry.count(x.shape) // samples
        weights = np.ones(samples) if weights is None else weights
        self._count += float(weights.sum()) * rows_of_sample
        if self._geometry.kernel:  # inputs (N, C, *space) are added per position
            if self._planes and self._planes[0].shape != x.shape[1:]:
                self._fold()
            if not self._planes:
                self._planes = [np.zeros(stream.shape[1:]) for stream in streams]
            factors = np.repeat(weights, len(x) // samples)
            for plane, stream in zip(self._planes, streams, strict=True):
                plane += np.tensordot(factors, stream.astype(np.float64), 1)
            return
        for total, stream in zip(self._totals, streams, strict=True):
            rows = self._geometry.rows(stream)
            total += np.einsum("gnk,n->gk", rows, np.repeat(weights, rows_of_sample), dtype=np.float64)

    def means(self) -> Means:
        """Return the means of everything added. Not finite if an input contained NaN or Inf."""
        self._fold()
        averages = [total / (self._count or 1.0) for total in self._totals]
        return Means(self._layout, self._count, averages[0], averages[-1])

    def _fold(self) -> None:
        """Convert the sums per position to sums per window tap."""
        if self._planes:
            tables = self._geometry.sources((1, *self._planes[0].shape))
            for plane, total in zip(self._planes, self._totals, strict=True):
                total += tap_sums(plane, tables).reshape(total.shape)
            self._planes = []
