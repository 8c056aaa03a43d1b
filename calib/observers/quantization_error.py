"""Quantization error of a distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from sbonnx.calib.observers.base import TILE, row_tiles, rows_of
from sbonnx.calib.observers.value_errors import squared_errors
from sbonnx.calib.sketches import Distribution
from sbonnx.spec import Array, QParams

POINTS: Final = 4
"""Points per bin at which the error of fp8 is sampled; a bin is a 16th of a step of fp8 (per channel: a quarter)."""


def quantization_error(distribution: Distribution, params: QParams) -> Array:
    """Compute the mean of (x - dequantize(quantize(x)))^2 over each range, float64 (C,); 0 for an empty range.

    Single values are quantized by `QParams`, so the error of an exact distribution is exact. Values of a bin are
    assumed to be uniformly distributed over it, and the squared error is integrated; for fp8, whose steps are not
    uniform, it is averaged over `POINTS` points of the bin.

    The distance between x and its dequantized value changes by no more than x does, and values stay in their bins. So
    the root of the error of a sketch differs from the root of that of the data by at most the root mean square of the
    widths of their bins: less than a 128th (per channel: a 32nd) of the root mean square of the values, and by at most
    half a step for values within the representable range.

    Args:
        params: scale and zero point of shape (), (1,) or (C,); the axis in their spec is ignored.

    Raises:
        ValueError: the number of scales is neither one nor the number of ranges.
    """
    return _mean(distribution, params, least_width=0.0)


def guessed_error(distribution: Distribution, params: QParams) -> Array:
    """Compute the part of `quantization_error` from bins at least half a step wide, float64 (C,).

    It is correct for values that fill such bins uniformly, and arbitrary for others: the multiples of one step, for
    example, have no error at all. In fp8, whose steps are an 8th of the value or more, no bin is that wide.
    """
    if params.spec.is_float or distribution.exact:
        return np.zeros(distribution.ranges)
    return _mean(distribution, params, least_width=0.5)


def _mean(distribution: Distribution, params: QParams, least_width: float) -> Array:
    """Compute the squared error of the values in bins at least `least_width` steps wide, averaged over all values."""
    ranges = distribution.ranges
    if params.scale.size not in (1, ranges):
        raise ValueError(f"{params.scale.size} scales for {ranges} ranges")
    scale, zero = (np.broadcast_to(x.reshape(-1), (ranges,)) for x in (params.scale, params.zero_point))
    spec = replace(params.spec, axis=0, block_size=None)
    totals = np.zeros(ranges)
    for rows in row_tiles(distribution):
        part, mine = rows_of(distribution, rows), QParams(scale[rows], zero[rows], spec)
        for start in range(0, part.left.shape[1], TILE):
            columns = slice(start, start + TILE)
            totals[rows] += _sums(part, mine, columns, least_width)
    return np.asarray(totals / np.maximum(distribution.total, 1))


def _sums(distribution: Distribution, params: QParams, columns: slice, least_width: float) -> Array:
    """Compute the sum of `_mean` over the bins in `columns`, float64 (C,)."""
    left, counts = distribution.left[:, columns], distribution.counts[:, columns]
    if distribution.exact:
        return squared_errors(left, counts, params)
    squares = _squares(left, distribution.right[:, columns], params)
    squares *= counts
    if least_width:
        widths = distribution.right[:, columns] - left
        squares *= widths >= least_width * params.scale.astype(np.float64)[:, None]
    return np.asarray(squares.sum(axis=1))


def _squares(left: Array, right: Array, params: QParams) -> Array:
    """Compute the mean squared error of bins, float64 (C, bins), whose values are not known exactly."""
    if params.spec.is_float:
        width = (right - left) / POINTS
        total = np.zeros(np.broadcast_shapes(left.shape, params.scale[:, None].shape))
        for place in range(POINTS):
            x = np.broadcast_to(left + (place + 0.5) * width, total.shape).astype(np.float32)
            off = x.astype(np.float64) - params.fake_quant(x)
            total += off * off
        return total / POINTS
    scale = params.scale.astype(np.float64)[:, None]
    zero = params.zero_point.astype(np.float64)[:, None]
    lowest, highest = params.spec.qmin - zero, params.spec.qmax - zero
    means = bin_means(left / scale, right / scale, lowest, highest)
    return np.asarray(means * (scale * scale))


def bin_means(u: Array, v: Array, lowest: Array, highest: Array) -> Array:
    """Compute the mean of (w - n(w))^2 over w in [u, v], n(w) being the integer nearest to w within [lowest, highest].

    With f = w - n(w), the integral from 0 to w is n / 12 + f^3 / 3, both inside [lowest, highest] and beyond: each
    whole cell contributes 1/12, and n is constant beyond the ends. If u and v have the same integer, the mean is (f^2 +
    f g + g^2) / 3, which has no cancellation and is f^2 for a bin of zero width.

    Args:
        u, v: float64, u <= v, in quantization steps; any shapes that broadcast.
        lowest, highest: the lowest and highest integer, minus the zero point.
    """
    m, n = np.rint(u), np.rint(v)
    m, n = np.clip(m, lowest, highest), np.clip(n, lowest, highest)
    f, g = u - m, v - n
    apart = m != n
    inside = (f * f + f * g + g * g) / 3
    across = (n - m) / 12 + (g * g * g - f * f * f) / 3
    return np.asarray(np.where(apart, across / np.where(apart, v - u, 1.0), inside))
