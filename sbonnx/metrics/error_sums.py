"""Energies of tensors and of their errors, summed over feeds, and their ratio: SQNR, relative error, cosine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbonnx.spec import Array


def sqnr_db(reference: Array, value: Array) -> float:
    """Compute the SQNR in dB: 10 log10(sum ref^2 / sum (ref - value)^2); inf when equal."""
    ref, val = np.asarray(reference, np.float64), np.asarray(value, np.float64)
    return ratio_db(energy(ref), energy(ref - val))


def ratio_db(signal: float, noise: float) -> float:
    """Compute 10 log10(signal / noise); inf without noise, -inf without signal."""
    if noise == 0:
        return math.inf
    if signal == 0 or not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)


def energy(values: Array) -> float:
    """Return the sum of squares."""
    flat = values.reshape(-1)
    return float(np.einsum("i,i->", flat, flat))


@dataclass
class ErrorSum:
    """Energy of a tensor and of its error, in float64, over feeds.

    All comparisons of two networks have one rule. Outputs are paired by name, and:

    - values that are not finite in the reference are left out, whatever the other tensor holds there;
    - a value that is not finite where the reference is finite is a total loss of the tensor;
    - so is a tensor that is missing, or has another shape.

    `signal` and `noise` are energies of the values that can be compared; after a total loss, `relative` is inf.

    Attributes:
        signal, noise: energy of the reference, and of the error.
        count: number of values compared, finite or not.
        not_finite: number of values that are not finite although the reference is.
        mismatched: number of feeds on which the tensor is missing or has another shape.
        parts: (signal, noise) of each feed; the noise of a total loss is inf.
    """

    signal: float = 0.0
    noise: float = 0.0
    count: int = 0
    not_finite: int = 0
    mismatched: int = 0
    parts: list[tuple[float, float]] = field(default_factory=list)

    def add(self, reference: Array, value: Any) -> tuple[Array, Array] | None:
        """Add a tensor of one feed.

        Returns:
            The values that were compared, float64; None if the tensor is missing or has another shape.
        """
        ref = reference.astype(np.float64)
        if getattr(value, "shape", None) != reference.shape:
            self.mismatched += 1
            self.parts.append((energy(ref[np.isfinite(ref)]), math.inf))
            return None
        val = value.astype(np.float64)
        self.count += ref.size
        with np.errstate(invalid="ignore"):  # inf - inf
            signal, noise, gone = energy(ref), energy(ref - val), 0
        if not math.isfinite(noise):
            finite = np.isfinite(ref)
            good = finite & np.isfinite(val)
            gone = int((finite & ~good).sum())
            ref, val = ref[good], val[good]
            signal, noise = energy(ref), energy(ref - val)
        self.not_finite += gone
        self.signal += signal
        self.noise += noise
        self.parts.append((signal, math.inf if gone else noise))
        return ref, val

    @property
    def lost(self) -> bool:
        """Whether there was a total loss."""
        return bool(self.not_finite or self.mismatched)

    @property
    def sqnr_db(self) -> float:
        """The SQNR in dB, see `ratio_db`; -inf after a total loss, NaN before the first feed."""
        if not self.parts:
            return math.nan
        return -math.inf if self.lost else ratio_db(self.signal, self.noise)

    @property
    def relative(self) -> float:
        """Noise over signal: 0 without noise, inf without signal or after a total loss."""
        if self.lost:
            return math.inf
        if self.signal:
            return self.noise / self.signal
        return 0.0 if self.noise == 0 else math.inf


@dataclass
class CosineSum(ErrorSum):
    """An `ErrorSum` that also has the cosine similarity of both tensors as one vector over all feeds.

    Attributes:
        compared: energy of the compared tensor.
        dot: sum of the products.
    """

    compared: float = 0.0
    dot: float = 0.0

    def add(self, reference: Array, value: Any) -> tuple[Array, Array] | None:
        """Add a tensor of one feed, as `ErrorSum.add` does."""
        pair = super().add(reference, value)
        if pair is not None:
            self.compared += energy(pair[1])
            self.dot += float((pair[0] * pair[1]).sum())
        return pair

    @property
    def cosine(self) -> float:
        """The cosine; if one tensor is zero, whether both are."""
        norm = math.sqrt(self.signal * self.compared)
        return self.dot / norm if norm else float(self.noise == 0)


def errors_by_feed(sums: Sequence[ErrorSum]) -> Array | None:
    """Return the noise of each feed over the mean signal of the tensor, mean over tensors: float64 (feeds,).

    inf if it is not finite; None if no tensor has a finite signal other than 0.
    """
    rows = []
    for error_sum in sums:
        signal = sum(part[0] for part in error_sum.parts) / max(len(error_sum.parts), 1)
        if 0 < signal < math.inf:
            noise = np.array([part[1] for part in error_sum.parts])
            rows.append(np.where(np.isfinite(noise), noise, np.inf) / signal)
    return np.mean(rows, axis=0) if rows else None
