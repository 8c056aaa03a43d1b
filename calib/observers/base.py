"""`Observer`: base class of the methods that derive the range to represent from statistics of a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal

import numpy as np

from sbonnx.calib.sketches import Distribution, Sketch
from sbonnx.errors import RecipeError
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, ScaleRule, params_from_bounds

Needs = Literal["range", "histogram", "track"]

TILE: Final = 1 << 17
"""Number of values or bins processed at once: a float64 temporary takes 1 MiB, so a few of them fit the cache."""


@dataclass(frozen=True)
class Observer(ABC):
    """Stateless method with parameters that derives the range to represent from a sketch.

    Attributes:
        needs: statistics that the sketch must hold: minimum and maximum, histogram, or minimum and maximum per sample.
        for_weights, for_activations: where the method is useful.
        for_floats: whether its formulas hold for fp8, whose steps are not uniform.
    """

    needs: ClassVar[Needs]
    for_weights: ClassVar[bool] = True
    for_activations: ClassVar[bool] = True
    for_floats: ClassVar[bool] = True

    @abstractmethod
    def bounds(self, sketch: Sketch, spec: QuantSpec, rule: ScaleRule = "exact") -> Bounds:
        """Compute the range to represent.

        Args:
            sketch: statistics of the tensor; unchanged.
            spec: the integers that the range is for. Its axis is ignored: the sketch defines which ranges there are.
            rule: "exact", or "sparsebit" for the ancestor's numbers.

        Returns:
            float32, shape () without an axis in the sketch, else (C,); (0, 0) if there were no finite values.

        Raises:
            ValueError: the sketch does not hold the statistics in `needs`.
            RecipeError: the method does not support this kind of quantized values.
        """

    def bounds_of(self, sketches: Sequence[Sketch], spec: QuantSpec, rule: ScaleRule = "exact") -> list[Bounds]:
        """Compute the ranges of several tensors for the same integers; each equals that of `bounds`.

        Raises: as `bounds`.
        """
        return [self.bounds(sketch, spec, rule) for sketch in sketches]


@dataclass(frozen=True)
class ObserverTarget:
    """Quantization that the ranges are chosen for.

    Attributes:
        spec: the integers; its axis is 0, that of the ranges in a distribution.
        rule: how a scale follows from a range.
        sample_size: values of the whole tensor, all channels, in one sample.
    """

    spec: QuantSpec
    rule: ScaleRule
    sample_size: float = 1.0

    @classmethod
    def of(cls, spec: QuantSpec, rule: ScaleRule = "exact", sample_size: float = 1.0) -> ObserverTarget:
        """Create the target for the integers of `spec`; their axis is ignored."""
        return cls(replace(spec, axis=0, block_size=None), rule, sample_size)

    def params(self, lo: Array, hi: Array) -> QParams:
        """Compute scale and zero point of float64 ranges of any shape, after rounding the ranges to float32."""
        return params_from_bounds(Bounds(lo.astype(np.float32), hi.astype(np.float32)), self.spec, rule=self.rule)


@dataclass(frozen=True)
class Solver(Observer):
    """Observer that computes each range from its histogram, some channels at a time.

    Under the rule "exact" ranges are limited to the data.
    """

    needs: ClassVar[Needs] = "histogram"

    @abstractmethod
    def solve(self, distribution: Distribution, target: ObserverTarget) -> tuple[Array, Array]:
        """Compute (lo, hi) of every range of `distribution`, float64 (C,). Results of empty ranges are ignored."""

    def bounds(self, sketch: Sketch, spec: QuantSpec, rule: ScaleRule = "exact") -> Bounds:
        if spec.is_float and not self.for_floats:
            raise RecipeError(f"observer '{type(self).__name__}' is for integers, whose steps are even, not for fp8")
        whole = sketch.distribution()
        target = ObserverTarget.of(spec, rule, sketch.finite / max(sketch.samples, 1))
        lo, hi = np.zeros(whole.ranges), np.zeros(whole.ranges)
        for rows in row_tiles(whole):
            part = rows_of(whole, rows)
            if whole.left.shape[1]:
                seen = part.total > 0
                low, high = self.solve(part, target)
                if rule == "exact":
                    low, high = (np.clip(end, part.lo, part.hi) for end in (low, high))
                lo[rows], hi[rows] = np.where(seen, low, 0.0), np.where(seen, high, 0.0)
        shape = () if sketch.axis is None else (whole.ranges,)
        return Bounds(as_stored(lo).reshape(shape), as_stored(hi).reshape(shape))


def as_stored(ends: Array) -> Array:
    """Return ends of ranges, float64 (C,), as they are stored: float32 (C,) without negative zeros."""
    return np.asarray(ends.astype(np.float32) + np.float32(0))


def row_tiles(distribution: Distribution) -> Iterator[slice]:
    """Yield slices of the ranges with few enough bins to process at once, at least one range each."""
    rows = max(1, TILE // max(1, distribution.left.shape[1]))
    yield from (slice(start, start + rows) for start in range(0, distribution.ranges, rows))


def rows_of(distribution: Distribution, rows: slice) -> Distribution:
    """Return some of the ranges, without a copy."""

    def part(values: Array) -> Array:
        return values[rows] if len(values) == distribution.ranges else values

    left = part(distribution.left)
    right = left if distribution.exact else part(distribution.right)
    counts = part(distribution.counts)
    return Distribution(left, right, counts, distribution.lo[rows], distribution.hi[rows], distribution.exact)


def mirrored(distribution: Distribution) -> Distribution:
    """Return the distribution of -x. Only the edges are copied."""
    left = -distribution.right[:, ::-1]
    right = left if distribution.exact else -distribution.left[:, ::-1]
    return Distribution(
        left, right, distribution.counts[:, ::-1], -distribution.hi, -distribution.lo, distribution.exact
    )


def singles(distribution: Distribution) -> bool:
    """Return whether every bin is one value with a count of 1, as in the exact sketch of a constant."""
    counts = distribution.counts
    return distribution.exact and len(counts) == 1 and bool((counts == 1).all())


def mean_of(distribution: Distribution, function: Callable[[Array], Array]) -> Array:
    """Compute the mean of `function` over the values (centres of bins), float64 (C,), in blocks of bins."""
    total = np.zeros(distribution.ranges)
    for start in range(0, distribution.left.shape[1], TILE):
        columns = slice(start, start + TILE)
        middle = distribution.left[:, columns].astype(np.float64)
        if not distribution.exact:
            middle = (middle + distribution.right[:, columns]) / 2
        total += (function(middle) * distribution.counts[:, columns]).sum(axis=1)
    return np.asarray(total / np.maximum(distribution.total, 1))


def coarsened(distribution: Distribution) -> Distribution:
    """Merge neighbouring bins if there are more than `TILE` per range, else return the distribution itself."""
    bins = distribution.left.shape[1]
    if bins <= TILE:
        return distribution
    starts = np.arange(0, bins, -(-bins // TILE))
    left, right = distribution.left[:, starts], distribution.right[:, np.append(starts[1:], bins) - 1]
    counts = np.add.reduceat(distribution.counts, starts, axis=1)
    wide = (left.astype(np.float64), right.astype(np.float64), counts)
    return Distribution(*wide, distribution.lo, distribution.hi, exact=False)
