"""Solution of large symmetric systems by Cholesky's method in the memory of the matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sbonnx.spec import Array

BLOCK: Final = 512
"""Columns that are factored by LAPACK at a time; the rest are matrix products."""


def solve_in_place(a: Array, right: Array) -> Array:
    """Solve ``A X = right`` for X, (G, K, O), without a second matrix of the size of A.

    Args:
        a: symmetric, positive definite, (G, K, K), float64 or float32; overwritten.
        right: (G, K, O) of any float type.

    Raises:
        numpy.linalg.LinAlgError: A is not positive definite.
    """
    solution = np.array(right, a.dtype, order="C")
    for matrix, values in zip(a, solution, strict=True):
        _factor(matrix)
        for some in _blocks(len(matrix)):
            values[some] = np.linalg.solve(
                matrix[some, some], values[some] - matrix[some, : some.start] @ values[: some.start]
            )
        for some in reversed(list(_blocks(len(matrix)))):
            rest = values[some] - matrix[some.stop :, some].T @ values[some.stop :]
            values[some] = np.linalg.solve(matrix[some, some].T, rest)
    return solution


def _factor(a: Array) -> None:
    """Overwrite the lower triangle of `a` (K, K) with L, ``L L' = a``; blocks of the diagonal are 0 above it."""
    for some in _blocks(len(a)):
        a[some, some] = np.linalg.cholesky(a[some, some])
        if some.stop == len(a):
            return
        a[some.stop :, some] = np.linalg.solve(a[some, some], a[some.stop :, some].T).T
        for rows in _blocks(len(a), some.stop):
            across = slice(some.stop, rows.stop)
            a[rows, across] -= a[rows, some] @ a[across, some].T


def _blocks(count: int, first: int = 0) -> Iterator[slice]:
    yield from (slice(start, min(start + BLOCK, count)) for start in range(first, count, BLOCK))
