"""How much of the error of its inputs a weight can make up for, judged on samples that it was not fitted to."""

from __future__ import annotations

import numpy as np

from sbonnx.moments.second import Moments
from sbonnx.spec import Array

DAMPING = 0.01
"""Share of the mean second moment that is added to all of them before a fit."""


def share_of(weight: Array, fit: Moments, held: Moments) -> float:
    """The share in [0, 1] of a fit to the float stream that leaves the least output error on other samples.

    The weight that is fitted to the float stream is w + d, d = w (B - A) A^-1 on the moments ``fit``. Taken by a share
    s, its error on ``held`` is a parabola in s, least at

        s = tr(w (B - A) d') / tr(d A d')

    which is 1 on ``fit`` itself, and small where the fit took chance for error: a layer of many inputs that saw few
    independent rows. (A shrunken estimator, its factor by hold-out.)

    Args:
        weight: matrices (G, O, K), float.
        fit, held: of two streams, on different samples.
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
            return 0.0  # so far apart in size that the damping is lost on them: nothing can be fitted
        gained = float(np.einsum("gok,gok->", w @ (held.b - held.a), d))
        moved = float(np.einsum("gok,gok->", d @ held.a, d))
    return float(np.clip(gained / moved, 0.0, 1.0)) if np.isfinite(gained) and 0 < moved < np.inf else 0.0
