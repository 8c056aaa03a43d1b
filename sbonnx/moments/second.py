"""Second moments (Hessian) of the input activations of a linear op, which determine its squared output error.

With few samples they are regularized, by factors that are estimated on a hold-out set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from sbonnx.linear.layer import LinearLayer
from sbonnx.moments.means import Means
from sbonnx.spec import Array

STRIP: Final = 1 << 22
"""Numbers of a matrix that are changed at a time, so that no second matrix is allocated."""

STORED: Final = 1 << 23
"""Largest weight whose products with the moments are stored."""


@dataclass(frozen=True)
class Moments:
    """Second moments (Hessian) of the input activations of a linear op.

    They are sums over its input rows in the float network (x) and in the quantized network (x'). With W the float
    matrix and V the quantized one of a group, (O, K), the squared error of the outputs is

        sum over rows |W x - V x'|^2 = tr(W C W') - 2 tr(W B V') + tr(V A V')

    With errors e = x - x' in place of x, and D = W - V, no term is the difference of two large ones, so that float32 is
    enough for layers with many inputs:

        sum over rows |W x - V x'|^2 = tr(D A D') + 2 tr(W F D') + tr(W E W')

    Attributes:
        layout: of the op's weight; G, O, K below are its groups, outputs and inputs.
        rows: number of rows, n; the sum of their weights if they are weighted, as are all sums below.
        a: A, the sum of x' x'^T, (G, K, K), float64, or float32 (see `MomentSums`).
        cross: (G, K, K) like `a`: B, the sum of x x'^T, or F, the sum of e x'^T. None: only one network was run,
            and x' = x.
        square: (G, K, K) like `a`: C, the sum of x x^T, or E, the sum of e e^T. None with `cross`.
        mean: sum of x / n, float64 (G, K).
        mean_quantized: sum of x' / n, float64 (G, K); the same object as `mean` if x' = x.
        of_errors: `cross` and `square` are F and E, not B and C.
        share: factor of the errors in F and E, see `towards`; 1 with B and C.
        observed: number of rows, not weighted; None: unknown.
        memo: what was derived from `a`, such as a factor, by a key of whoever derived it, and products of the last
            weight; shared with moments of the same `a`.
    """

    layout: LinearLayer
    rows: float
    a: Array
    cross: Array | None
    square: Array | None
    mean: Array
    mean_quantized: Array
    of_errors: bool = False
    share: float = 1.0
    observed: float | None = None
    memo: dict[object, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of_rows(layout: LinearLayer, x: Array, quantized: Array, *, of_errors: bool = False) -> Moments:
        """Compute the moments of rows (G, n, K) in the type of the rows; the same object for both is one stream."""
        a, mean = quantized.swapaxes(1, 2) @ quantized, quantized.mean(axis=1)
        if x is quantized:
            return Moments(layout, x.shape[1], a, None, None, mean, mean, observed=x.shape[1])
        left = x - quantized if of_errors else x
        turned, means = left.swapaxes(1, 2), (x.mean(axis=1), mean)
        totals = a, turned @ quantized, turned @ left
        return Moments(layout, x.shape[1], *totals, *means, of_errors, observed=x.shape[1])

    def with_layout(self, layout: LinearLayer) -> Moments:
        """Return the same moments, with what was derived from them, for another layer that reads the same inputs."""
        return self._with_memo(replace(self, layout=layout))

    def _with_memo(self, other: Moments) -> Moments:
        """Return `other`, which has the same `a`, with what was derived from it."""
        object.__setattr__(other, "memo", self.memo)
        return other

    @property
    def is_one_stream(self) -> bool:
        """Whether x' = x."""
        return self.cross is None

    @property
    def b(self) -> Array:
        """B, the sum of x x'^T, (G, K, K): rows of the float network by columns of the quantized one."""
        if self.cross is None:
            return self.a
        return np.asarray(self.a + self.share * self.cross) if self.of_errors else self.cross

    @property
    def c(self) -> Array:
        """C, the sum of x x^T, (G, K, K)."""
        if self.cross is None or self.square is None:
            return self.a
        if not self.of_errors:
            return self.square
        both = self.cross + self.cross.transpose(0, 2, 1)
        return np.asarray(self.a + self.share * both + self.share**2 * self.square)

    @property
    def is_finite(self) -> bool:
        """Whether the sums that determine a rounding have neither NaN nor Inf."""
        ends = [end(total) for total in (self.a, self.cross) if total is not None for end in (np.min, np.max)]
        return bool(np.isfinite(ends).all())

    def part(self, groups: slice) -> Moments:
        """Return the moments of some groups, in views of the same matrices."""
        if groups == slice(None):
            return self
        a, cross, square = self.a[groups], self.cross, self.square
        cross, square = (None if matrix is None else matrix[groups] for matrix in (cross, square))
        mean, quantized = self.mean[groups], self.mean_quantized[groups]
        return replace(self, a=a, cross=cross, square=square, mean=mean, mean_quantized=quantized)

    def pull(self, weight: Array) -> Array | None:
        """Return ``W (B - A) = W F``, (G, O, K): half the negative gradient of the error at V = W; None if it is 0."""
        if self.cross is None or self.share == 0.0:
            return None
        if not self.of_errors:
            return np.asarray(weight @ (self.cross - self.a))
        return np.asarray(self.share * self._pulled(weight))

    def _pulled(self, weight: Array) -> Array:
        """Return ``W F`` in the type of `a`, (G, O, K), computed once for the last weight."""
        return self._once("pulled", weight, self.cross, lambda w, cross: w @ cross)

    def _error_of_inputs(self, weight: Array) -> Array:
        """Return ``tr(W E W')`` of each output, float64 (G, O), computed once for the last weight."""

        def energy(w: Array, square: Array) -> Array:
            return _dots(w @ square, w)

        return self._once("error of inputs", weight, self.square, energy)

    def _once(self, name: str, weight: Array, total: Array | None, run: Callable[[Array, Array], Array]) -> Array:
        """Return ``run(weight, total)``, which is stored until another weight or matrix is given.

        A layer is rounded in several steps, each of which compares errors with the same weight. Products of more than
        `STORED` weights are computed again: such layers are rounded in slices.
        """
        assert total is not None, "the moments have one stream"
        if weight.size > STORED:
            return run(weight.astype(self.a.dtype, copy=False), total)
        last = self.memo.get(name)
        if last is None or last[1] is not total or last[0].__array_interface__ != weight.__array_interface__:
            last = weight, total, run(weight.astype(self.a.dtype, copy=False), total)
            self.memo[name] = last
        stored: Array = last[2]
        return stored

    def gradient(self, weight: Array, quantized: Array) -> Array:
        """Return half the gradient of the error by V, ``V A - W B``, (G, O, K), in the type of `a`.

        Args:
            weight, quantized: W and V, float matrices (G, O, K).
        """
        if not self.of_errors and self.a.dtype == np.float64:
            return np.asarray(quantized @ self.a - weight @ self.b)
        gradient = (quantized - weight).astype(self.a.dtype) @ self.a
        pulled = self.pull(weight)
        if pulled is not None:
            gradient -= pulled
        return np.asarray(gradient)

    def centred(self, *, in_place: bool = False) -> Moments:
        """Return central moments: means subtracted from x and x'; `in_place`: in the same matrices.

        Use these if the bias of the op compensates the mean error.
        """
        own, zero = self.mean_quantized, np.zeros_like(self.mean)
        a = _less(self.a, self.rows, own, own, in_place)
        left = (self.mean - own) / (self.share or 1.0) if self.of_errors else self.mean
        cross = None if self.cross is None else _less(self.cross, self.rows, left, own, in_place)
        square = None if self.square is None else _less(self.square, self.rows, left, left, in_place)
        return replace(self, a=a, cross=cross, square=square, mean=zero, mean_quantized=zero)

    def towards(self, share: float) -> Moments:
        """Return moments whose float stream is x' + share (x - x').

        A weight fitted to them compensates this share of the error of its inputs. With ``share=1`` the weight is fitted
        to the outputs of the float network, which overfits on few samples. With ``share=0`` only the rounding error of
        the weight itself counts.
        """
        if self.cross is None or self.square is None or share == 1.0:
            return self
        rest = 1.0 - share
        mean = rest * self.mean_quantized + share * self.mean
        if self.of_errors:
            return self._with_memo(replace(self, mean=mean, share=share * self.share))
        b = rest * self.a + share * self.cross
        both = self.cross + self.cross.transpose(0, 2, 1)
        c = rest**2 * self.a + share * rest * both + share**2 * self.square
        return self._with_memo(replace(self, cross=b, square=c, mean=mean))

    def shrunk(self, by: float, *, in_place: bool = False) -> Moments:
        """Shrink the off-diagonal entries by the factor ``1 - by``; `in_place`: in the same matrices.

        The error computed with the result is ``1 - by`` times the error plus ``by`` times the error of uncorrelated
        inputs.
        """
        if by == 0.0:
            return self
        cross, square = (
            None if matrix is None else _untied(matrix, by, in_place) for matrix in (self.cross, self.square)
        )
        return replace(self, a=_untied(self.a, by, in_place), cross=cross, square=square)

    def merged(self, other: Moments, *, in_place: bool = False) -> Moments:
        """Return the moments over the rows of both, of the same form.

        Args:
            in_place: in the matrices of `self`, which is changed. A matrix that is one object in both has the rows of
                both.
        """
        rows = self.rows + other.rows
        cross, square = (
            mine if mine is None or theirs is None or mine is theirs else _add(mine, theirs, in_place)
            for mine, theirs in ((self.cross, other.cross), (self.square, other.square))
        )
        mean, quantized = (
            (mine * self.rows + theirs * other.rows) / (rows or 1.0)
            for mine, theirs in ((self.mean, other.mean), (self.mean_quantized, other.mean_quantized))
        )
        a = _add(self.a, other.a, in_place)
        counts = (self.observed, other.observed)
        observed = None if None in counts else sum(count for count in counts if count is not None)
        return replace(
            self, rows=rows, a=a, cross=cross, square=square, mean=mean, mean_quantized=quantized, observed=observed
        )

    def error(self, weight: Array, quantized: Array, gradient: Array | None = None) -> Array:
        """Mean over rows of the squared output error, float64 (G, O).

        Args:
            weight, quantized: float matrices (G, O, K), see `LinearLayer.matrices`.
            gradient: `gradient` of both if it is known, which saves a product.
        """
        if self.cross is None or self.square is None or self.of_errors:
            d = np.subtract(weight, quantized, dtype=self.a.dtype)
            if gradient is None:
                total = _dots(d @ self.a, d)
            else:  # V A - W B = -(D A + W F)
                pulled = self.pull(weight)
                total = -_dots(gradient if pulled is None else gradient + pulled, d)
            if self.cross is not None and self.square is not None and self.share:
                total += 2 * self.share * _dots(self._pulled(weight), d)
                total += self.share**2 * self._error_of_inputs(weight)
        else:
            w, v = np.asarray(weight, np.float64), np.asarray(quantized, np.float64)
            total = np.einsum("gok,gok->go", w @ self.square - 2 * (v @ self.cross.transpose(0, 2, 1)), w)
            total += np.einsum("gok,gok->go", v @ self.a, v)
        return np.asarray(np.maximum(total, 0.0) / (self.rows or 1.0))

    @property
    def means(self) -> Means:
        """Means of the same rows."""
        return Means(self.layout, self.rows, self.mean, self.mean_quantized)


