"""Streaming accumulation of `Moments`, one sample at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, final

import numpy as np

from sbonnx.linear.im2col import Geometry
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments.lags import PackedSums, lag_plan, speed
from sbonnx.moments.products import WAITING, Arrays, Pairs, RowSums, WindowSums, parts, rows_at_once
from sbonnx.moments.second import Moments
from sbonnx.spec import Array

LEAST_ROWS: Final = 8192
"""Minimum number of rows per layer, for layers with few inputs: fewer give unreliable means and variances."""

WIDE: Final = 1024
"""Layers with more inputs have compact moments in float32, and are factored in float32: half the time and memory."""

MOST_TAPS: Final = 64
"""Windows with more taps are unfolded (im2col), because the plan of lags grows quadratically with the taps."""


@final
class MomentSums:
    """Accumulator of the second moments of one op's input activations.

    Samples may be added in any order. Only the sums are stored.

    Products are computed in float32 over at most 4,096 rows and accumulated in float64, or in float32 (`compact`): of
    64k rows, float32 sums have an error of about 1e-6, and factors of large matrices are in float32 anyway; in two
    streams they are products with errors (`Moments.of_errors`). Convolutions are summed by lags
    (`sbonnx.moments.lags`) if that is less work than unfolding, which depends on sizes only. Memory usage does not grow
    with the number of samples, see `bytes_for`.

    Args:
        geometry: of the op.
        two_streams: every sample has a float and a quantized input.
        rows_a_sample: limit of rows used per sample. They are picked by a generator seeded with (seed, sample),
            identical in both streams, and only these rows are unfolded. If sums by lags over all rows are no more
            work than the products of the picked rows, all rows are used. None: all rows.
        seed: seed of the picks.
        device: "cuda": products are computed by torch on the GPU, if it has one. Any other value: by numpy.
        compact: matrices of layers with more than `WIDE` inputs are float32.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        two_streams: bool,
        rows_a_sample: int | None = None,
        seed: int = 0,
        device: str = "cpu",
        compact: bool = False,
    ) -> None:
        self._layout, self._geometry = geometry.layer, geometry
        self._rows_a_sample, self._seed = rows_a_sample, seed
        self._arrays = Arrays.on(device)
        self._streams = 2 if two_streams else 1
        # pairs of streams for a, cross, square of `Moments`; stream 0 of two is the float one, or its errors
        self._pairs = ((1, 1), (0, 1), (0, 0)) if two_streams else ((0, 0),)
        groups, inputs = self._layout.groups, self._layout.inputs
        self._compact = compact and inputs > WIDE
        dtype = "float32" if self._compact else "float64"
        self._rows = RowSums(groups, inputs, self._pairs, self._streams, self._arrays, dtype)
        self._windows: WindowSums | None = None
        self._count = 0.0
        self._observed = 0  # rows, not weighted
        self._moments: Moments | None = None

    def add(
        self,
        x: Array,
        quantized: Array | None = None,
        *,
        sample: int | Sequence[int],
        weights: Array | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        """Accumulate the op's input activations of one or several samples. The arrays may be reused afterwards.

        Args:
            x: the op's input in the float network, of any float type.
            quantized: the input in the quantized network, if there are two streams.
            sample: number of the sample, for the picks, or the numbers of samples stacked along the leading axis.
            weights: factor of each sample, see `sample_weights`, or of each row of one sample of a matrix product, in
                all sums, float64; None: 1.
            geometry: of another op with the same weight that reads this input; None: that of the sums.

        Raises:
            ValueError: wrong number of streams, streams of different shapes, an input that the op cannot read, or the
                moments were already returned.
        """
        streams = (x,) if quantized is None else (x, quantized)
        if self._moments is not None or len(streams) != self._streams or streams[-1].shape != x.shape:
            raise ValueError(f"{[stream.shape for stream in streams]} do not fit these moments, or these were taken")
        if quantized is not None and self._compact:
            with np.errstate(over="ignore", invalid="ignore"):
                streams = (np.subtract(x, quantized, dtype=np.result_type(x, quantized, np.float32)), quantized)
        geometry = self._geometry if geometry is None else geometry
        count = geometry.count(x.shape)
        samples = [sample] if isinstance(sample, int) else sample
        picks = self._picks(count, samples)
        weights = np.ones(len(samples)) if weights is None else weights
        if self._by_lags(geometry, x.shape, count if picks is None else len(picks)):
            self._count += float(weights.sum()) * (count // len(samples))
            self._observed += count
            if self._windows is not None and not self._windows.fits(geometry, x.shape[2:]):
                self._fold()
            if self._windows is None:
                self._windows = WindowSums(geometry, x.shape[2:], self._pairs, self._streams, self._arrays)
            wide = tuple(np.asarray(stream, np.float32) for stream in streams)
            self._windows.add(wide, np.repeat(weights, len(x) // len(samples)))
            return
        weights = np.repeat(weights, count // len(weights))[slice(None) if picks is None else picks]  # of the rows
        self._count += float(weights.sum())
        self._observed += len(weights)
        if picks is None and not geometry.kernel:
            self._rows.add(tuple(geometry.rows(stream) for stream in streams), weights)
        else:
            width = self._layout.groups * self._layout.inputs
            for part in parts(count if picks is None else len(picks), width):
                some = part if picks is None else picks[part]
                rows = tuple(geometry.rows(stream, some) for stream in streams)
                self._rows.add(rows, weights[part])

    def merge(self, other: MomentSums) -> None:
        """Add the sums of another accumulator, which must not be used afterwards.

        Raises:
            ValueError: the op or the number of streams differs, or the moments of one of the two were already returned.
        """
        fits = (self._geometry, self._streams) == (other._geometry, other._streams)
        if not fits or self._moments is not None or other._moments is not None:
            raise ValueError(f"moments of {other._layout} cannot be added to those of {self._layout}")
        taken = other.moments()
        for mine, theirs in zip(self._rows.matrices, other._rows.matrices, strict=True):
            mine += self._arrays.load(other._arrays.fetch(theirs))
        for total, added in zip(self._rows.totals, other._rows.totals, strict=True):
            total += added
        self._count += taken.rows
        self._observed += other._observed

    def share_errors(self, other: MomentSums) -> None:
        """Sum the products of errors of both in one matrix, which both return, if they are compact.

        To be called before anything is added.
        """
        if self._compact:
            self._rows.share(other._rows, 2)

    def moments(self) -> Moments:
        """Return the moments of everything added. The sums are moved, not copied, so nothing can be added afterwards.

        The result is not finite if an input contained NaN, Inf, or numbers whose products overflow float32.
        """
        if self._moments is None:
            self._finish()
            self._rows.mirror()
            fetched = [self._arrays.fetch(matrix) for matrix in self._rows.matrices]
            means = [total / (self._count or 1.0) for total in self._rows.totals]
            if len(fetched) == 1:
                total = Moments(self._layout, self._count, fetched[0], None, None, means[0], means[0])
            else:
                a, cross, square = fetched
                mean = means[0] + means[1] if self._compact else means[0]
                total = Moments(self._layout, self._count, a, cross, square, mean, means[1], self._compact)
            self._moments = replace(total, observed=self._observed)
        return self._moments

    def release(self) -> None:
        """Release the matrices; these sums cannot be used any more, and what was returned can."""
        self._rows.release()
        self._windows = self._moments = None

    def _finish(self) -> None:
        """Add everything that is buffered, and release the buffers."""
        self._rows.flush(last=True)
        self._fold()

    def _picks(self, count: int, samples: Sequence[int]) -> Array | None:
        """Return sorted indices of the picked rows among `count`; None if all rows are used."""
        rows_of_sample = count // len(samples)
        wanted = self._rows_a_sample
        if wanted is None or wanted >= rows_of_sample:
            return None
        picks = [picked_rows(rows_of_sample, wanted, self._seed, sample) for sample in samples]
        return np.concatenate([some + number * rows_of_sample for number, some in enumerate(picks)])

    def _by_lags(self, geometry: Geometry, shape: tuple[int, ...], rows: int) -> bool:
        """Return whether sums by lags over a whole input are no more work than the products of `rows` unfolded rows."""
        kernel = geometry.kernel
        if not kernel or not 0 < math.prod(kernel) <= MOST_TAPS:
            return False
        groups, inputs = self._layout.groups, self._layout.inputs
        unfolded = math.prod(kernel) * 15.0 + groups * inputs * (1.5 + 0.4 * inputs / speed(inputs))
        return _nanoseconds(geometry, self._pairs, shape) <= rows * len(self._pairs) * unfolded

    def _fold(self) -> None:
        """Add the sums by lags to the row sums."""
        if self._windows is not None:
            self._windows.fold(self._rows)
            self._windows = None


def sample_weights(x: Array, quantized: Array, samples: int, resolution: float) -> Array:
    """Compute the weights of samples in a fit to the float network, float64 (samples,).

        1 / (mean of (x - x')^2 + resolution^2)

    A fit of V to the outputs W x of the float network has the residuals W (x - x') + (W - V) x'. Their variance differs
    between samples: one image with an error a hundred times that of the others decides a fit with equal weights, and
    the others lose. Generalized least squares weights each sample by the inverse of its variance (Aitken 1936).

    Args:
        x, quantized: the inputs of the samples in both networks, stacked along the leading axis.
        samples: their number.
        resolution: root mean square error below which an input counts as exact.
    """
    error = (np.asarray(x, np.float32) - quantized).reshape(samples, -1)
    mean = np.einsum("ij,ij->i", error, error, dtype=np.float64) / max(error.shape[1], 1)
    return np.asarray(1.0 / (mean + resolution**2))


def bytes_for(layout: LinearLayer, two_streams: bool, *, compact: bool = False, hold_out: bool = False) -> int:
    """Return an upper bound of the bytes that `MomentSums` holds, until a weight is rounded by them.
    For convolutions, add five times the input size of one sample.

    This bound covers the moments, the same size again while products or lags are added, and for each stream the
    buffered rows and three copies of those that are unfolded and multiplied at a time, with their source indices. With
    compact moments of many inputs (`MomentSums`) only a factor of A is added to the moments.

    Args:
        hold_out: there are second sums of the same layer.
    """
    width = layout.groups * layout.inputs
    places = 3 * 8 * math.prod(layout.kernel) if layout.kernel else 0
    rows = 4 * width * rows_at_once(width, WAITING) + (3 * 4 * width + places) * rows_at_once(width)
    waiting = rows * (2 if two_streams else 1) * (1 + hold_out)
    square = layout.groups * layout.inputs**2
    if compact and layout.inputs > WIDE:
        # a, cross and one matrix of errors; the factor of `a` is needed when the second `a` is not, in one stream
        matrices = 4 + 2 * hold_out if two_streams else 2
        return 4 * square * matrices + waiting
    return 8 * square * (6 if two_streams else 2) * (1 + hold_out) + waiting


def rows_a_sample(inputs: int, samples: int, each: int) -> int:
    """Return the rows to use per sample: `each` times the inputs of an output, at least `LEAST_ROWS` in total."""
    return -(-max(each * inputs, LEAST_ROWS) // max(samples, 1))


@lru_cache(maxsize=2048)
def picked_rows(count: int, wanted: int, seed: int, sample: int) -> Array:
    """Return sorted indices of the picked rows of one sample: identical for all layers with as many rows."""
    generator = np.random.default_rng((seed, sample))
    picks = np.sort(generator.choice(count, wanted, replace=False, shuffle=False))
    picks.setflags(write=False)
    return picks


@lru_cache(maxsize=64)
def _nanoseconds(geometry: Geometry, pairs: Pairs, shape: tuple[int, ...]) -> float:
    """Estimate the time of the sums by lags over an input of `shape`."""
    tables, groups, channels = geometry.sources(shape), geometry.layer.groups, geometry.channels
    share = min(1.0, math.prod(shape[2:]) / WAITING)
    total = 0.0
    for left, right in pairs:
        plan = lag_plan(tables, shape[2:], same=left == right)
        boxes = PackedSums.of(plan, shape[2:]) if channels == 1 else None
        if boxes is None:
            total += plan.nanoseconds(groups, channels, share)
        else:
            total += boxes.nanoseconds(groups, math.prod(shape[2:]))
    return shape[0] * total
