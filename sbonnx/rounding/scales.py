"""Ranges of weights by what they cost at the layer's output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, final

import numpy as np

from sbonnx.errors import NumericError
from sbonnx.linear.layout import Layout
from sbonnx.moments import Moments
from sbonnx.rounding.base import Grid
from sbonnx.rounding.search.beam import Planes, columns, search, shift
from sbonnx.rounding.search.descent import alive
from sbonnx.rounding.search.factor import ordered_factor
from sbonnx.spec import MIN_SCALE, Array, Bounds, QParams, QuantSpec, ScaleRule, params_from_bounds

By = Literal["gptq", "nearest", "diagonal"]

NARROWEST: Final = 0.2
WIDEST: Final = 1.1
"""The ranges that are tried, as shares of the given one. Two bits want less than half; wider than given can pay where
the given one already cuts."""

HALVINGS: Final = 2
"""How often the best share is looked for again, in steps half as long, on both sides of the best so far."""

DAMPING: Final = 0.01
"""As `Gptq`'s."""

BLOCK: Final = 64
"""Columns that are rounded one by one before the others follow."""

AT_ONCE: Final = 1 << 19
"""Weights that are rounded at a time: so many candidates, or one at least."""

Shares = tuple[Array, Array]
"""Of ``lo`` and of ``hi``, each float64, shape of the bounds."""


