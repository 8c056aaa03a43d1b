"""Refit of the weights that remain: ridge regression towards the old weights, with its strength by hold-out.

With W the float weight of a layer, x its input in the float network and x' that in the pruned one, of which the
columns S remain, the weight V and the bias minimize

    sum |W x - V x'_S|^2 + lambda |V - W_S|^2
    V = (W B_S + lambda W_S) (A_SS + lambda I)^-1,   bias change = W mean(x) - V mean(x'_S)

with A = mean of x' x'^T and B = mean of x x'^T, both centred if the layer has a bias. lambda is relative to the mean of
the diagonal of A_SS. (Hoerl & Kennard 1970, towards W instead of 0.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from sbonnx.moments import Moments
from sbonnx.pruning.fit_layers import MomentPair
from sbonnx.pruning.skips import SkipProducts
from sbonnx.spec import Array

STRENGTHS: Final = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Strengths that are compared on hold-out samples."""

DEFAULT_STRENGTH: Final = 1e-2
"""Strength without a hold-out set."""

TOLERANCE: Final = 0.05
"""Share above the lowest hold-out error, up to which the least strength is used, in layers with several rows a sample.

The error over rows counts what varies from row to row, which later layers average out, as much as what the rows of a
sample have in common, which later layers pass on. A weak ridge has less of the latter and more of the former, so that
the lowest error over rows asks for too strong a ridge: with this tolerance, SqueezeNet at 0.75 of its multiplications
has a KL divergence of 0.32 from the float network instead of 0.40. With one row a sample (classifiers after pooling),
the error over rows is that of samples, and the strength with the lowest is used.
"""


@dataclass(frozen=True)
class RefitWeight:
    """A refitted weight.

    Attributes:
        weight: float64 (G, O, K), zero where removed.
        shift: change of the bias, float64 (G * O,); zero if the layer has none.
        strength: lambda, relative.
        before, after: squared error of the outputs on hold-out samples (fit samples if there are none), relative to
            the variance of the outputs, with the removed part set to zero and with a refit on the fit samples.
    """

    weight: Array
    shift: Array
    strength: float
    before: float
    after: float


class WeightSolver(Protocol):
    """Solver of a refit: which part of a weight remains, and the values of that part."""

    def masked(self, weight: Array) -> Array:
        """Return the weight (G, O, K) with the removed part set to zero."""

    def solve(self, weight: Array, a: Array, target: Array, strength: float) -> Array | None:
        """Return V (G, O, K) of least ``tr(V A V') - 2 tr(T V') + lambda |V - W|^2``; None if there is none.

        Args:
            weight: W, float64 (G, O, K).
            a: A, (G, K, K).
            target: T, (G, O, K).
            strength: lambda, relative to the mean of the diagonal of A.
        """


@dataclass(frozen=True)
class KeptColumns:
    """Solver for a weight of which some columns remain.

    Attributes:
        columns: bool (G, K), as many columns in each matrix.
    """

    columns: Array

    def masked(self, weight: Array) -> Array:
        """Return the weight (G, O, K) with removed columns set to zero."""
        return np.asarray(weight * self.columns[:, None, :])

    def solve(self, weight: Array, a: Array, target: Array, strength: float) -> Array | None:
        """Return V, zero in removed columns; None if the system is singular."""
        columns = np.nonzero(self.columns)[1].reshape(len(self.columns), -1)
        places = np.arange(len(columns))[:, None]
        kept = a[places[..., None], columns[:, :, None], columns[:, None, :]]
        size = columns.shape[1]
        damping = strength * np.einsum("gkk->gk", kept).mean(axis=1)
        damping = damping + (damping == 0)
        picks = np.broadcast_to(columns[:, None, :], (*weight.shape[:2], size))
        right = np.take_along_axis(target + damping[:, None, None] * weight, picks, axis=2)
        try:
            solved = np.linalg.solve(kept + damping[:, None, None] * np.eye(size), right.transpose(0, 2, 1))
        except np.linalg.LinAlgError:
            return None
        refitted = np.zeros_like(weight)
        np.put_along_axis(refitted, picks, solved.transpose(0, 2, 1), axis=2)
        return refitted if np.isfinite(refitted).all() else None