def _dots(left: Array, right: Array) -> Array:
    """Return the products of rows of (G, O, K), float64 (G, O)."""
    if left.dtype == np.float64:
        return np.asarray(np.einsum("gok,gok->go", left, right))
    return np.asarray((left * right).sum(axis=2, dtype=np.float64))


def _out(total: Array, in_place: bool) -> Array:
    """Return where a changed matrix is written: `total` or a new array."""
    return total if in_place else np.empty_like(total)


def _add(mine: Array, theirs: Array, in_place: bool) -> Array:
    return np.asarray(np.add(mine, theirs, out=mine if in_place else None))


def strips(total: Array) -> Iterator[slice]:
    """Yield ranges of rows of (G, K, K) with `STRIP` numbers."""
    groups, count = total.shape[:2]
    step = max(STRIP // max(groups * count, 1), 1)
    yield from (slice(first, min(first + step, count)) for first in range(0, count, step))


def _untied(total: Array, by: float, in_place: bool) -> Array:
    """Multiply the off-diagonal entries of (G, K, K) by ``1 - by``."""
    out, diagonal = _out(total, in_place), np.einsum("gkk->gk", total).copy()
    np.multiply(total, 1.0 - by, out=out)
    np.einsum("gkk->gk", out)[...] = diagonal
    return out


def _less(total: Array, rows: float, one: Array, other: Array, in_place: bool) -> Array:
    """Subtract ``rows`` times the outer products of means (G, K) from (G, K, K)."""
    out = _out(total, in_place)
    for some in strips(total):
        products = one[:, some, None] * other[:, None, :]
        products *= -rows
        products += total[:, some]
        out[:, some] = products
    return out


def shrinkage_of(fit: Moments, held: Moments, *, centred: bool = False) -> float:
    """Estimate how far input correlations shrink towards zero on a hold-out set: in [0, 1], for `Moments.shrunk`.

    On few samples, correlations are partly noise, and a rounding that compensates the error of one input by that of
    another fits this noise. With the correlations of ``fit``, c_kl = A_kl / sqrt(A_kk A_ll), and those of ``held``,
    h_kl, the least-squares estimate of h by a multiple of c is

        h ~ s c,   s = sum_{k != l} c_kl h_kl / sum_{k != l} c_kl^2

    so the share 1 - s is noise, for any shapes and any similarity of rows of one sample. (Shrinkage of a
    covariance matrix towards its diagonal, Ledoit & Wolf 2004, with its factor by hold-out.)

    Args:
        fit, held: moments of the same layer on different samples.
        centred: take their means off them.
    """
    if not fit.rows or not held.rows:
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        some, others = (
            (moments if moments.of_errors or not centred else replace(moments, cross=None, square=None).centred())
            for moments in (fit, held)
        )
        means = [
            moments.mean_quantized if centred else np.zeros_like(moments.mean_quantized) for moments in (some, others)
        ]
        own, other = (
            np.einsum("gkk->gk", moments.a) - moments.rows * mean**2
            for moments, mean in zip((some, others), means, strict=True)
        )
        alive = (own > 0) & (other > 0)
        sizes = [np.where(alive, 1.0 / np.where(alive, size, 1.0), 0.0) for size in (np.sqrt(own * other), own)]
        totals = np.zeros(2)
        for part in strips(some.a) if some.a.dtype == np.float32 else (slice(None),):
            left, right = (
                moments.a[:, part] - moments.rows * mean[:, part, None] * mean[:, None, :]
                if mean.any()
                else moments.a[:, part]
                for moments, mean in zip((some, others), means, strict=True)
            )
            totals += [
                float(np.einsum("gkl,gkl,gk,gl->", left, factor, size[:, part], size))
                for factor, size in zip((right, left), sizes, strict=True)
            ]
        shared, mine = totals - np.count_nonzero(alive)
    return float(np.clip(1.0 - shared / mine, 0.0, 1.0)) if np.isfinite(shared) and 0 < mine < np.inf else 0.0
