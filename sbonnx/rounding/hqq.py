"""Scales and zero points of weights by half-quadratic splitting: an error that lets a few weights go, without data.

The range that keeps ``sum |w - w'|^p``, p < 1, small clips outlying weights that a squared error would follow. A helper
e takes up what is let go, so that each step is solved in closed form:

    e <- argmin_e  |e|^p + beta / 2 (w - w' - e)^2     (generalised soft threshold)
    s, z <- least squares of w - e on the codes        w' = (q - z) s
    q <- nearest codes,  beta <- kappa beta

Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023). They hold s and move a
float z only; here the scale moves as well, errors are measured in steps (so that beta means the same for every
layer), and z is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.spec import Array, Bounds, QuantSpec, ScaleRule, exact_scale, params_from_bounds

POWER: Final = 0.7
BETA: Final = 10.0
KAPPA: Final = 1.01
ITERATIONS: Final = 20
"""The paper's numbers."""

STARTS: Final = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of the range that was given from which the best is where the splitting begins."""

CHUNK: Final = 1 << 20
"""Weights that are worked on at a time: what is held besides the weight is some 10 arrays of so many float32."""


def hqq_bounds(
    weight: Array,
    spec: QuantSpec,
    bounds: Bounds,
    rule: ScaleRule = "exact",
    *,
    power: float = POWER,
    iterations: int = ITERATIONS,
) -> Bounds:
    """The range whose scale and zero point give the least sum of ``|w - w'|^power``; never a worse one than `bounds`.

    Args:
        weight: as it lies in the file, any float type.
        spec: per tensor, channel or block; integers.
        bounds: the range to begin with, one for each scale of `spec`.
        rule: see `params_from_bounds`.
        power: p of the error.
        iterations: rounds of the splitting; a row whose error no longer falls keeps its best.
    """
    start = params_from_bounds(bounds, spec, rule=rule)
    rows = _Rows.of(weight, spec)
    scale, zero = rows.flat(start.scale), rows.flat(start.zero_point.astype(np.float32))
    at = 0
    for part in rows.parts():
        some = slice(at, at + len(part))
        scale[some], zero[some] = _split(part, scale[some], zero[some], spec, power, iterations)
        at += len(part)
    lo, hi = (spec.qmin - zero) * scale, (spec.qmax - zero) * scale
    found = Bounds(np.minimum(lo, 0.0), np.maximum(hi, 0.0))
    if spec.symmetric:
        wide = exact_scale(found, spec, rule)  # "sparsebit" reads a range as another scale
        factor = np.divide(scale, wide, out=np.ones_like(scale), where=wide > 0)
        found = Bounds(found.lo * factor, found.hi * factor)
    ends = (rows.shaped(end.astype(np.float32), start.scale.shape) for end in (found.lo, found.hi))
    return Bounds(*ends)


@dataclass(frozen=True)
class _Rows:
    """A weight as rows that have one scale each: first whole blocks, then those at the end that are shorter.

    Attributes:
        whole: (R, block), of whole blocks; channels; or one row.
        rest: (R', shorter), empty where blocks divide the axis.
        lead: dimensions of the weight without the axis of blocks, which comes last; () where there are no blocks.
        axis: of blocks, or None.
    """

    whole: Array
    rest: Array
    lead: tuple[int, ...]
    axis: int | None

    @staticmethod
    def of(weight: Array, spec: QuantSpec) -> _Rows:
        none = np.zeros((0, 1), np.float32)
        if spec.axis is None:
            return _Rows(weight.reshape(1, -1), none, (), None)
        if spec.block_size is None:
            return _Rows(np.moveaxis(weight, spec.axis, 0).reshape(weight.shape[spec.axis], -1), none, (), None)
        wide = np.moveaxis(weight, spec.axis, -1)
        size = spec.block_size
        cut = wide.shape[-1] // size * size
        rest = wide[..., cut:].reshape(-1, wide.shape[-1] - cut) if cut < wide.shape[-1] else none
        return _Rows(wide[..., :cut].reshape(-1, size), rest, wide.shape[:-1], spec.axis)

    def parts(self) -> Iterator[Array]:
        """The rows, float32, some at a time."""
        for rows in (self.whole, self.rest):
            step = max(1, CHUNK // max(rows.shape[1], 1))
            for start in range(0, len(rows), step):
                yield rows[start : start + step].astype(np.float32)

    def flat(self, values: Array) -> Array:
        """One number a scale, in the order of the rows, (R + R',) float64."""
        if self.axis is None:
            return values.reshape(-1).astype(np.float64)
        wide = np.moveaxis(values, self.axis, -1).astype(np.float64)
        last = 1 if len(self.rest) else 0
        blocks = wide.shape[-1] - last
        return np.concatenate([wide[..., :blocks].reshape(-1), wide[..., blocks:].reshape(-1)])

    def shaped(self, flat: Array, shape: tuple[int, ...]) -> Array:
        """The inverse of `flat`, of the shape of the scales."""
        if self.axis is None:
            return flat.reshape(shape)
        whole = flat[: len(self.whole)].reshape(*self.lead, -1)
        rest = flat[len(self.whole) :].reshape(*self.lead, -1)
        return np.moveaxis(np.concatenate([whole, rest], axis=-1), -1, self.axis)


def _split(
    rows: Array, scale: Array, zero: Array, spec: QuantSpec, power: float, iterations: int
) -> tuple[Array, Array]:
    """Scale and whole zero point of each row, (R,) float64; those that were given where none better was found."""
    s, z = _shrunk(rows, scale[:, None].astype(np.float32), zero[:, None].astype(np.float32), spec, power)
    best, best_s, best_z = _loss(rows, scale[:, None].astype(np.float32), z, spec, power)[0], scale.copy(), zero.copy()
    beta = BETA
    for _ in range(iterations + 1):
        whole = z if spec.symmetric else np.clip(np.rint(z), spec.qmin, spec.qmax)
        loss, codes, error = _loss(rows, s, whole, spec, power)
        better = loss < best
        if not better.any():
            break
        best = np.where(better, loss, best)
        best_s, best_z = np.where(better, s[:, 0], best_s), np.where(better, whole[:, 0], best_z)
        target = rows - _shrink(error, beta, power) * s
        s, z = _fit(target, codes, s, z, spec)
        beta *= KAPPA
    return best_s, best_z


def _loss(rows: Array, s: Array, z: Array, spec: QuantSpec, power: float) -> tuple[Array, Array, Array]:
    """Sum of ``|w - w'|^power`` of each row, float64 (R,); the nearest codes, and ``(w - w') / s``."""
    ratio = rows / s
    codes = np.clip(np.rint(ratio) + z, spec.qmin, spec.qmax)
    error = ratio - (codes - z)
    return np.sum(np.abs(error) ** power, axis=1) * s[:, 0].astype(np.float64) ** power, codes, error


def _shrunk(rows: Array, scale: Array, z: Array, spec: QuantSpec, power: float) -> tuple[Array, Array]:
    """Where the splitting begins, row by row: the best of some narrower ranges. It ends in the nearest minimum."""
    best, s = np.full(len(rows), np.inf), scale
    for share in STARTS:
        loss = _loss(rows, scale * np.float32(share), z, spec, power)[0]
        s = np.where((loss < best)[:, None], scale * np.float32(share), s)
        best = np.minimum(best, loss)
    return s, z


def _shrink(error: Array, beta: float, power: float) -> Array:
    """The generalised soft threshold of an error: ``sign(e) max(|e| - |e|^(p - 1) / beta, 0)``."""
    size = np.abs(error)
    with np.errstate(divide="ignore"):
        less = size - size ** (power - 1) / beta
    return np.asarray(np.sign(error) * np.maximum(less, 0.0))


def _fit(target: Array, codes: Array, s: Array, z: Array, spec: QuantSpec) -> tuple[Array, Array]:
    """Least squares of `target` on ``(codes - z) s``, row by row; rows that say nothing keep what they have."""
    if spec.symmetric:
        steps = codes - z
        square, product = np.sum(steps * steps, axis=1), np.sum(steps * target, axis=1)
        fine = (square > 0) & (product > 0)
        return np.where(fine, product / np.where(fine, square, 1), s[:, 0])[:, None].astype(np.float32), z
    mean, level = codes.mean(axis=1, keepdims=True), target.mean(axis=1, keepdims=True)
    centred = codes - mean
    square = np.sum(centred * centred, axis=1, keepdims=True)
    product = np.sum(centred * (target - level), axis=1, keepdims=True)
    fine = (square > 0) & (product > 0)
    found = np.where(fine, product / np.where(fine, square, 1), s)
    return found.astype(np.float32), np.where(fine, mean - level / found, z).astype(np.float32)
