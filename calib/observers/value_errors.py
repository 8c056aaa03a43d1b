"""Errors of candidate ranges for single values: compiled if available, else in numpy, with bit-identical results."""

from __future__ import annotations

import numpy as np

from sbonnx.calib.observers.base import mirrored
from sbonnx.calib.sketches import Distribution
from sbonnx.spec import BIAS_BITS, Array, QParams
from sbonnx.system.native import address, compiled

native = compiled("sbonnx.calib.sketches._kernels")


def step_means(x: Array, weights: Array, scale: Array, lowest: Array, highest: Array) -> Array:
    """Compute the mean squared error of K candidates in steps, float64 (K, C); in float32, to rank candidates only.

    Args:
        x: float32 (C, n), values of each range.
        weights: float32 (C, n) or (1, n), share of each value.
        scale, lowest, highest: float64 (K, C); lowest and highest integer, minus the zero point.
    """
    inverse, low, high = (np.asarray(values, np.float32) for values in (1 / scale, lowest, highest))
    if native is None:
        return np.stack([_step_mean(x, weights, *row) for row in zip(inverse, low, high, strict=True)])
    (inverse, low, high), sums = map(np.ascontiguousarray, (inverse, low, high)), np.empty(scale.shape, np.float32)
    x, weights = np.ascontiguousarray(x), np.ascontiguousarray(weights)
    native.step_errors(
        address(x), address(weights), *x.shape, _own(x, weights), address(inverse), address(low), address(high),
        len(sums), address(sums),
    )  # fmt: skip
    return sums.astype(np.float64)


def _step_mean(x: Array, weights: Array, inverse: Array, lowest: Array, highest: Array) -> Array:
    """Compute `step_means` of one candidate, float64 (C,)."""
    u = x * inverse[:, None]
    nearest = np.rint(u)
    np.clip(nearest, lowest[:, None], highest[:, None], out=nearest)
    u -= nearest
    u *= u
    u *= weights
    return np.asarray(u.sum(axis=1), np.float64)


def squared_errors(x: Array, counts: Array, params: QParams) -> Array:
    """Compute the sum of counts * (x - dequantize(quantize(x)))^2 of each range, float64 (C,).

    Args:
        x: float32 (C, n), finite.
        counts: int64 (C, n) or (1, n).
        params: scale and zero point of each range, (C,), axis 0.
    """
    if native is None or params.spec.is_float or params.spec.bits == BIAS_BITS:
        off = x.astype(np.float64) - params.fake_quant(x)
        off *= off
        off *= counts
        return np.asarray(off.sum(axis=1))
    x, counts, sums = np.ascontiguousarray(x), counts.astype(np.float64, order="C"), np.empty(len(x))
    scale, zero = (np.ascontiguousarray(values, np.float32) for values in (params.scale, params.zero_point))
    native.value_errors(
        address(x), address(counts), *x.shape, _own(x, counts), address(scale), address(zero), params.spec.qmin,
        params.spec.qmax, address(sums),
    )  # fmt: skip
    return sums


def clipping_ends(distribution: Distribution, budget: Array) -> tuple[Array, Array]:
    """Return the largest magnitudes (below 0, above 0) at which clipping costs more than `budget`, float64 (C,) each.

    Clipping at t costs sum over x > t of counts * (x - t)^2, evaluated at the left edges of the bins. The end is 0 if
    no edge costs more.

    Args:
        budget: float64 (C,).
    """
    if native is None or not distribution.exact:
        return _clipping_end(mirrored(distribution), budget), _clipping_end(distribution, budget)
    x, counts = np.ascontiguousarray(distribution.left), distribution.counts.astype(np.float64, order="C")
    below, above, budget = np.empty(len(x)), np.empty(len(x)), np.ascontiguousarray(budget)
    native.clipping_ends(
        address(x), address(counts), *x.shape, _own(x, counts), address(budget), address(below), address(above)
    )
    return below, above


def _clipping_end(distribution: Distribution, budget: Array) -> Array:
    """Compute the end above 0 of `clipping_ends`."""
    x = np.maximum(distribution.left.astype(np.float64), 0.0)
    weights = np.where(distribution.left > 0, distribution.counts, 0)[:, ::-1]
    x = x[:, ::-1]
    first = weights * x
    count, total, squares = (np.cumsum(values, axis=1) for values in (weights, first, first * x))
    cost = squares - 2 * x * total + x * x * count  # from the largest x down, so it increases
    return np.asarray(np.where(cost > budget[:, None], x, 0.0).max(axis=1, initial=0.0))


def _own(x: Array, counts: Array) -> bool:
    """Return whether each range has its own counts."""
    return len(x) > 1 and len(counts) == len(x)
