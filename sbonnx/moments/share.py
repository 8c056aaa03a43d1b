"""Share of its input error that a weight compensates, chosen on samples held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, final

import numpy as np

from sbonnx.linear.im2col import Geometry
from sbonnx.moments.cholesky import solve_in_place
from sbonnx.moments.second import Moments
from sbonnx.moments.sums import WIDE, picked_rows
from sbonnx.spec import Array

DAMPING: Final = 0.01
"""Damping: share of the mean second moment that is added to the diagonal before a fit."""

HELD: Final = 5
"""Every n-th sample, in the order of contents, belongs to the hold-out set."""

MOST_ROWS: Final = 64
"""Rows that are kept of a held-out sample."""

HELD_BYTES: Final = 32 << 20
"""Bytes of the rows that are kept of all held-out samples of a layer, except that each sample has a row."""

HeldPairs: TypeAlias = Sequence[tuple[Array, Array]]
"""Rows (G, n, K) of x and x' of each held-out sample."""

SHARES: Final = np.linspace(0.0, 1.0, 21)
"""The shares that are compared."""

FLOOR: Final = 1e-3
"""Error of a row, relative to the mean of all without compensation, below which it does not count as smaller."""


def is_held(rank: int) -> bool:
    """Return whether a sample belongs to the hold-out set. `rank`: its number in the order of contents."""
    return rank % HELD == HELD - 1


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


@dataclass(frozen=True)
class Compensation:
    """Compensation of the input error of a layer.

    Attributes:
        share: of it by the weight, in [0, 1].
        centred: its mean by the bias.
    """

    share: float = 0.0
    centred: bool = False


FEW_OUTPUTS: Final = 512
"""So many outputs of a layer with more than `WIDE` inputs, to less than twice as many, decide about its share."""


