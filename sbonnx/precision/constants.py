"""Constants in half precision: whether they fit, and their conversion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from sbonnx.plan.magnitudes import FloatKind
from sbonnx.spec import Array

SPARE_DB: Final = 16.0
"""Tolerated excess of rounding noise over that of normal numbers, in dB, before a tensor stays float32.

The limit is 50 dB in float16, where most of the signal is carried by values under 5e-6. 8-bit quantization gives 30 to
45 dB.
"""

CHUNK: Final = 1 << 20
"""Number of values processed at a time."""


def lowest_db(kind: FloatKind) -> float:
    """Return the signal-to-noise ratio of rounding, in dB, below which a tensor stays float32."""
    return kind.worst_db - SPARE_DB


def _chunks(values: Array) -> Iterator[Array]:
    flat = values.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK]


def narrowed(values: Array, kind: FloatKind) -> Array:
    """Return `values`, float32, in the narrower type. Infinities and NaN are preserved."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values.astype(kind.dtype))


def finite_peak(values: Array) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    peaks = [np.max(np.abs(part), where=np.isfinite(part), initial=0.0) for part in _chunks(values)]
    return float(max(peaks, default=0.0))


def rounding_db(values: Array, kind: FloatKind) -> float:
    """Return the signal-to-noise ratio of finite values rounded to `kind`, in dB; inf if rounding is exact."""
    signal = noise = 0.0
    for part in _chunks(values):
        wide = part[np.isfinite(part)].astype(np.float64)
        near = narrowed(wide.astype(np.float32), kind).astype(np.float64)
        signal += float((wide**2).sum())
        noise += float(((wide - near)[np.isfinite(near)] ** 2).sum())
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else math.inf


def misfit(values: Array, kind: FloatKind) -> str | None:
    """Return why a float32 constant cannot be converted to the narrower type, or None."""
    peak = finite_peak(values)
    if peak > kind.largest:
        return f"holds {peak:.3g}, past {kind.largest:.6g}, the largest {kind.name}"
    left = rounding_db(values, kind)
    if left < lowest_db(kind):
        return f"holds values so small that {kind.name} keeps {max(left, 0.0):.0f} dB of them"
    return None


def exactly(values: Array, kind: FloatKind) -> bool:
    """Return whether all values, float32, are normal numbers of the narrower type, as required for scales."""
    wide = np.asarray(values, np.float32)
    return bool((np.abs(wide) >= kind.normal).all() and (narrowed(wide, kind).astype(np.float32) == wide).all())
