"""Triangular factors of second moments, and column orders for sequential rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from sbonnx.errors import NumericError
from sbonnx.rounding.search.descent import alive
from sbonnx.spec import Array

Order = Literal["pivot", "activation", "none"]

BLOCK: Final = 64
"""Columns of a factor that are computed one by one before a matrix product updates all others."""

LARGE: Final = 1024
"""Larger matrices are factored in float32 (half the time and memory) if the damping is at least `SAFE_DAMPING`."""
SAFE_DAMPING: Final = 1e-3
"""Damping next to which the float32 rounding error of K products is negligible."""

DAMPING_GROWTH: Final = 10.0
DAMPING_TRIES: Final = 6
"""Growth factor of the damping, and number of attempts, while a moment matrix is not positive definite."""


def damped(a: Array, damping: float) -> Array:
    """Return a copy of `a` (G, K, K), float64 or float32, with `damping` times the mean of its diagonal added to it.

    Inputs that are constant 0 get the mean as their diagonal entry, so that they keep their nearest codes and the
    matrix is not singular.
    """
    out = np.array(a, np.float32 if a.shape[1] > LARGE and damping >= SAFE_DAMPING else np.float64)
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
        a: symmetric, positive definite, (G, K, K), float64 or float32; overwritten.

    Returns:
        chosen, intp (G, K); L, lower triangular, (G, K, K), of the type of `a`.

    Raises:
        numpy.linalg.LinAlgError: a pivot is not positive.

    Source: LAPACK Working Note 161 (Lucas 2004), the blocked algorithm, with the least pivot in place of the largest.
    """
    groups, count = a.shape[:2]
    chosen = np.tile(np.arange(count), (groups, 1))
    lower = np.zeros_like(a)
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        _panel(a, lower, chosen, start, end)
        panel = lower[:, end:, start:end]
        a[:, end:, end:] -= panel @ panel.transpose(0, 2, 1)
    return chosen, lower


def _panel(a: Array, lower: Array, chosen: Array, start: int, end: int) -> None:
    """Compute the columns `start` to `end` of `lower`, swapping rows and columns of all three arrays on the way.

    From `start` on, `a` contains the Schur complement of the columns before `start`.
    """
    every = np.arange(len(a))
    pivots = np.einsum("gkk->gk", a).copy()
    for c in range(start, end):
        pick = c + pivots[:, c:].argmin(axis=1)
        pivot = pivots[every, pick]
        if not (pivot > 0).all():
            raise np.linalg.LinAlgError("a pivot is not positive")
        moved = [a[:, :, start:], a.transpose(0, 2, 1)[:, :, start:], lower[:, :, :c], chosen, pivots]
        if len(a) == 1:
            _swap([rows[0] for rows in moved], int(pick[0]), c)
        else:
            for rows in moved:
                rows[every, pick], rows[every, c] = rows[every, c], rows[every, pick]
        known = lower[:, c:, start:c]
        column = a[:, c:, c] - (known @ known[:, 0, :, None])[:, :, 0]
        column[:, 0] = pivot
        column /= np.sqrt(pivot)[:, None]
        lower[:, c:, c] = column
        pivots[:, c:] -= column * column


def _swap(arrays: Sequence[Array], one: int, other: int) -> None:
    """Swap two rows of each array, without the copies of indexing by arrays."""
    if one != other:
        for rows in arrays:
            kept = rows[one].copy()
            rows[one] = rows[other]
            rows[other] = kept


def back_substitute(right: Array, factor: Array) -> Array:
    """Solve ``Z M' = right`` for Z, (G, O, K), with the upper triangular M (G, K, K), block by block."""
    found = np.empty_like(right)
    count = right.shape[2]
    for start in range((count - 1) // BLOCK * BLOCK, -1, -BLOCK):
        part, after = slice(start, min(start + BLOCK, count)), slice(min(start + BLOCK, count), count)
        left = right[:, :, part] - found[:, :, after] @ factor[:, part, after].transpose(0, 2, 1)
        found[:, :, part] = np.linalg.solve(factor[:, part, part], left.transpose(0, 2, 1)).transpose(0, 2, 1)
    return found