def refit(
    weight: Array,
    pair: MomentPair,
    solver: WeightSolver,
    *,
    centred: bool,
    strength: float | None = None,
    skip: tuple[SkipProducts, SkipProducts] | None = None,
    use_held: bool = True,
) -> RefitWeight:
    """Refit the part of a weight that remains.

    Args:
        weight: W, float64 (G, O, K).
        pair: moments of its inputs, one or two streams.
        solver: what remains, and its values.
        centred: the layer has a bias that compensates the mean.
        strength: lambda, relative; None: the best on the hold-out set.
        skip: mean products with the error d of the tensor that the output is added to, on fit and hold-out samples;
            the target is then W x + d. None: no such tensor.
        use_held: fit the weight to all samples once the strength is chosen. False: the hold-out samples only choose the
            strength, so that the network can be judged on them.

    Returns:
        The weight, with the least strength whose hold-out error is near the lowest (`TOLERANCE`); W itself with the
        removed part set to zero if no refit is.
    """
    fit = mean_products(pair.fit, pair.fit, centred=centred)
    judge = mean_products(pair.held, pair.fit, centred=centred) if pair.held.rows else fit
    terms = None if skip is None else (_skip_terms(skip, pair, held=False, centred=centred))
    judged = None if skip is None else (_skip_terms(skip, pair, held=pair.held.rows > 0, centred=centred))
    energy = max(float(np.einsum("gok,gok->", weight @ judge.c, weight)), 1e-300)

    def error(other: Array) -> float:
        total = judge.error(weight, other)
        if judged is not None:
            total += judged.squares + 2 * float((weight * judged.plain).sum() - (other * judged.pruned).sum())
        return max(total, 0.0) / energy

    masked = solver.masked(weight)
    before = error(masked)
    tried = STRENGTHS if strength is None and pair.held.rows else (strength or DEFAULT_STRENGTH,)
    target = weight @ fit.b + (0.0 if terms is None else terms.pruned)
    solved = {
        tried_strength: solution
        for tried_strength in tried
        if (solution := solver.solve(weight, fit.a, target, tried_strength)) is not None
    }
    errors = {tried_strength: error(solution) for tried_strength, solution in solved.items()}
    most = min([before, *errors.values()]) * (1 + (TOLERANCE if pair.rows_a_sample > 1 else 0.0))
    chosen = min((tried_strength for tried_strength, now in errors.items() if now <= most), default=np.inf)
    best, after = solved.get(chosen, masked), errors.get(chosen, before)
    every = pair.fit
    if pair.held.rows and use_held:
        every = pair.fit.merged(pair.held)
        skip = None if skip is None else (skip[0].merged(skip[1]),) * 2
        if np.isfinite(chosen):  # with the strength known, all samples are used
            whole = MomentPair(every, every, pair.rows_a_sample)
            fit = mean_products(every, every, centred=centred)
            added = 0.0 if skip is None else _skip_terms(skip, whole, held=False, centred=centred).pruned
            again = solver.solve(weight, fit.a, weight @ fit.b + added, chosen)
            best = best if again is None else again
    shift = np.zeros(weight.shape[0] * weight.shape[1])
    if centred:
        moved = weight @ every.mean[..., None] - best @ every.mean_quantized[..., None]
        shift = moved.reshape(-1) + (0.0 if skip is None else skip[0].mean)
    return RefitWeight(best, shift, chosen, before, after)


@dataclass(frozen=True)
class _SkipTerms:
    """Centred products with d: of d x^T and d x'^T, (1, O, K), and the mean of the squares."""

    plain: Array
    pruned: Array
    squares: float


def _skip_terms(skip: tuple[SkipProducts, SkipProducts], pair: MomentPair, *, held: bool, centred: bool) -> _SkipTerms:
    """Return the products of one set of samples, less the means of the fit samples if `centred`."""
    own = skip[held]
    if not centred:
        return _SkipTerms(own.with_float[None], own.with_pruned[None], float(own.squares.sum()))
    moments, d = pair.held if held else pair.fit, skip[0].mean

    def less(total: Array, mean: Array, about: Array) -> Array:
        return np.asarray(total - np.outer(d, mean[0]) - np.outer(own.mean - d, about[0]))[None]

    return _SkipTerms(
        less(own.with_float, moments.mean, pair.fit.mean),
        less(own.with_pruned, moments.mean_quantized, pair.fit.mean_quantized),
        float(own.squares.sum()) - 2 * float(d @ own.mean) + float(d @ d),
    )


@dataclass(frozen=True)
class MeanProducts:
    """Means of the products of inputs of a layer, float64 (G, K, K): a of x' x'^T, b of x x'^T, c of x x^T."""

    a: Array
    b: Array
    c: Array

    def error(self, weight: Array, other: Array) -> float:
        """Compute the mean of ``|W x - V x'|^2``, summed over outputs."""
        if self.b is self.a:
            d = weight - other
            return float(np.einsum("gok,gok->", d @ self.a, d))
        total = np.einsum("gok,gok->", weight @ self.c - 2 * (other @ self.b.transpose(0, 2, 1)), weight)
        return float(total + np.einsum("gok,gok->", other @ self.a, other))


def mean_products(moments: Moments, about: Moments, *, centred: bool) -> MeanProducts:
    """Return the mean products of `moments`, with the means of `about` subtracted from the inputs if `centred`."""
    rows = moments.rows or 1.0
    if not centred:
        a = moments.a / rows
        return MeanProducts(a, *((a, a) if moments.is_one_stream else (moments.b / rows, moments.c / rows)))
    x, y = moments.mean, moments.mean_quantized
    u, v = about.mean, about.mean_quantized

    def less(total: Array, one: Array, other: Array, left: Array, right: Array) -> Array:
        outer = one[:, :, None] * right[:, None, :] + left[:, :, None] * (other - right)[:, None, :]
        return np.asarray(total / rows - outer)

    a = less(moments.a, y, y, v, v)
    if moments.is_one_stream:
        return MeanProducts(a, a, a)
    return MeanProducts(a, less(moments.b, x, y, u, v), less(moments.c, x, x, u, u))
