"""Means of what a linear op reads: all that a bias needs to take up the mean error of its layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from sbonnx.linear.im2col import Geometry
from sbonnx.linear.layout import Layout
from sbonnx.moments.lags import tap_sums
from sbonnx.ops import EMBEDDING
from sbonnx.spec import Array


@dataclass(frozen=True)
class Means:
    """Means over the rows that a linear op reads, in the float network (x) and in the quantized one (x').

    Attributes:
        layout: of the op's weight; G groups of K inputs.
        rows: how many rows were seen.
        mean: of x, float64 (G, K).
        mean_quantized: of x', float64 (G, K); the same object where only one network was run.
    """

    layout: Layout
    rows: int
    mean: Array
    mean_quantized: Array

    def mean_error(self, weight: Array, quantized: Array) -> Array:
        """Mean over rows of W x - V x', float64 (G, O), of W and V (G, O, K): what a bias must gain to take it up."""
        w, v = weight.astype(np.float64), quantized.astype(np.float64)
        return np.asarray(np.einsum("gok,gk->go", w, self.mean) - np.einsum("gok,gk->go", v, self.mean_quantized))


@final
class MeanSums:
    """Takes in the inputs of one op, sample after sample in any order, and keeps only their means.

    All rows count, none is unfolded: a convolution's inputs are added up place by place, in float64. Memory: twice
    K numbers of 8 bytes a group, and of a convolution's input the float64 of one sample, for each stream.

    Args:
        layout, geometry: of the op.
        two_streams: every sample comes as float and as quantized input.
    """

    def __init__(self, layout: Layout, geometry: Geometry, *, two_streams: bool) -> None:
        self._layout, self._geometry = layout, geometry
        self._totals = [np.zeros((layout.groups, layout.inputs)) for _ in range(2 if two_streams else 1)]
        self._planes: list[Array] = []
        self._count = 0

    def add(self, x: Array, quantized: Array | None = None, *, sample: int | Sequence[int]) -> None:
        """Take in what the op reads for one sample, or several. The arrays may be reused afterwards.

        Args:
            x: the op's input in the float network, of any float type; ids for an embedding.
            quantized: the same in the quantized network, where there are two streams.
            sample: its number, or theirs, which means do not depend on.

        Raises:
            ValueError: one stream in place of two or two of one, streams of two shapes, or an input that the op
                cannot read.
        """
        streams = (x,) if quantized is None else (x, quantized)
        if len(streams) != len(self._totals) or streams[-1].shape != x.shape:
            raise ValueError(f"{[stream.shape for stream in streams]} do not fit these means")
        self._count += self._geometry.count(x.shape)
        if self._geometry.kernel:
            self._lay(streams)
            return
        for total, stream in zip(self._totals, streams, strict=True):
            if self._layout.op in EMBEDDING:
                total += np.bincount(self._geometry.ids(stream), minlength=self._layout.groups)[:, None]
            else:
                total += self._geometry.rows(stream).sum(axis=1, dtype=np.float64)

    def means(self) -> Means:
        """Of what was taken in so far; not finite where an input held NaN or Inf."""
        self._fold()
        found = [total / max(self._count, 1) for total in self._totals]
        return Means(self._layout, self._count, found[0], found[-1])

    def _lay(self, streams: tuple[Array, ...]) -> None:
        """Add inputs (N, C, *space) place by place."""
        if self._planes and self._planes[0].shape != streams[0].shape[1:]:
            self._fold()
        if not self._planes:
            self._planes = [np.zeros(stream.shape[1:]) for stream in streams]
        for plane, stream in zip(self._planes, streams, strict=True):
            plane += stream.sum(axis=0, dtype=np.float64) if len(stream) > 1 else stream[0]

    def _fold(self) -> None:
        """What the windows read of the planes."""
        if self._planes:
            tables = self._geometry.sources((1, *self._planes[0].shape))
            for plane, total in zip(self._planes, self._totals, strict=True):
                total += tap_sums(plane, tables).reshape(total.shape)
            self._planes = []
