"""Search of weight ranges by the output error of the layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, final

import numpy as np

from sbonnx.errors import NumericError
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import Moments
from sbonnx.rounding.base import FAR, Grid, kept_zeros
from sbonnx.rounding.search.beam import Planes, columns, limits_in, search
from sbonnx.rounding.search.descent import alive
from sbonnx.rounding.search.factor import factor_of
from sbonnx.spec import MIN_SCALE, Array, Bounds, QParams, QuantSpec, ScaleRule, params_from_bounds

By = Literal["gptq", "nearest", "diagonal"]

NARROWEST: Final = 0.2
WIDEST: Final = 1.1
"""Limits of the tried ranges relative to the given one.

Two bits need less than half the range. A wider range can help if the given one already clips.
"""

HALVINGS: Final = 2
"""Number of refinements around the best ratio, each with half the step."""

DAMPING: Final = 0.01
"""Same value as in `Gptq`."""

BLOCK: Final = 64
"""Columns that are rounded one by one before the remaining columns are updated."""

AT_ONCE: Final = 1 << 19
"""Weights that are rounded at a time: as many candidates as fit, at least one."""

Shares = tuple[Array, Array]
"""Ratios of ``lo`` and ``hi``, each float64, in the shape of the bounds."""


def search_bounds(  # noqa: PLR0913 - one search, all of its settings
    weight: Array,
    spec: QuantSpec,
    bounds: Bounds,
    moments: Moments,
    rule: ScaleRule = "exact",
    candidates: int = 10,
    *,
    by: By = "gptq",
    scale_dtype: Any = np.float32,
    least: float = MIN_SCALE,
) -> Bounds:
    """Narrow or widen each range to the one of least cost. The cost never exceeds that of the given range.

    The cost of a range is the squared output error that is added by rounding the weights that share its scale:

        "gptq"      rounded by GPTQ without descent, with damped moments: for codes that are computed by GPTQ
        "nearest"   rounded to nearest (seq-MSE): only for codes that are rounded to nearest
        "diagonal"  rounded to nearest, inputs assumed to be uncorrelated: no matrix product

    If an output has several scales (blocks along the inputs), each is optimized as if the other blocks were float. With
    "gptq" they are used only for the outputs whose error decreases with all of them together. An affine range is first
    scaled as a whole, then at each end. Bounds for fp8 are returned unchanged.

    Args:
        weight, spec: weight in its file layout, float32 or float16; its quantization.
        bounds: per tensor, channel or block, as for `params_from_bounds`.
        moments: of the layer's inputs.
        rule, scale_dtype, least: as for `params_from_bounds`.
        candidates: number of ratios from 0.2 to 1.1 that are tried; the best are refined to a quarter of a step.
        by: the cost function.

    Raises:
        NumericError: moments or bounds contain NaN or Inf.

    Source: AIMET's sequential MSE for the idea; the cost functions are ours.
    """
    if spec.is_float:
        return bounds
    if candidates < 2:
        raise ValueError("at least two candidates are needed")
    if not moments.is_finite:
        raise NumericError("the inputs of the layer hold NaN or infinite values")
    make = partial(params_from_bounds, spec=spec, rule=rule, scale_dtype=scale_dtype, least=least)
    start = make(bounds)
    index = moments.layout.spread(np.arange(start.scale.size).reshape(start.scale.shape), start)
    parts = [_Part.of(weight, start, moments, chosen, by) for chosen in _classes(index)]

    def costs(tried: Sequence[Shares]) -> list[Array]:
        some = [make(_scaled(bounds, shares)) for shares in tried]
        return _summed([(part.own(index), part.costs(some, moments.layout)) for part in parts], start.scale.shape)

    scaled = _scaled(bounds, _least(costs, start.scale.shape, candidates, one_sided=not spec.symmetric))
    if by != "gptq" or sum(len(part.chosen) for part in parts) == 1:
        return scaled
    whole = _Part.of(weight, start, moments, np.arange(moments.layout.inputs)[None], by)
    before, after = whole.costs([start, make(scaled)], moments.layout)
    worse = _worse(before, after, index)
    back = worse.reshape(start.scale.shape)
    return Bounds(np.where(back, bounds.lo, scaled.lo), np.where(back, bounds.hi, scaled.hi))


def _summed(parts: Sequence[tuple[Array, Iterator[Array]]], shape: tuple[int, ...]) -> list[Array]:
    """Sum the costs of each scale (`shape`) over all parts, for each candidate.

    Args:
        parts: for each part the scale that a cost belongs to, and the costs for each candidate.
        shape: of the scales.
    """
    totals = []
    for spent in zip(*(costs for _, costs in parts), strict=True):
        total = np.zeros(math.prod(shape))
        for (own, _), part_costs in zip(parts, spent, strict=True):
            total += np.bincount(own.ravel(), part_costs.ravel(), total.size)
        totals.append(total.reshape(shape))
    return totals


def _worse(before: Array, after: Array, index: Array) -> Array:
    """Return which scales did not reduce the error, by the cost of each output (G, O), rounded as a whole.

    `index` (G, O, K) is the scale of each weight. If a scale is shared by several outputs, all scales are judged
    together.
    """
    owner = np.broadcast_to(np.arange(before.size).reshape(*before.shape, 1), index.shape)
    last = np.zeros(int(index.max()) + 1, np.intp)
    last[index] = owner
    worse = np.zeros(last.shape, bool)
    if (last[index] == owner).all():
        worse[index[after > before]] = True
    else:
        worse[:] = after.sum() > before.sum()
    return worse


def _scaled(bounds: Bounds, shares: Shares) -> Bounds:
    lo, hi = (np.asarray(end * share, np.float32) for end, share in zip((bounds.lo, bounds.hi), shares, strict=True))
    return Bounds(lo, hi)


def _least(
    costs: Callable[[Sequence[Shares]], Sequence[Array]], shape: tuple[int, ...], candidates: int, one_sided: bool
) -> Shares:
    """Return the ratios of least cost: for both ends together, then, if `one_sided`, for each end."""
    best = (np.ones(shape), np.ones(shape))
    least = costs([best])[0]
    step = (WIDEST - NARROWEST) / (candidates - 1)

    def attempt(tried: Sequence[Shares]) -> None:
        nonlocal best, least
        for candidate, spent in zip(tried, costs(tried), strict=True):
            better = spent < least
            best = (np.where(better, candidate[0], best[0]), np.where(better, candidate[1], best[1]))
            least = np.where(better, spent, least)

    for moves in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)) if one_sided else ((1.0, 1.0),):
        centre, tried = best, []
        for share in np.linspace(NARROWEST, WIDEST, candidates):
            low, high = (np.full(shape, share) if move else end for end, move in zip(centre, moves, strict=True))
            tried.append((low, high))
        attempt(tried)
        for halving in range(1, HALVINGS + 1):
            centre = best
            offsets = (-step / 2**halving, step / 2**halving)
            attempt([(centre[0] + moves[0] * offset, centre[1] + moves[1] * offset) for offset in offsets])
    return best


def _classes(index: Array) -> list[Array]:
    """Group columns that share their scales: (classes, columns) for each class size, from `index` (G, O, K)."""
    _, inverse, counts = np.unique(index[0, 0], return_inverse=True, return_counts=True)
    ordered = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    return [np.stack([group for group in ordered if len(group) == size]) for size in np.unique(counts)]


@final
@dataclass(frozen=True)
class _Part:
    """Classes of equal size, each as a separate group: groups G * classes, outputs O, inputs B.

    Attributes:
        chosen: (classes, B) columns of the layer.
        weight: float64 (G * classes, O, B).
        moments: of those inputs; the layer's own moments if there is only one class.
        order, planes: inputs of GPTQ; None for other cost functions.
        spacing: factor of the scales of GPTQ, (G * classes, O, B), large where a zero is kept; None: 1 everywhere.
        by: the cost function.
    """

    chosen: Array
    weight: Array
    moments: Moments
    order: Array | None
    planes: Planes | None
    spacing: Array | None
    by: By

    @staticmethod
    def of(weight: Array, qparams: QParams, moments: Moments, chosen: Array, by: By) -> _Part:
        """Select the columns `chosen` of a layer; `qparams` may have any scales."""
        grid = Grid.of(weight, qparams, moments.layout)
        own_weight, scale, zero = (_take(part, chosen) for part in (grid.weight, grid.scale, grid.zero))
        own = replace(grid, weight=own_weight, scale=scale, zero=zero)
        inner = _inner(moments, chosen)
        if by != "gptq":
            return _Part(chosen, own.weight, inner, None, None, None, by)
        factor = factor_of(inner, DAMPING, "pivot")
        order, planes = factor.order, Planes.of(own, factor, inner.pull(own.weight))
        # Damping gives inputs that are always 0 a nonzero moment, which must not count in the cost.
        seen = np.take_along_axis(alive(np.einsum("gkk->gk", inner.a)), order, axis=1)
        zeros = kept_zeros(grid.weight)
        spacing = None if zeros is None else _take(np.where(zeros, FAR, 1.0), chosen)
        return _Part(chosen, own.weight, inner, order, replace(planes, pivots=planes.pivots * seen), spacing, by)

    def own(self, index: Array) -> Array:
        """Return the scale that each cost belongs to, (G * classes, O), from `index` (G, O, K)."""
        return _take(index, self.chosen)[:, :, 0]

    def costs(self, some: Sequence[QParams], layout: LinearLayer) -> Iterator[Array]:
        """Yield the squared output error (G * classes, O) for each of `some`, up to a constant of the layer.

        Several candidates are stacked along the output axis and searched together, because small layers are bound by
        Python overhead.
        """
        step = max(AT_ONCE // self.weight.size, 1)
        for first in range(0, len(some), step):
            taken = some[first : first + step]
            scale, zero = (
                np.concatenate([_take(layout.spread(value, qparams), self.chosen) for value, qparams in pairs], axis=1)
                for pairs in (
                    [(qparams.scale.astype(np.float64), qparams) for qparams in taken],
                    [(qparams.zero_point.astype(np.float64), qparams) for qparams in taken],
                )
            )
            errors = self._cost(scale, zero, taken[0].spec)
            yield from np.split(errors, len(taken), axis=1)

    def _cost(self, scale: Array, zero: Array, spec: QuantSpec) -> Array:
        """Compute the costs for `scale` and `zero` (G * classes, n * O, B), the outputs repeated n times."""
        times = scale.shape[1] // self.weight.shape[1]
        weight = np.tile(self.weight, (1, times, 1))
        # a type with pairs has one class of columns, those of the layer
        low, high = self.moments.layout.code_limits(weight / scale, spec)
        if self.planes is not None and self.order is not None:
            if self.spacing is not None:
                scale = scale * np.tile(self.spacing, (1, times, 1))
            scale, zero = (columns(array, self.order).astype(np.float32) for array in (scale, zero))
            weight, target = (np.tile(array, (1, times, 1)) for array in (self.planes.weight, self.planes.target))
            low, high = (limits_in(array, self.order) for array in (low, high))
            planes = replace(self.planes, weight=weight, target=target, scale=scale, zero=zero, low=low, high=high)
            return search(planes, 1, BLOCK)[1].astype(np.float64)
        rounded = (np.clip(np.rint(weight / scale + zero), low, high) - zero) * scale
        if self.by == "nearest":
            error: Array = self.moments.error(weight, rounded)
            return error
        return np.asarray(np.einsum("gok,gkk->go", np.square(rounded - weight), self.moments.a))


def _take(matrices: Array, chosen: Array) -> Array:
    """Select the columns `chosen` (classes, B): (G, O, K) to (G * classes, O, B)."""
    groups, outputs, _ = matrices.shape
    return np.asarray(matrices[:, :, chosen].transpose(0, 2, 1, 3).reshape(groups * len(chosen), outputs, -1))


def _inner(moments: Moments, chosen: Array) -> Moments:
    """Return the moments of each class of columns (classes, B).

    The shift by quantized inputs counts only if the class is the whole layer. Unseen inputs
    have no cost, but if a class has only unseen inputs, all of them get equal cost.
    """
    whole = chosen.shape == (1, moments.a.shape[1]) and (np.diff(chosen) == 1).all()
    a = moments.a
    if not whole:
        a = a[:, chosen[:, :, None], chosen[:, None, :]].reshape(-1, chosen.shape[1], chosen.shape[1])
    square = np.einsum("gkk->gk", a)
    unseen = ~np.any(alive(square), axis=1)
    if unseen.any():
        # An unseen group has no input shift either.
        whole, a = False, np.where(unseen[:, None, None], np.eye(a.shape[1], dtype=a.dtype), a)
    if whole:
        return moments
    mean = np.zeros(square.shape)
    return Moments(moments.layout, moments.rows, a, None, None, mean, mean)
