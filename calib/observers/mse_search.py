"""`Errors`: the mean squared error of candidate ranges, and a bound on useful clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from sbonnx.calib.observers.base import Target, mirrored
from sbonnx.calib.observers.cumulative import Curve
from sbonnx.calib.observers.quantization_error import bin_means, quantization_error
from sbonnx.calib.sketches import Distribution
from sbonnx.spec import Array

Errors = Callable[[Array, Array], Array]
"""(lo, hi) of K candidates for each of C ranges, float64 (K, C) → mean squared error, float64 (K, C)."""

CURVE_STEPS: Final = 1 << 10
"""Number of quantization steps up to which a `Curve` is faster than a pass over the bins."""


def errors_of(distribution: Distribution, target: Target) -> Errors:
    """Return a fast function that compares candidates.

    It is accurate to about six digits and uses the final rounded zero points.
    """
    if target.spec.is_fp8:
        return _errors_of_floats(distribution, target)
    steps = target.spec.qmax - target.spec.qmin
    curve = Curve.of(distribution) if distribution.ranges == 1 and steps <= CURVE_STEPS else None
    mean = _means_of_values if distribution.exact else _means_of_bins
    weights = distribution.counts / np.maximum(distribution.counts.sum(axis=1, keepdims=True), 1)
    if distribution.exact:
        weights = weights.astype(np.float32)

    def errors(lo: Array, hi: Array) -> Array:
        params = target.params(lo, hi)
        scale = params.scale.astype(np.float64)
        zero = params.zero_point.astype(np.float64)
        lowest, highest = target.spec.qmin - zero, target.spec.qmax - zero
        if curve is not None:
            return curve.errors(scale[:, 0], lowest[:, 0], highest[:, 0], steps)[:, None]
        rows = zip(scale, lowest, highest, strict=True)
        return np.stack([mean(distribution, weights, s, a, b) * s * s for s, a, b in rows])

    return errors


def _errors_of_floats(distribution: Distribution, target: Target) -> Errors:
    """Return the error function for fp8, whose steps are not uniform: computed by `QParams`."""

    def errors(lo: Array, hi: Array) -> Array:
        lo, hi = np.broadcast_arrays(lo, hi)
        pairs = zip(lo, hi, strict=True)
        return np.stack([quantization_error(distribution, target.params(low, high)) for low, high in pairs])

    return errors


def _means_of_values(distribution: Distribution, weights: Array, scale: Array, lowest: Array, highest: Array) -> Array:
    """Compute the mean squared error of single values in steps, float64 (C,); in float32, to rank candidates only."""
    wide = [np.asarray(x, np.float32)[:, None] for x in (1 / scale, lowest, highest)]
    u = distribution.left * wide[0]
    nearest = np.rint(u)
    np.clip(nearest, wide[1], wide[2], out=nearest)
    u -= nearest
    u *= u
    u *= weights
    return np.asarray(u.sum(axis=1), np.float64)


def _means_of_bins(distribution: Distribution, weights: Array, scale: Array, lowest: Array, highest: Array) -> Array:
    """Compute the mean squared error of uniformly filled bins in steps, float64 (C,)."""
    wide, bottom, top = scale[:, None], lowest[:, None], highest[:, None]
    means = bin_means(distribution.left / wide, distribution.right / wide, bottom, top)
    means *= weights
    return np.asarray(means.sum(axis=1))


def least_ends(distribution: Distribution, error: Array) -> tuple[Array, Array]:
    """Compute the ends (lo, hi), float64 (C,): a range with an end closer to 0 clips away more than `error` per value.

    Clipping at t costs sum over x > t of (x - t)^2, which decreases in t. It is evaluated at the left edges of the
    bins, so the cost is never overestimated.

    Args:
        error: mean squared error of the range to improve on, float64 (C,).
    """
    budget = error * distribution.total
    return -_least_end(mirrored(distribution), budget), _least_end(distribution, budget)


def _least_end(distribution: Distribution, budget: Array) -> Array:
    """Return the largest edge at which clipping costs more than `budget`, float64 (C,); 0 if there is none."""
    x = np.maximum(distribution.left.astype(np.float64), 0.0)
    weights = np.where(distribution.left > 0, distribution.counts, 0)[:, ::-1]
    x = x[:, ::-1]
    first = weights * x
    count, total, squares = (np.cumsum(values, axis=1) for values in (weights, first, first * x))
    cost = squares - 2 * x * total + x * x * count  # from the largest x down, so it increases
    return np.asarray(np.where(cost > budget[:, None], x, 0.0).max(axis=1, initial=0.0))