def search_bounds(
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
    """`bounds`, each range narrowed or widened to where it costs least; never a range that costs more than the given.

    A range costs what the weights that share its scale add to the squared output error, once they are rounded:

        "gptq"      by GPTQ without descent, with damped moments: the measure for codes that gptq will find
        "nearest"   to nearest (seq-MSE): for codes that stay the nearest; what it finds suits them alone
        "diagonal"  to nearest, inputs taken for uncorrelated: no product of matrices

    Where an output has several scales (blocks along the inputs), each is found as if the other blocks stayed float;
    by "gptq" they are then kept for the outputs that gain with all of them together. An affine range is scaled as a
    whole first, then at each end. Bounds for fp8 come back as they are.

    Args:
        weight, spec: as it lies in the file, float32 or float16; of its codes.
        bounds: per tensor, channel or block, as `params_from_bounds` takes them.
        moments: of the layer's inputs.
        rule, scale_dtype, least: likewise.
        candidates: shares of the range that are tried from 0.2 to 1.1; the best are refined to a quarter of a step.
        by: the measure.

    Raises:
        NumericError: moments or bounds hold NaN or Inf.

    Source: AIMET's sequential MSE for the idea; the measures are ours.
    """
    if spec.is_fp8:
        return bounds
    _check(moments, candidates)
    make = partial(params_from_bounds, spec=spec, rule=rule, scale_dtype=scale_dtype, least=least)
    start = make(bounds)
    index = moments.layout.spread(np.arange(start.scale.size).reshape(start.scale.shape), start)
    parts = [_Part.of(weight, start, moments, chosen, by) for chosen in _classes(index)]

    def costs(tried: Sequence[Shares]) -> list[Array]:
        some = [make(_scaled(bounds, shares)) for shares in tried]
        return _summed([(part.own(index), part.costs(some, moments.layout)) for part in parts], start.scale.shape)

    found = _scaled(bounds, _least(costs, start.scale.shape, candidates, one_sided=not spec.symmetric))
    if by != "gptq" or sum(len(part.chosen) for part in parts) == 1:
        return found
    whole = _Part.of(weight, start, moments, np.arange(moments.layout.inputs)[None], by)
    before, after = whole.costs([start, make(found)], moments.layout)
    worse = _worse(before, after, index)
    back = worse.reshape(start.scale.shape)
    return Bounds(np.where(back, bounds.lo, found.lo), np.where(back, bounds.hi, found.hi))


def _summed(parts: Sequence[tuple[Array, Iterator[Array]]], shape: tuple[int, ...]) -> list[Array]:
    """What each scale costs (`shape`), for each candidate: whose the costs of a part are, and those by candidate."""
    totals = []
    for spent in zip(*(costs for _, costs in parts), strict=True):
        total = np.zeros(math.prod(shape))
        for (own, _), one in zip(parts, spent, strict=True):
            total += np.bincount(own.ravel(), one.ravel(), total.size)
        totals.append(total.reshape(shape))
    return totals


def _check(moments: Moments, candidates: int) -> None:
    """Refuses what cannot be searched with."""
    if candidates < 2:
        raise ValueError("at least two candidates are needed")
    if not (np.isfinite(moments.a).all() and np.isfinite(moments.b).all()):
        raise NumericError("the inputs of the layer hold NaN or infinite values")


def _worse(before: Array, after: Array, index: Array) -> Array:
    """Which scales did not pay, by what each output (G, O) costs, rounded as a whole; `index` (G, O, K) says whose.

    Where a scale is of several outputs, it is all or none.
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
    """The shares of least cost: of both ends alike, then, where `one_sided`, of each alone."""
    best = (np.ones(shape), np.ones(shape))
    least = costs([best])[0]
    step = (WIDEST - NARROWEST) / (candidates - 1)

    def attempt(tried: Sequence[Shares]) -> None:
        nonlocal best, least
        for one, spent in zip(tried, costs(tried), strict=True):
            better = spent < least
            best = (np.where(better, one[0], best[0]), np.where(better, one[1], best[1]))
            least = np.where(better, spent, least)

    for moves in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)) if one_sided else ((1.0, 1.0),):
        centre = best
        attempt([_towards(centre, moves, share) for share in np.linspace(NARROWEST, WIDEST, candidates)])
        for halving in range(1, HALVINGS + 1):
            centre = best
            offsets = (-step / 2**halving, step / 2**halving)
            attempt([(centre[0] + moves[0] * offset, centre[1] + moves[1] * offset) for offset in offsets])
    return best


def _towards(centre: Shares, moves: tuple[float, float], share: float) -> Shares:
    """`centre` with the ends that move at `share`."""
    low, high = (np.full(each.shape, share) if move else each for each, move in zip(centre, moves, strict=True))
    return low, high


def _classes(index: Array) -> list[Array]:
    """Columns that share their scales, (classes, columns) for each size that there is, from `index` (G, O, K)."""
    _, inverse, counts = np.unique(index[0, 0], return_inverse=True, return_counts=True)
    ordered = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    return [np.stack([each for each in ordered if len(each) == size]) for size in np.unique(counts)]


@final
@dataclass(frozen=True)
class _Part:
    """Classes of as many columns, each a group of its own: groups G * classes, outputs O, inputs B.

    Attributes:
        chosen: (classes, B) columns of the layer.
        weight: float64 (G * classes, O, B).
        moments: of those inputs; of the layer as they are where there is one class.
        order, planes: what GPTQ needs, None where it is not the measure.
        by: the measure.
    """

    chosen: Array
    weight: Array
    moments: Moments
    order: Array | None
    planes: Planes | None
    by: By

    @staticmethod
    def of(weight: Array, qparams: QParams, moments: Moments, chosen: Array, by: By) -> _Part:
        """The columns `chosen` of a layer; any scales for `qparams`."""
        grid = Grid.of(weight, qparams, moments.layout)
        own_weight, scale, zero = (_take(part, chosen) for part in (grid.weight, grid.scale, grid.zero))
        own = replace(grid, weight=own_weight, scale=scale, zero=zero)
        inner = _inner(moments, chosen)
        if by != "gptq":
            return _Part(chosen, own.weight, inner, None, None, by)
        order, factor = ordered_factor(inner.a, DAMPING, "pivot")
        planes = Planes.of(own, order, factor, shift(own, inner))
        # Damping gives inputs that are always 0 a weight, which their share of the cost must not have.
        seen = np.take_along_axis(alive(np.einsum("gkk->gk", inner.a)), order, axis=1)
        return _Part(chosen, own.weight, inner, order, replace(planes, pivots=planes.pivots * seen), by)

    def own(self, index: Array) -> Array:
        """Whose cost it is: the scales (G * classes, O) of `index` (G, O, K)."""
        return _take(index, self.chosen)[:, :, 0]

    def costs(self, some: Sequence[QParams], layout: Layout) -> Iterator[Array]:
        """The squared output error (G * classes, O) with the scales of each of `some`, up to a constant of the layer.

        As many at a time, side by side as if they were outputs, as a search takes the time of one: small layers wait
        for Python, not for arithmetic.
        """
        step = max(AT_ONCE // self.weight.size, 1)
        for first in range(0, len(some), step):
            taken = some[first : first + step]
            scale, zero = (
                np.concatenate([_take(layout.spread(each, one), self.chosen) for each, one in pairs], axis=1)
                for pairs in (
                    [(one.scale.astype(np.float64), one) for one in taken],
                    [(one.zero_point.astype(np.float64), one) for one in taken],
                )
            )
            found = self._cost(scale, zero, taken[0].spec)
            yield from np.split(found, len(taken), axis=1)

    def _cost(self, scale: Array, zero: Array, spec: QuantSpec) -> Array:
        """Likewise with `scale` and `zero` (G * classes, n * O, B): the outputs n times over."""
        times = scale.shape[1] // self.weight.shape[1]
        if self.planes is not None and self.order is not None:
            scale, zero = (columns(each, self.order).astype(np.float32) for each in (scale, zero))
            weight, target = (np.tile(each, (1, times, 1)) for each in (self.planes.weight, self.planes.target))
            planes = replace(self.planes, weight=weight, target=target, scale=scale, zero=zero)
            return search(planes, 1, BLOCK)[1].astype(np.float64)
        weight = np.tile(self.weight, (1, times, 1))
        found = (np.clip(np.rint(weight / scale + zero), spec.qmin, spec.qmax) - zero) * scale
        if self.by == "nearest":
            error: Array = self.moments.error(weight, found)
            return error
        return np.asarray(np.einsum("gok,gkk->go", np.square(found - weight), self.moments.a))


def _take(matrices: Array, chosen: Array) -> Array:
    """(G, O, K) as (G * classes, O, B) by the columns `chosen` (classes, B)."""
    groups, outputs, _ = matrices.shape
    return np.asarray(matrices[:, :, chosen].transpose(0, 2, 1, 3).reshape(groups * len(chosen), outputs, -1))


def _inner(moments: Moments, chosen: Array) -> Moments:
    """The moments of each class of columns (classes, B) alone; shifted inputs count where it is the whole.

    Inputs of which nothing was seen cost nothing, but where a class has no others, all of its inputs cost the same.
    """
    a, b, c = moments.a, moments.b, moments.c
    if chosen.shape != (1, a.shape[1]):
        a = a[:, chosen[:, :, None], chosen[:, None, :]].reshape(-1, chosen.shape[1], chosen.shape[1])
        b = c = a
    square = np.einsum("gkk->gk", a)
    unseen = ~np.any(alive(square), axis=1)
    if unseen.any():
        a = np.where(unseen[:, None, None], np.eye(a.shape[1]), a)
        # A group of which nothing was seen has no shift either.
        b = c = a
    mean = np.zeros(square.shape)
    return Moments(moments.layout, moments.rows, a, b, c, mean, mean)
