"""Regularization of second moments of few samples, with factors estimated on a hold-out set."""

from __future__ import annotations

import numpy as np

from sbonnx.moments.second import Moments
from sbonnx.spec import Array

DAMPING = 0.01
"""Damping: share of the mean second moment that is added to the diagonal before a fit."""


def share_of(weight: Array, fit: Moments, held: Moments) -> float:
    """Estimate the share in [0, 1] of a fit to the float stream that minimizes the output error on a hold-out set.

    The weight that is fitted to the float stream is w + d with d = w (B - A) A^-1 on the moments ``fit``. If only a
    share s of d is added, the error on ``held`` is a parabola in s with its minimum at

        s = tr(w (B - A) d') / tr(d A d')

    which is 1 on ``fit`` itself, and small if the fit overfits: a layer with many inputs that saw few independent rows.
    (A shrinkage estimator, its factor by hold-out.)

    Args:
        weight: matrices (G, O, K), float.
        fit, held: two-stream moments of different samples.
    """
    if fit.is_one_stream or not fit.rows or not held.rows:
        return 0.0
    w = weight.astype(np.float64)
    diagonal = np.einsum("gkk->gk", fit.a).mean(axis=1)
    damped = fit.a + (DAMPING * diagonal + (diagonal == 0))[:, None, None] * np.eye(fit.a.shape[-1])
    # A is symmetric: d = w (B - A) A^-1 is the solution of A d' = (B - A)' w'
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            d = np.linalg.solve(damped, (fit.b - fit.a).transpose(0, 2, 1) @ w.transpose(0, 2, 1)).transpose(0, 2, 1)
        except np.linalg.LinAlgError:
            return 0.0  # the diagonal varies so much that damping has no effect: the system is singular
        gained = float(np.einsum("gok,gok->", w @ (held.b - held.a), d))
        moved = float(np.einsum("gok,gok->", d @ held.a, d))
    return float(np.clip(gained / moved, 0.0, 1.0)) if np.isfinite(gained) and 0 < moved < np.inf else 0.0


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
