"""AdaQuant by moments: codes and scales learned together, by a gradient that passes straight through the rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, final

import ml_dtypes
import numpy as np

from sbonnx.moments import Moments
from sbonnx.rounding.adam import Adam
from sbonnx.rounding.adaround import Start, best_alone, first_codes
from sbonnx.rounding.base import Grid, Rounder
from sbonnx.rounding.gptq import Gptq
from sbonnx.rounding.search.descent import alive, descend
from sbonnx.spec import ANY_SCALE, HALF_LIMITS, Array, QParams

FURTHEST: Final = 4.0
"""A scale ends within this factor of the one that was given."""

INSIDE: Final = 0.49
"""How far from its first code a weight may begin: a whole half would be another code."""

ROUNDS: Final = 5
"""Scales and codes are fitted to each other at most so often at the end."""

WORTH: Final = 1e-3
"""What share of the error a round must win for another one."""

NARROW: Final[tuple[Any, ...]] = (np.float16, ml_dtypes.bfloat16)
"""Types in which a model may store its scales beside float32."""


@final
class AdaQuant(Rounder):
    """Weights free to move over all codes, and their scales with them.

        v = (clip(round(u)) - zero) * scale * exp(t);   minimise |w x - v x'|^2 over u, one a weight, and t, one a scale

    The gradient, ``G = 2 (v A - w B)`` by v, is exact for t; for u it passes straight through the rounding
    (``G * scale``). Both take Adam's steps, which shrink to nothing over half a wave of cosine, and the best that was
    met on the way is kept: apart for outputs that share no scale, together for those that do. At the end scales move
    to their best for the codes and codes to theirs for the scales (gptq anew where that was the start, then
    coordinate descent), in turn, while it helps. Zero points stay.

    Args:
        iterations: steps of Adam.
        lr: its learning rate for weights, in codes.
        scale_lr: for scales, relative.
        start: codes to begin with, "gptq" or "nearest".
        sweeps: at most so many of coordinate descent each time at the end; 0 leaves the end out.

    Source: Hubara et al. 2021, "Accurate Post Training Quantization With Small Calibration Sets", section 3.1; there on
    batches and with weights moved continuously, which at the best scale is the same; here on moments.
    """

    moves_scales = True

    def __init__(
        self,
        iterations: int = 500,
        lr: float = 0.01,
        scale_lr: float = 0.003,
        start: Start = "gptq",
        sweeps: int = 20,
    ) -> None:
        if iterations < 1 or sweeps < 0:
            raise ValueError("iterations must be >= 1 and sweeps >= 0")
        self.iterations = iterations
        self.lr = lr
        self.scale_lr = scale_lr
        self.start = start
        self.sweeps = sweeps

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """See `Rounder.solve`; outputs that share no scale with others are never worse than their nearest codes.

        Raises:
            NumericError: the moments hold NaN or Inf.
        """
        problem = _Problem(grid, moments, _Sharing.of(qparams, moments), qparams)
        nearest = np.clip(np.rint(grid.ratio()), grid.qmin, grid.qmax)
        found = problem.state(nearest, problem.given)
        first = first_codes(self.start, grid, moments, qparams)
        found = problem.better(found, problem.state(first, found.scale))
        found = problem.better(found, self._learn(problem, first))
        for _ in range(ROUNDS if self.sweeps else 0):
            before = found.error.sum()
            found = problem.better(found, problem.fitted(found))
            grid = problem.grid_of(found.scale)
            if self.start == "gptq":
                anew = Gptq(sweeps=self.sweeps).solve(grid, moments, qparams)[0]
                found = problem.better(found, problem.state(anew, found.scale))
            codes = descend(grid, found.codes, moments, self.sweeps)
            found = problem.better(found, problem.state(codes, found.scale))
            if not found.error.sum() < before * (1.0 - WORTH):
                break
        found = problem.better(found, problem.fitted(found))
        moved = found.scale.reshape(qparams.scale.shape).astype(qparams.scale.dtype)
        codes = problem.silent_nearest(found)
        return codes, qparams if (moved == qparams.scale).all() else replace(qparams, scale=moved)

    def _learn(self, problem: _Problem, codes: Array) -> _State:
        """The best that Adam meets from `codes` on."""
        learner = _Learner(problem, codes)
        for step in range(self.iterations):
            left = (1.0 + math.cos(math.pi * step / self.iterations)) / 2.0
            learner.step(self.lr * left, self.scale_lr * left)
        return problem.state(*learner.best())


@dataclass(frozen=True)
class _State:
    """Codes, float64 (G, O, K); scales, float64 (S,), of the type that they are stored in; and the error (U,)."""

    codes: Array
    scale: Array
    error: Array


@dataclass(frozen=True)
class _Sharing:
    """Who has which scale.

    Attributes:
        scales: for each weight which one, (G, O, K), or (G, O, 1) where all inputs of an output have the same.
        units: for each output (G, O) its unit: outputs that share a scale, directly or by way of others, are one.
        of_scale: the unit of each scale, (S,).
        count: how many units there are.
    """

    scales: Array
    units: Array
    of_scale: Array
    count: int

    @staticmethod
    def of(qparams: QParams, moments: Moments) -> _Sharing:
        """The sharing of a layer's scales: the components of the graph of outputs and scales."""
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
        """`values` (G, O, K) summed over the weights of each scale: float64 (S,)."""
        if self.scales.shape[2] == 1:
            values = values.sum(axis=2, keepdims=True)
        return np.bincount(self.scales.ravel(), values.ravel(), len(self.of_scale))

    def over_units(self, values: Array) -> Array:
        """`values` (G, O) summed over the outputs of each unit: float64 (U,)."""
        return np.bincount(self.units.ravel(), values.ravel(), self.count)


