"""Second moments (Hessian) of the input activations of a linear op, which determine its squared output error.

With few samples they are regularized, by factors that are estimated on a hold-out set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbonnx.linear.layer import LinearLayer
from sbonnx.moments.means import Means
from sbonnx.spec import Array


@dataclass(frozen=True)
class Moments:
    """Second moments (Hessian) of the input activations of a linear op.

    They are sums over its input rows in the float network (x) and in the quantized network (x').

    With W the float matrix and V the quantized one of a group, (O, K):

        sum over rows |W x - V x'|^2 = tr(W C W') - 2 tr(W B V') + tr(V A V')

    Attributes:
        layout: of the op's weight; G, O, K below are its groups, outputs and inputs.
        rows: number of rows, n; the sum of their weights if they are weighted, as are all sums below.
        a: sum of x' x'^T, float64 (G, K, K).
        b: sum of x x'^T, float64 (G, K, K): rows of the float network by columns of the quantized one.
        c: sum of x x^T, float64 (G, K, K).
        mean: sum of x / n, float64 (G, K).
        mean_quantized: sum of x' / n, float64 (G, K).

    If only one network was run, x' = x: `b` and `c` are the same object as `a`, and the two means are one object.
    """

    layout: LinearLayer
    rows: float
    a: Array
    b: Array
    c: Array
    mean: Array
    mean_quantized: Array

    @property
    def is_one_stream(self) -> bool:
        """Whether x' = x."""
        return self.b is self.a

    def centred(self) -> Moments:
        """Return central moments: means subtracted from x and x'.

        Use these if the bias of the op compensates the mean error.
        """
        a = _less(self.a, self.rows, self.mean_quantized, self.mean_quantized)
        zero = np.zeros_like(self.mean)
        if self.is_one_stream:
            return Moments(self.layout, self.rows, a, a, a, zero, zero)
        b = _less(self.b, self.rows, self.mean, self.mean_quantized)
        c = _less(self.c, self.rows, self.mean, self.mean)
        return Moments(self.layout, self.rows, a, b, c, zero, zero)

    def towards(self, share: float) -> Moments:
        """Return moments whose float stream is x' + share (x - x').

        A weight fitted to them compensates this share of the error of its inputs. With ``share=1`` the weight is fitted
        to the outputs of the float network, which overfits on few samples. With ``share=0`` only the rounding error of
        the weight itself counts.
        """
        if self.is_one_stream or share == 1.0:
            return self
        rest = 1.0 - share
        b = rest * self.a + share * self.b
        c = rest**2 * self.a + share * rest * (self.b + self.b.transpose(0, 2, 1)) + share**2 * self.c
        mean = rest * self.mean_quantized + share * self.mean
        return Moments(self.layout, self.rows, self.a, b, c, mean, self.mean_quantized)

    def shrunk(self, by: float) -> Moments:
        """Shrink the off-diagonal entries by the factor ``1 - by``.

        The error computed with the result is ``1 - by`` times the error plus ``by`` times the error of uncorrelated
        inputs.
        """
        if by == 0.0:
            return self
        a = _untied(self.a, by)
        one = self.is_one_stream
        b, c = (a, a) if one else (_untied(self.b, by), _untied(self.c, by))
        return Moments(self.layout, self.rows, a, b, c, self.mean, self.mean_quantized)

    def merged(self, other: Moments, *, in_place: bool = False) -> Moments:
        """Return the moments over the rows of both; `in_place`: in the matrices of `self`, which is changed."""
        rows = self.rows + other.rows
        one = self.is_one_stream and other.is_one_stream
        pairs = ((self.a, other.a),) if one else ((self.a, other.a), (self.b, other.b), (self.c, other.c))
        sums = [np.add(mine, theirs, out=mine if in_place else None) for mine, theirs in pairs]
        means = [
            (mine * self.rows + theirs * other.rows) / (rows or 1.0)
            for mine, theirs in ((self.mean, other.mean), (self.mean_quantized, other.mean_quantized))
        ]
        return Moments(self.layout, rows, *(sums * 3 if one else sums), *means)

    def error(self, weight: Array, quantized: Array) -> Array:
        """Mean over rows of the squared output error, float64 (G, O).

        Args:
            weight, quantized: float matrices (G, O, K), see `LinearLayer.matrices`.
        """
        w, v = weight.astype(np.float64), quantized.astype(np.float64)
        if self.is_one_stream:
            d = w - v
            total = np.einsum("gok,gok->go", d @ self.a, d)
        else:
            total = np.einsum("gok,gok->go", w @ self.c - 2 * (v @ self.b.transpose(0, 2, 1)), w)
            total += np.einsum("gok,gok->go", v @ self.a, v)
        return np.asarray(np.maximum(total, 0.0) / (self.rows or 1.0))

    @property
    def means(self) -> Means:
        """Means of the same rows."""
        return Means(self.layout, self.rows, self.mean, self.mean_quantized)


def _untied(total: Array, by: float) -> Array:
    """Multiply the off-diagonal entries of (G, K, K) by ``1 - by``. Returns a new array."""
    less = total * (1.0 - by)
    places = np.arange(total.shape[-1])
    less[:, places, places] = total[:, places, places]
    return np.asarray(less)


def _less(total: Array, rows: float, one: Array, other: Array) -> Array:
    """Subtract ``rows`` times the outer products of means (G, K) from (G, K, K). Allocates one new array."""
    products = one[:, :, None] * other[:, None, :]
    products *= -rows
    products += total
    return np.asarray(products)


def shrinkage_of(fit: Moments, held: Moments) -> float:
    """Estimate how far input correlations shrink towards zero on a hold-out set: in [0, 1], for `Moments.shrunk`.

    On few samples, correlations are partly noise, and a rounding that compensates the error of one input by that of
    another fits this noise. With the correlations of ``fit``, c_kl = A_kl / sqrt(A_kk A_ll), and those of ``held``,
    h_kl, the least-squares estimate of h by a multiple of c is

        h ~ s c,   s = sum_{k != l} c_kl h_kl / sum_{k != l} c_kl^2

    so the share 1 - s is noise, for any shapes and any similarity of rows of one sample. (Shrinkage of a
    covariance matrix towards its diagonal, Ledoit & Wolf 2004, with its factor by hold-out.)

    Args:
        fit, held: moments of the same layer on different samples.
    """
    if not fit.rows or not held.rows:
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        own, other = (np.einsum("gkk->gk", each.a) for each in (fit, held))
        alive = (own > 0) & (other > 0)
        sizes = [np.where(alive, 1.0 / np.where(alive, size, 1.0), 0.0) for size in (np.sqrt(own * other), own)]
        shared, mine = (
            float(np.einsum("gkl,gkl,gk,gl->", fit.a, each, size, size)) - np.count_nonzero(alive)
            for each, size in zip((held.a, fit.a), sizes, strict=True)
        )
    return float(np.clip(1.0 - shared / mine, 0.0, 1.0)) if np.isfinite(shared) and 0 < mine < np.inf else 0.0