def compensation_of(weight: Array, fit: Moments, held: HeldPairs, *, bias: bool) -> Compensation:
    """Choose what a layer compensates of the error of its inputs: what typical held-out rows gain most from.

    The weight that is fitted to the float stream is w + d with d = w (B - A) A^-1 on the moments ``fit``. If only a
    share s of d is added, the error of a row is |w (x - x') - s d x'|^2, a parabola in s; with a bias, the means are
    taken off x and x', if that is better. The smallest mean logarithm over rows is chosen, with equal weights of the
    samples: each row counts by the decibels that it gains. The mean itself is decided by the few rows that the
    quantized network gets wrong, such as tokens with outliers that are clipped, and the others lose; and a layer with
    many inputs that saw few independent rows fits chance, so its share is small.

    Whether the means are taken off is decided, for a convolution, by the rows and by the mean error over the positions
    of a sample together. A mean error is small beside the error of a position, but averages over positions, as in a
    pool after the layer, keep it and lose the rest.

    Args:
        weight: matrices (G, O, K), float.
        fit: two-stream moments, of other samples.
        held: other samples than those of ``fit``.
        bias: the layer has a bias that can compensate the mean error.
    """
    if fit.is_one_stream or not fit.rows or not held:
        return Compensation(centred=bias)
    if weight.shape[2] > WIDE:
        weight = weight[:, :: max(weight.shape[1] // FEW_OUTPUTS, 1)]
    candidates = [_best(weight, fit, held, centred) for centred in ((True, False) if bias else (False,))]
    return min(candidates, key=lambda each: each[0])[1]


def _best(weight: Array, fit: Moments, held: HeldPairs, centred: bool) -> tuple[float, Compensation]:
    """Return the least mean logarithm of the errors and the compensation that has it."""
    w = weight.astype(np.float32, copy=False).transpose(0, 2, 1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        d = _compensating(weight, fit, centred)
        shift = (fit.mean - fit.mean_quantized, fit.mean_quantized) if centred else (0 * fit.mean, 0 * fit.mean)
        lost, moved = (value[:, None].astype(np.float32) for value in shift)
        views = _views(bool(fit.layout.kernel))
        floors = _floors(((x - quantized) @ w for x, quantized in held), views)
        if not np.isfinite(floors).all() or not floors[0]:
            return np.inf, Compensation(centred=centred)
        logs = []
        for x, quantized in held:
            error, change = (x - quantized - lost) @ w, (quantized - moved) @ d
            errors = [_errors(view(error), view(change)) for view in views]
            logs.append(
                [
                    np.log(error_of_view + floor).mean(axis=0)
                    for error_of_view, floor in zip(errors, floors, strict=True)
                ]
            )
        total = np.mean(logs, axis=0)
    if not np.isfinite(total[0]).all():
        return np.inf, Compensation(centred=centred)
    at = int(total[0].argmin())
    return float(total[:, at].sum()), Compensation(float(SHARES[at]), centred)


def _errors(error: Array, change: Array) -> Array:
    """Return the squared errors of rows (G, n, O) with each share of a change taken off, float64 (n, shares)."""
    before, added = _squares(error)[:, None], _squares(change)[:, None]
    gained = np.einsum("gno,gno->n", error, change, dtype=np.float64)[:, None]
    return np.asarray(np.maximum(before - 2 * SHARES * gained + SHARES**2 * added, 0.0))


def _pooled(error: Array) -> Array:
    """Return the mean of rows (G, n, O) as one row."""
    return np.asarray(error.mean(axis=1, keepdims=True))


def _views(pooled: bool) -> tuple[Callable[[Array], Array], ...]:
    """Return what the error of a sample (G, n, O) is judged by: its rows, and with `pooled` their mean."""
    return (np.asarray, _pooled) if pooled else (np.asarray,)


def _floors(errors: Iterable[Array], views: Sequence[Callable[[Array], Array]]) -> Array:
    """Return `FLOOR` times the mean squared error over the samples, by view."""
    return np.asarray(FLOOR * np.mean([[_squares(view(error)).mean() for view in views] for error in errors], axis=0))


def _compensating(weight: Array, fit: Moments, centred: bool) -> Array:
    """Solve the damped system A d' = (B - A)' w' of symmetric A for d', float32 (G, K, O)."""
    if not fit.of_errors:
        moments = fit.centred() if centred else fit
        a, w = moments.a.copy(), weight.astype(np.float64).transpose(0, 2, 1)
        right = (moments.b - moments.a).transpose(0, 2, 1) @ w
        del moments
    else:
        pulled = fit.pull(weight)
        assert pulled is not None, "errors are those of a second stream"
        a = fit.a.copy()
        if centred:
            a = replace(fit, a=a, cross=None, square=None).centred(in_place=True).a
            lost = weight @ (fit.mean - fit.mean_quantized)[..., None]
            pulled -= (fit.rows * lost * fit.mean_quantized[:, None]).astype(pulled.dtype)
        right = pulled.transpose(0, 2, 1)
    diagonal = np.einsum("gkk->gk", a)
    mean = diagonal.mean(axis=1, keepdims=True)
    diagonal += DAMPING * mean + (mean == 0)
    try:
        d = solve_in_place(a, right) if fit.of_errors else np.linalg.solve(a, right)
    except np.linalg.LinAlgError:
        d = np.zeros_like(right)  # the diagonal varies so much that damping has no effect: the system is singular
    return np.asarray(d, np.float32)


def shift_gains(weight: Array, quantized: Array, shift: Array, held: HeldPairs, *, pooled: bool = False) -> bool:
    """Whether adding `shift` to the outputs V x' makes typical held-out rows closer to W x, as `compensation_of`.

    Args:
        weight, quantized: float matrices W and V (G, O, K).
        shift: of the outputs, (G, O).
        held: rows (G, n, K) of x and x' of each held-out sample.
        pooled: means over the positions of a sample count too, as for convolutions in `compensation_of`.
    """
    w, v = (matrix.astype(np.float32).transpose(0, 2, 1) for matrix in (weight, quantized))
    added = shift[:, None].astype(np.float32)
    views = _views(pooled)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        errors = [x @ w - other @ v for x, other in held]
        floors = _floors(errors, views)
        before, after = (
            np.mean([_logs(error - change, views, floors) for error in errors], axis=0).sum() for change in (0.0, added)
        )
    return bool(floors[0] == 0 or not np.isfinite(before) or after <= before)


def _logs(error: Array, views: Sequence[Callable[[Array], Array]], floors: Array) -> list[float]:
    """Return the mean logarithm of the squared errors of a sample, by view."""
    return [float(np.log(_squares(view(error)) + floor).mean()) for view, floor in zip(views, floors, strict=True)]


def _squares(error: Array) -> Array:
    """Return the squared error of each row of (G, n, O), summed over outputs, float64 (n,)."""
    return np.asarray(np.einsum("gno,gno->n", error, error, dtype=np.float64))
