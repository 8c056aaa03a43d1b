"""Cost formulas of kernels, fitted to the times of several sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final

import numpy as np

from sbonnx.backends.kernel_costs import KINDS

MEASURES: Final = ("macs", "reads", "writes", "weights", "pieces")
"""Amounts of a case, in the order of `KINDS` after the fixed cost."""

Row = dict[str, Any]


def fits(measured: Sequence[Row]) -> list[Row]:
    """Fit one cost formula for each kernel, variant and type."""
    together: Mapping[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in measured:
        if row.get("ns"):
            together[tuple(row[key] for key in ("kernel", "variant", "type", "domain"))].append(row)
    table = []
    for (kernel, variant, dtype, domain), sizes in together.items():
        row = {"kernel": kernel, "variant": variant, "type": dtype, "domain": domain, "sizes": len(sizes)}
        table.append({**row, **{name: float(f"{value:.4g}") for name, value in fit(sizes).items()}})
    return table


def nonnegative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solve non-negative least squares: the best solution without negative coefficients over all subsets of columns.

    columns: float64 (N, K), K small; target: float64 (N,). Returns float64 (K,). For K <= 6 trying the 2**K - 1
    subsets is exact and simple (Lawson & Hanson 1974, chapter 23, search the same subsets step by step).
    """
    count = columns.shape[1]
    best, least = np.zeros(count), float(target @ target)
    for size in range(1, min(count, len(target)) + 1):
        for chosen in combinations(range(count), size):
            part = columns[:, chosen]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(((part @ solution - target) ** 2).sum())
            if (solution >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(count), error
                best[list(chosen)] = solution
    return best


def fit(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Fit the cost of a kernel in ns as a linear function of the row's measures; the coefficients are `KINDS`.

    The fit minimizes relative errors, so that large sizes do not dominate small ones. "worst" is the largest
    |predicted / measured - 1|. Elements read are left out if they are proportional to elements written, and weights for
    kernels without MACs.
    """
    table = np.array([[1, *(row[key] for key in MEASURES)] for row in rows], np.float64)
    taken = np.array([row["ns"] for row in rows], np.float64)
    if not table[:, 1].any():
        table[:, 4] = 0
    ratios = table[:, 2] / np.maximum(table[:, 3], 1)
    if np.ptp(ratios) <= 0.01 * ratios.max():
        table[:, 2] = 0
    used = [index for index in range(len(KINDS)) if table[:, index].any()]
    weighted = table[:, used] / taken[:, None]
    sizes = np.abs(weighted).max(axis=0)
    costs = nonnegative(weighted / sizes, np.ones(len(taken))) / sizes
    whole = np.zeros(len(KINDS))
    whole[used] = costs
    worst = float(np.abs(table @ whole / taken - 1).max())
    return {**{name: float(value) for name, value in zip(KINDS, whole, strict=True)}, "worst": worst}
