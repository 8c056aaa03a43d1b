"""Triangular factors of second moments, and column orders for sequential rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from sbonnx.errors import NumericError
from sbonnx.moments import WIDE, Moments
from sbonnx.rounding.search.descent import alive
from sbonnx.spec import Array

Order = Literal["pivot", "activation", "none"]

BLOCK: Final = 64
"""Columns of a factor that are computed one by one before a matrix product updates all others."""

SAFE_DAMPING: Final = 1e-3
"""Damping next to which the float32 rounding error of K products is negligible: larger matrices than `WIDE` are
factored in float32 if they have as much."""

PANEL: Final = 128
"""Columns of a float32 factor between two updates of the rest, which are bound by memory."""

STRIP: Final = 1 << 18
"""Numbers of a float32 matrix that are changed at a time, so that no second matrix is allocated."""

DAMPING_GROWTH: Final = 10.0
DAMPING_TRIES: Final = 6
"""Growth factor of the damping, and number of attempts, while a moment matrix is not positive definite."""


def damped(a: Array, damping: float) -> Array:
    """Return a copy of `a` (G, K, K), float64 or float32, with `damping` times the mean of its diagonal added to it.

    Inputs that are constant 0 get the mean as their diagonal entry, so that they keep their nearest codes and the
    matrix is not singular.
    """
    out = np.array(a, np.float32 if a.shape[1] > WIDE and damping >= SAFE_DAMPING else np.float64)
    diagonal = np.einsum("gkk->gk", out)
    mean = diagonal.mean(axis=1, keepdims=True)
    mean = np.where(mean > 0, mean, 1.0)
    diagonal[...] = np.where(alive(diagonal), diagonal, mean) + damping * mean
    return out


def ordered_factor(a: Array, damping: float, order: Order) -> tuple[Array, Array]:
    """Compute an order of the columns and the upper triangular M with ``M M' = damped a`` in that order.

    The error of rounding columns one after another is about ``sum_k (scale_k M_kk)^2 / 12``, and the product of all
    M_kk is the same in every order, so the error is least if they are equal. The first column has the smallest M_kk
    relative to its moments, because all other columns compensate it.

        "pivot"       the last column has the least moment, the one before it the least moment given the last,
                      and so on: Cholesky's method with the least pivot first (as V-BLAST orders its detection,
                      Wolniansky et al. 1998)
        "activation"  the largest moment first (as GPTQ)
        "none"        the given order

    Args:
        a: second moments, float64 (G, K, K).
        damping: share of the mean added to the diagonal; multiplied by ten each time the factorization fails.
        order: of the columns.

    Returns:
        order, intp (G, K): index of the k-th column to round; M, (G, K, K), float64, or float32 if large.

    Raises:
        NumericError: even 10^5 times the damping does not make the matrix positive definite.
    """
    for _ in range(DAMPING_TRIES):
        try:
            return _factor(damped(a, damping), order)
        except np.linalg.LinAlgError:
            damping = max(damping, 1e-6) * DAMPING_GROWTH
    raise NumericError("the second moments of the layer's inputs are not positive definite at any damping")


def _factor(a: Array, order: Order) -> tuple[Array, Array]:
    if order == "pivot":
        if a.dtype == np.float32:
            return np.stack([upper_factor(matrix) for matrix in a]), a.transpose(0, 2, 1)
        chosen, lower = pivoted_cholesky(a)
        return chosen[:, ::-1], lower[:, ::-1, ::-1]
    diagonal = np.einsum("gkk->gk", a)
    by = np.zeros_like(diagonal) if order == "none" else diagonal
    columns = np.argsort(-by, axis=1, kind="stable")
    last_first = columns[:, ::-1]
    turned = a[np.arange(len(a))[:, None, None], last_first[:, :, None], last_first[:, None, :]]
    return columns, np.linalg.cholesky(turned)[:, ::-1, ::-1]


def pivoted_cholesky(a: Array) -> tuple[Array, Array]:
    """Compute a Cholesky factorization that always pivots on the smallest pivot: ``L L' = a`` in that order.

    Args:
        a: symmetric, positive definite, (G, K, K), float64; overwritten by L.

    Returns:
        chosen, intp (G, K); L, lower triangular, (G, K, K): `a`.

    Raises:
        numpy.linalg.LinAlgError: a pivot is not positive.

    Source: LAPACK Working Note 161 (Lucas 2004), the blocked algorithm, with the least pivot in place of the largest.
    """
    groups, count = a.shape[:2]
    chosen = np.tile(np.arange(count), (groups, 1))
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        _panel(a, chosen, start, end)
        a[:, end:, end:] -= a[:, end:, start:end] @ a[:, end:, start:end].transpose(0, 2, 1)
    for k in range(count):
        a[:, k, k + 1 :] = 0
    return chosen, a


def _panel(a: Array, chosen: Array, start: int, end: int) -> None:
    """Compute the columns `start` to `end` of L in `a`, swapping rows and columns on the way.

    Before `start`, `a` contains L below its diagonal, and from `start` on the Schur complement of these columns.
    """
    every = np.arange(len(a))
    pivots = np.einsum("gkk->gk", a).copy()
    for c in range(start, end):
        pick = c + pivots[:, c:].argmin(axis=1)
        pivot = pivots[every, pick]
        if not (pivot > 0).all():
            raise np.linalg.LinAlgError("a pivot is not positive")
        for rows in (a, a.transpose(0, 2, 1)[:, :, c:], chosen, pivots):
            rows[every, pick], rows[every, c] = rows[every, c], rows[every, pick]
        done_columns = a[:, c:, start:c]
        column = a[:, c:, c] - (done_columns @ done_columns[:, 0, :, None])[:, :, 0]
        column[:, 0] = pivot
        column /= np.sqrt(pivot)[:, None]
        a[:, c:, c] = column
        pivots[:, c:] -= column * column


def upper_factor(a: Array) -> Array:
    """Overwrite a large symmetric `a` (K, K), float32, with M', and return the order of `ordered_factor` by pivots.

    As `pivoted_cholesky`, without swaps: after each panel the rows and columns that are left move together, above the
    diagonal only, and the columns of the panel are written as rows, in the original order, below them.
    """
    count = len(a)
    left, order = np.arange(count), np.empty(count, np.intp)
    while left.size:
        panel, picks = _picked_columns(a[: left.size, : left.size])
        size = left.size - len(picks)
        order[size : left.size] = left[picks[::-1]]
        stay = np.delete(np.arange(left.size), picks)
        rest, own = np.ascontiguousarray(panel[:, stay]), left
        left = left[stay]
        step = max(STRIP // max(size, 1), 1)
        for first in range(0, size, step):
            last = min(first + step, size)
            rows = np.take(a[stay[first:last]], stay[first:], axis=1)
            np.subtract(rows, rest[:, first:last].T @ rest[:, first:], out=a[first:last, first:size])
        a[size : own.size] = 0
        a[size : own.size, own] = panel[::-1]
    for first in range(0, count, max(STRIP // count, 1)):
        some = slice(first, first + max(STRIP // count, 1))
        a[some] = np.take(a[some], order, axis=1)
    return order


def _picked_columns(a: Array) -> tuple[Array, Array]:
    """Return `PANEL` columns of L as rows, (P, K), of those of least pivot, and their indices, (P,).

    The matrix `a` (K, K) is valid above its diagonal.
    """
    count = len(a)
    panel, picks = np.zeros((min(PANEL, count), count), a.dtype), np.empty(min(PANEL, count), np.intp)
    pivots = np.diagonal(a).copy()
    for place in range(len(picks)):
        pick = picks[place] = pivots.argmin()
        if not 0 < pivots[pick] < np.inf:
            raise np.linalg.LinAlgError("a pivot is not positive")
        column = panel[place]
        column[:pick], column[pick:] = a[:pick, pick], a[pick, pick:]
        column -= panel[:place, pick] @ panel[:place]
        column[picks[:place]], column[pick] = 0, pivots[pick]
        column /= np.sqrt(pivots[pick])
        pivots -= column * column
        pivots[picks[: place + 1]] = np.inf
    return panel, picks


@dataclass(frozen=True)
class Factor:
    """Factor M of the damped moments of a layer, see `ordered_factor`, as the search needs it.

    Attributes:
        order: index of the k-th column to round, intp (G, K).
        pivots: M_kk, (G, K).
        unit: M_jk / M_kk, float32 (G, K, K).
        whole: M, (G, K, K) in float64; None if M is float32, which `unit` replaces.
    """

    order: Array
    pivots: Array
    unit: Array
    whole: Array | None

    @staticmethod
    def of(a: Array, damping: float, order: Order) -> Factor:
        """Factor second moments, see `ordered_factor`."""
        return Factor.from_matrix(*ordered_factor(a, damping, order))

    @staticmethod
    def from_matrix(order: Array, factor: Array) -> Factor:
        """Create it from M (G, K, K); a float32 M is overwritten."""
        pivots = np.einsum("gkk->gk", factor).copy()
        if factor.dtype == np.float32 and factor.transpose(0, 2, 1).flags.c_contiguous:
            return Factor(order, pivots, np.divide(factor, pivots[:, None, :], out=factor), None)
        return Factor(order, pivots, (factor / pivots[:, None, :]).astype(np.float32), factor)

    def shift(self, right: Array) -> Array:
        """Return ``Z_k / M_kk`` of the solution of ``Z M' = right``, (G, O, K), with the columns in `order`."""
        if self.whole is not None:
            return np.asarray(back_substitute(right, self.whole) / self.pivots[:, None, :])
        solved = back_substitute(right, self.unit)
        solved /= np.square(self.pivots)[:, None, :]
        return solved


def factor_of(moments: Moments, damping: float, order: Order) -> Factor:
    """Return the factor of the moments of a layer; that of a layer with more than `WIDE` inputs is kept with them."""
    key = ("factor", damping, order)
    if key in moments.memo:
        factor: Factor = moments.memo[key]
        return factor
    factor = Factor.of(moments.a, damping, order)
    if moments.layout.inputs > WIDE:
        moments.memo[key] = factor
    return factor


def back_substitute(right: Array, factor: Array) -> Array:
    """Solve ``Z M' = right`` for Z, (G, O, K), with the upper triangular M (G, K, K), block by block."""
    solved = np.empty_like(right)
    count = right.shape[2]
    for start in range((count - 1) // BLOCK * BLOCK, -1, -BLOCK):
        part, after = slice(start, min(start + BLOCK, count)), slice(min(start + BLOCK, count), count)
        left = right[:, :, part] - solved[:, :, after] @ factor[:, part, after].transpose(0, 2, 1)
        solved[:, :, part] = np.linalg.solve(factor[:, part, part], left.transpose(0, 2, 1)).transpose(0, 2, 1)
    return solved
