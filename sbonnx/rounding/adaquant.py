"""AdaQuant on second moments: optimizes codes and scales together with a straight-through estimator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, final

import ml_dtypes
import numpy as np

from sbonnx.moments import Moments
from sbonnx.recipe.sections.quantizers import AdaQuantKeys
from sbonnx.rounding.adaround import best_alone, first_codes
from sbonnx.rounding.base import Grid, Rounder
from sbonnx.rounding.choices import Adam
from sbonnx.rounding.gptq import Gptq
from sbonnx.rounding.search.descent import alive, descend
from sbonnx.spec import ANY_SCALE, HALF_LIMITS, Array, QParams

FURTHEST: Final = 4.0
"""Limit of the change: a final scale is within this factor of the given one."""

INSIDE: Final = 0.49
"""Maximum initial distance of a weight from its initial code, in codes; at 0.5 it would round to another code."""

ROUNDS: Final = 5
"""Maximum number of rounds at the end that fit scales and codes to each other."""

WORTH: Final = 1e-3
"""Relative decrease of the error below which these rounds stop."""

NARROW: Final[tuple[Any, ...]] = (np.float16, ml_dtypes.bfloat16)
"""Types besides float32 in which a model may store its scales."""


@final
class AdaQuant(AdaQuantKeys, Rounder):
    """AdaQuant: optimizes weights over all codes, together with their scales.

        v = (clip(round(u)) - zero) * scale * exp(t);   minimise |w x - v x'|^2 over u, one a weight, and t, one a scale

    The gradient by v, ``G = 2 (v A - w B)``, is exact for t; for u a straight-through estimator is used (``G *
    scale``). Both are updated by Adam with learning rates that decay to 0 by half a cosine, and the best state is kept:
    separately for outputs that share no scale, jointly for those that do. At the end scales are fitted to codes and
    codes to scales in turn while the error decreases (codes by another GPTQ run if that was the start, then coordinate
    descent). Zero points are fixed.

    Source: Hubara et al. 2021, "Accurate Post Training Quantization With Small Calibration Sets", section 3.1. The
    paper uses batches and continuous weight changes, which are equivalent at the best scale; here moments are used.
    """

    moves_scales = True

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.sweeps < 0:
            raise ValueError("iterations must be >= 1 and sweeps >= 0")

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """Compute codes and scales; see `Rounder.solve`.

        Outputs that share no scale with others are never worse than round-to-nearest.

        Raises:
            NumericError: the moments contain NaN or Inf.
        """
        problem = _LayerProblem(grid, moments, _Sharing.of(qparams, moments), qparams)
        nearest = grid.nearest()
        best = problem.state(nearest, problem.given)
        first = first_codes(self.start, grid, moments, qparams)
        best = problem.better(best, problem.state(first, best.scale))
        best = problem.better(best, self._learn(problem, first))
        for _ in range(ROUNDS if self.sweeps else 0):
            before = best.error.sum()
            best = problem.better(best, problem.fitted(best))
            grid = problem.grid_of(best.scale)
            if self.start == "gptq":
                solved = Gptq(sweeps=self.sweeps).solve(grid, moments, qparams)[0]
                best = problem.better(best, problem.state(solved, best.scale))
            codes = descend(grid, best.codes, moments, self.sweeps)
            best = problem.better(best, problem.state(codes, best.scale))
            if not best.error.sum() < before * (1.0 - WORTH):
                break
        best = problem.better(best, problem.fitted(best))
        moved = best.scale.reshape(qparams.scale.shape).astype(qparams.scale.dtype)
        codes = problem.silent_nearest(best)
        return codes, qparams if (moved == qparams.scale).all() else replace(qparams, scale=moved)

    def _learn(self, problem: _LayerProblem, codes: Array) -> _AdaQuantState:
        """Run Adam from `codes` and return the best state on the way."""
        learner = _Learner(problem, codes)
        for step in range(self.iterations):
            left = (1.0 + math.cos(math.pi * step / self.iterations)) / 2.0
            learner.step(self.lr * left, self.scale_lr * left)
        return problem.state(*learner.best())


@dataclass(frozen=True)
class _AdaQuantState:
    """Codes, float64 (G, O, K); scales, float64 (S,), rounded to their storage type; error (U,)."""

    codes: Array
    scale: Array
    error: Array


@dataclass(frozen=True)
class _Sharing:
    """Assignment of scales to weights.

    Attributes:
        scales: index of the scale of each weight, (G, O, K), or (G, O, 1) if all inputs of an output share one scale.
        units: unit of each output (G, O): outputs that share a scale, directly or transitively, form one unit.
        of_scale: the unit of each scale, (S,).
        count: number of units.
    """

    scales: Array
    units: Array
    of_scale: Array
    count: int

    @staticmethod
    def of(qparams: QParams, moments: Moments) -> _Sharing:
        """Compute the units of a layer: the connected components of the graph of outputs and scales."""
        size = qparams.scale.size
        scales = moments.layout.spread(np.arange(size).reshape(qparams.scale.shape), qparams)
        if (scales == scales[..., :1]).all():
            scales = scales[..., :1]
        label = np.arange(size)
        while True:
            lowest = label[scales].min(axis=2)
            below = label.copy()
            np.minimum.at(below, scales, lowest[..., None])
            if (below == label).all():
                break
            label = below
        names, of_scale = np.unique(label, return_inverse=True)
        return _Sharing(np.ascontiguousarray(scales), of_scale[scales[..., 0]], of_scale, len(names))

    def over_scales(self, values: Array) -> Array:
        """Sum `values` (G, O, K) over the weights of each scale: float64 (S,)."""
        if self.scales.shape[2] == 1:
            values = values.sum(axis=2, keepdims=True)
        return np.bincount(self.scales.ravel(), values.ravel(), len(self.of_scale))

    def over_units(self, values: Array) -> Array:
        """Sum `values` (G, O) over the outputs of each unit: float64 (U,)."""
        return np.bincount(self.units.ravel(), values.ravel(), self.count)


@final
class _LayerProblem:
    """The optimization problem of one layer: evaluates and compares states."""

    def __init__(self, grid: Grid, moments: Moments, sharing: _Sharing, qparams: QParams) -> None:
        self.grid = grid
        self.moments = moments
        self.sharing = sharing
        self.given = given = qparams.scale.reshape(-1).astype(np.float64)
        types = [kind for kind in NARROW if (given == given.astype(kind).astype(np.float64)).all()]
        self._stored = np.dtype(types[0] if types else np.float32)
        limits = HALF_LIMITS if types else ANY_SCALE
        self._least = np.maximum(given / FURTHEST, np.minimum(given, limits.least))
        self._most = np.minimum(given * FURTHEST, np.maximum(given, limits.most))

    def state(self, codes: Array, scale: Array) -> _AdaQuantState:
        """Return a state with its error.

        Scales (S,) are limited to a range around the given ones and rounded to their storage type.
        """
        near = np.clip(scale, self._least, self._most).astype(np.float32).astype(self._stored).astype(np.float64)
        error = self.moments.error(self.grid.weight, self.grid_of(near).values(codes))
        return _AdaQuantState(codes, near, self.sharing.over_units(error))

    def grid_of(self, scale: Array) -> Grid:
        """Return the grid with other scales (S,)."""
        return replace(self.grid, scale=np.broadcast_to(scale[self.sharing.scales], self.grid.weight.shape))

    def better(self, one: _AdaQuantState, other: _AdaQuantState) -> _AdaQuantState:
        """Return the better state of each unit; `one` if both are equal."""
        is_less = other.error < one.error
        codes = np.where(is_less[self.sharing.units][..., None], other.codes, one.codes)
        scale = np.where(is_less[self.sharing.of_scale], other.scale, one.scale)
        return _AdaQuantState(codes, scale, np.minimum(one.error, other.error))

    def silent_nearest(self, state: _AdaQuantState) -> Array:
        """Return the codes of `state`, with the nearest ones for inputs that are constant 0 and have no effect."""
        nearest = self.grid_of(state.scale).nearest()
        moves = alive(np.einsum("gkk->gk", self.moments.a))[:, None, :]
        return np.where(moves, state.codes, nearest)

    def fitted(self, state: _AdaQuantState) -> _AdaQuantState:
        """Return `state` with scales moved to the minimum of the error along each unit's scale gradient.

        The error is quadratic in the scales. If a unit has one scale, this is the optimum. If it has several (blocks),
        this is one step of steepest descent, with each scale's gradient divided by its own curvature.
        """
        a, sharing = self.moments.a, self.sharing
        units = state.codes - self.grid.zero
        values = units * state.scale[sharing.scales]
        rest = self.moments.gradient(self.grid.weight, values).astype(np.float64)
        slope = sharing.over_scales(rest * units)
        curve = sharing.over_scales(np.einsum("gkk->gk", a)[:, None, :] * units * units)
        way = -slope / np.where(curve > 0, curve, np.inf)
        change = units * way[sharing.scales]
        gain = -sharing.over_units((rest * change).sum(axis=2))
        cost = sharing.over_units(((change.astype(a.dtype, copy=False) @ a) * change).sum(axis=2))
        length = gain / np.where(cost > 0, cost, np.inf)
        return self.state(state.codes, state.scale + length[sharing.of_scale] * way)


@final
class _Learner:
    """Adam on weights u in codes and on logarithms t of scales, float32; keeps the best state of each unit.

    Rows are divided by their scale and each gradient by its own curvature, so that numbers stay near 1; Adam's steps do
    not depend on this scaling.
    """

    def __init__(self, problem: _LayerProblem, codes: Array) -> None:
        grid, moments, self._sharing = problem.grid, problem.moments, problem.sharing
        self._low, self._high = (np.asarray(end, np.float32) for end in (grid.qmin, grid.qmax))
        square = np.einsum("gkk->gk", moments.a)
        moves = alive(square)
        size = np.maximum(square.max(axis=1), np.finfo(np.float32).tiny)[:, None, None]
        first = grid.scale[:, :, :1]
        self._a = (moments.a / size).astype(np.float32)
        self._target = (grid.weight / first).astype(np.float32)
        # Gradient at v = w: 0 unless the two streams differ. Afterwards only v - w is multiplied.
        pulled = moments.pull(grid.weight)
        rest = np.zeros_like(grid.weight) if pulled is None else -pulled
        self._rest = (rest / size / first).astype(np.float32)
        self._ratio = np.ascontiguousarray(grid.scale[:, :, : self._sharing.scales.shape[2]] / first, np.float32)
        self._zero = np.ascontiguousarray(grid.zero, np.float32)
        curve = np.where(moves, size[:, :, 0] / np.where(moves, square, 1.0), 0.0)[:, None, :]
        self._curve = (curve / (grid.scale / first) ** 2).astype(np.float32)
        # Divisors of the rows, relative to the largest one of their unit, so that errors can be summed over a unit.
        measure = first[:, :, 0] ** 2 * size[:, :, 0]
        largest = np.zeros(self._sharing.count)
        np.maximum.at(largest, self._sharing.units, measure)
        self._measure = (measure / largest[self._sharing.units])[..., None].astype(np.float32)
        weights = square[:, None, :] / size * ((codes - grid.zero) * grid.scale / first) ** 2 * self._measure
        curvature = self._sharing.over_scales(weights)
        self._scale_curve = np.where(curvature > 0, 1.0 / np.where(curvature > 0, curvature, 1.0), 0.0)
        inside = np.clip(best_alone(grid, codes, moments), codes - INSIDE, codes + INSIDE)
        self._u = np.clip(inside, grid.qmin, grid.qmax).astype(np.float32)
        self._t = np.zeros(len(self._sharing.of_scale), np.float32)
        self._given = problem.given
        self._adams = Adam(self._u.shape), Adam(self._t.shape)
        self._best = np.full(self._sharing.count, np.inf)
        self._codes, self._logs = codes.astype(np.float32), self._t.copy()

    def step(self, rate: float, scale_rate: float) -> None:
        """Perform one step of Adam for weights and scales. Remember the previous state if it is the best so far."""
        codes = np.clip(np.rint(self._u), self._low, self._high)
        units = codes - self._zero
        scale = np.exp(self._t)[self._sharing.scales] * self._ratio
        values = units * scale
        away = values - self._target
        product = away @ self._a
        product += self._rest
        self._remember(codes, away, product)
        values *= product
        values *= self._measure
        slope = (self._sharing.over_scales(values) * self._scale_curve).astype(np.float32)
        product *= scale
        product *= self._curve
        self._adams[0].step(self._u, product, rate)
        np.clip(self._u, self._low - np.float32(0.5), self._high + np.float32(0.5), out=self._u)
        self._adams[1].step(self._t, slope, scale_rate)

    def best(self) -> tuple[Array, Array]:
        """Return codes (G, O, K) and scales (S,), float64, of the least error of each unit."""
        return self._codes.astype(np.float64), self._given * np.exp(self._logs.astype(np.float64))

    def _remember(self, codes: Array, away: Array, slope: Array) -> None:
        """Store the units whose error, up to a constant, ``d A d' + 2 d rest``, is the least so far."""
        error = np.einsum("gok,gok->go", away, slope + self._rest) * self._measure[..., 0]
        total = self._sharing.over_units(error)
        is_less = total < self._best
        if not is_less.any():
            return
        self._best[is_less] = total[is_less]
        outputs = is_less[self._sharing.units]
        self._codes[outputs] = codes[outputs]
        scales = is_less[self._sharing.of_scale]
        self._logs[scales] = self._t[scales]
