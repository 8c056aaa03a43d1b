"""Share of its input error that a weight compensates, chosen on samples held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np

from sbonnx.linear.im2col import Geometry
from sbonnx.moments.second import Moments
from sbonnx.moments.sums import picked_rows
from sbonnx.spec import Array

DAMPING: Final = 0.01
"""Damping: share of the mean second moment that is added to the diagonal before a fit."""

MOST_ROWS: Final = 64
"""Rows that are kept of a held-out sample."""

HELD_BYTES: Final = 32 << 20
"""Bytes of the rows that are kept of all held-out samples of a layer, except that each sample has a row."""

SHARES: Final = np.linspace(0.0, 1.0, 21)
"""The shares that are compared."""

FLOOR: Final = 1e-3
"""Error of a sample, relative to the mean of all at share 0, below which it does not count as smaller."""


@final
class HeldRows:
    """Rows of the inputs of held-out samples, in both networks.

    Args:
        geometry: of the op.
        samples: number of samples that will be added, for the memory of each.
        seed: of the picks.
    """

    def __init__(self, geometry: Geometry, *, samples: int, seed: int = 0) -> None:
        self._geometry, self._seed = geometry, seed
        row = 8 * geometry.layer.groups * geometry.layer.inputs
        self._most = int(np.clip(HELD_BYTES // (row * max(samples, 1)), 1, MOST_ROWS))
        self._rows: list[tuple[int, Array, Array]] = []

    def add(self, x: Array, quantized: Array, *, sample: int) -> None:
        """Keep rows of one sample: its input in the float and in the quantized network. `sample`: its number."""
        count = self._geometry.count(x.shape)
        picks = picked_rows(count, self._most, self._seed, sample) if count > self._most else None
        if count:
            floats, others = (np.array(self._geometry.rows(stream, picks)) for stream in (x, quantized))
            self._rows.append((sample, floats, others))

    def pairs(self) -> list[tuple[Array, Array]]:
        """Return the rows (G, n, K) of x and x' of each sample, by number."""
        return [(x, quantized) for _, x, quantized in sorted(self._rows, key=lambda each: each[0])]


def share_of(weight: Array, fit: Moments, held: Sequence[tuple[Array, Array]], *, centred: bool) -> float:
    """Choose the share in [0, 1] of a fit to the float stream that typical held-out samples gain most from.

    The weight that is fitted to the float stream is w + d with d = w (B - A) A^-1 on the moments ``fit``. If only a
    share s of d is added, the error of a sample is |w (x - x') - s d x'|^2, a parabola in s. The share of the smallest
    mean logarithm over the samples is chosen: each sample counts by the decibels that it gains. The mean itself is
    decided by the few samples that the quantized network gets wrong, and the others lose; and a layer with many inputs
    that saw few independent rows fits chance, so its share is small.

    Args:
        weight: matrices (G, O, K), float.
        fit: two-stream moments, of other samples.
        held: rows (G, n, K) of x and x' of each held-out sample.
        centred: a bias compensates the mean error: rows are taken less the means of ``fit``.
    """
    if fit.is_one_stream or not fit.rows or not held:
        return 0.0
    moments = fit.centred() if centred else fit
    w = weight.astype(np.float64).transpose(0, 2, 1)
    diagonal = np.einsum("gkk->gk", moments.a).mean(axis=1)
    damped = moments.a + (DAMPING * diagonal + (diagonal == 0))[:, None, None] * np.eye(moments.a.shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        try:  # A is symmetric: d is the solution of A d' = (B - A)' w'
            d = np.linalg.solve(damped, (moments.b - moments.a).transpose(0, 2, 1) @ w)
        except np.linalg.LinAlgError:
            return 0.0  # the diagonal varies so much that damping has no effect: the system is singular
        w, d = w.astype(np.float32), d.astype(np.float32)
        shift = (fit.mean - fit.mean_quantized, fit.mean_quantized) if centred else (0 * fit.mean, 0 * fit.mean)
        lost, moved = (value[:, None].astype(np.float32) for value in shift)
        sums = []
        for x, quantized in held:
            error, change = (x - quantized - lost) @ w, (quantized - moved) @ d
            pairs = ((error, error), (error, change), (change, change))
            sums.append([float(np.einsum("gno,gno->", one, other, dtype=np.float64)) for one, other in pairs])
        before, gained, added = np.array(sums).T[..., None]
        errors = np.maximum(before - 2 * SHARES * gained + SHARES**2 * added, 0.0)
        if not np.isfinite(errors).all() or not before.any():
            return 0.0
        return float(SHARES[np.log(errors + FLOOR * before.mean()).mean(axis=0).argmin()])