@final
class _Problem:
    """What is to be solved, and how good an answer is."""

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

    def state(self, codes: Array, scale: Array) -> _State:
        """An answer with its error; scales (S,) as they will be stored, near those that were given."""
        near = np.clip(scale, self._least, self._most).astype(np.float32).astype(self._stored).astype(np.float64)
        error = self.moments.error(self.grid.weight, self.grid_of(near).values(codes))
        return _State(codes, near, self.sharing.over_units(error))

    def grid_of(self, scale: Array) -> Grid:
        """The grid with other scales (S,)."""
        return replace(self.grid, scale=np.broadcast_to(scale[self.sharing.scales], self.grid.weight.shape))

    def better(self, one: _State, other: _State) -> _State:
        """Unit by unit the better of both; `one` where they are equal."""
        is_less = other.error < one.error
        codes = np.where(is_less[self.sharing.units][..., None], other.codes, one.codes)
        scale = np.where(is_less[self.sharing.of_scale], other.scale, one.scale)
        return _State(codes, scale, np.minimum(one.error, other.error))

    def silent_nearest(self, state: _State) -> Array:
        """Codes with the nearest ones, at the scales of `state`, where the input is constant 0 and any would do."""
        nearest = np.clip(np.rint(self.grid_of(state.scale).ratio()), self.grid.qmin, self.grid.qmax)
        moves = alive(np.einsum("gkk->gk", self.moments.a))[:, None, :]
        return np.where(moves, state.codes, nearest)

    def fitted(self, state: _State) -> _State:
        """`state` with its scales moved to where the error is least along the slope of each unit's scales.

        The error is quadratic in the scales. Where a unit has one scale this is its best; where it has several
        (blocks) it is one step of steepest descent, each scale's slope divided by its own curvature.
        """
        a, b, sharing = self.moments.a, self.moments.b, self.sharing
        units = state.codes - self.grid.zero
        values = units * state.scale[sharing.scales]
        rest = values @ a - self.grid.weight @ b
        slope = sharing.over_scales(rest * units)
        curve = sharing.over_scales(np.einsum("gkk->gk", a)[:, None, :] * units * units)
        way = -slope / np.where(curve > 0, curve, np.inf)
        change = units * way[sharing.scales]
        gain = -sharing.over_units((rest * change).sum(axis=2))
        cost = sharing.over_units(((change @ a) * change).sum(axis=2))
        length = gain / np.where(cost > 0, cost, np.inf)
        return self.state(state.codes, state.scale + length[sharing.of_scale] * way)


@final
class _Learner:
    """The descent: weights u in codes and scales' logarithms t, float32; the best of each unit so far.

    Rows are divided by their scale and each gradient by its own curvature: Adam's steps do not depend on it, and
    the numbers stay near 1.
    """

    def __init__(self, problem: _Problem, codes: Array) -> None:
        grid, moments, self._sharing = problem.grid, problem.moments, problem.sharing
        self._qmin, self._qmax = grid.qmin, grid.qmax
        square = np.einsum("gkk->gk", moments.a)
        moves = alive(square)
        size = np.maximum(square.max(axis=1), np.finfo(np.float32).tiny)[:, None, None]
        first = grid.scale[:, :, :1]
        self._a = (moments.a / size).astype(np.float32)
        self._target = (grid.weight / first).astype(np.float32)
        # The slope at v = w: 0 unless the two streams differ. From there on only v - w is multiplied.
        rest = grid.weight @ (moments.a - moments.b)
        self._rest = (rest / size / first).astype(np.float32)
        self._ratio = np.ascontiguousarray(grid.scale[:, :, : self._sharing.scales.shape[2]] / first, np.float32)
        self._zero = np.ascontiguousarray(grid.zero, np.float32)
        curve = np.where(moves, size[:, :, 0] / np.where(moves, square, 1.0), 0.0)[:, None, :]
        self._curve = (curve / (grid.scale / first) ** 2).astype(np.float32)
        # What rows were divided by, against the largest of their unit: by that their errors can be summed.
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
        """One step of Adam for weights and scales; remembers where it was if that is the best so far."""
        codes = np.clip(np.rint(self._u), self._qmin, self._qmax)
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
        np.clip(self._u, self._qmin - 0.5, self._qmax + 0.5, out=self._u)
        self._adams[1].step(self._t, slope, scale_rate)

    def best(self) -> tuple[Array, Array]:
        """Codes (G, O, K) and scales (S,), float64, of the least error of each unit."""
        return self._codes.astype(np.float64), self._given * np.exp(self._logs.astype(np.float64))

    def _remember(self, codes: Array, away: Array, slope: Array) -> None:
        """Keeps the units whose error, up to a constant, ``d A d' + 2 d rest``, is the least so far."""
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
