"""What an observer is: a method that picks the range to represent, given what a tensor held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal

import numpy as np

from sbonnx.calib.sketches import Distribution, Sketch
from sbonnx.errors import RecipeError
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, ScaleRule, params_from_bounds

Needs = Literal["range", "histogram", "track"]

TILE: Final = 1 << 17
"""Values or bins worked on at once: a temporary of float64 takes 1 MiB, so a handful of them stays in the cache."""


@dataclass(frozen=True)
class Observer(ABC):
    """A method with its parameters and no state: from a sketch to the range that the codes should represent.

    Attributes:
        needs: what the sketch must hold: its extremes, its histogram, or the extremes of each sample.
        for_weights, for_activations: where the method makes sense.
        for_floats: whether its formulas hold for fp8, whose steps are not even.
    """

    needs: ClassVar[Needs]
    for_weights: ClassVar[bool] = True
    for_activations: ClassVar[bool] = True
    for_floats: ClassVar[bool] = True

    @abstractmethod
    def bounds(self, sketch: Sketch, spec: QuantSpec, rule: ScaleRule = "exact") -> Bounds:
        """The range to represent.

        Args:
            sketch: what the tensor held; unchanged.
            spec: the integers that the range is for. Its axis is not read: the sketch says which ranges there are.
            rule: "exact", or "sparsebit" for the ancestor's numbers.

        Returns:
            float32, shape () or (C,) as the sketch has an axis or not; (0, 0) where nothing finite was seen.

        Raises:
            ValueError: the sketch does not hold what the method `needs`.
            RecipeError: the method is not for codes of this kind.
        """


@dataclass(frozen=True)
class Target:
    """What ranges are picked for.

    Attributes:
        spec: the integers; its axis is 0, that of the ranges in a distribution.
        rule: how a scale follows from a range.
        sample_size: values of the whole tensor, all channels, in one sample.
    """

    spec: QuantSpec
    rule: ScaleRule
    sample_size: float = 1.0

    @classmethod
    def of(cls, spec: QuantSpec, rule: ScaleRule = "exact", sample_size: float = 1.0) -> Target:
        """The target for the integers of `spec`, whatever their axis."""
        return cls(replace(spec, axis=0, block_size=None), rule, sample_size)

    def params(self, lo: Array, hi: Array) -> QParams:
        """Scale and zero point of ranges in float64, of any shape, as they come out once the ranges are float32."""
        return params_from_bounds(Bounds(lo.astype(np.float32), hi.astype(np.float32)), self.spec, rule=self.rule)


@dataclass(frozen=True)
class Solver(Observer):
    """An observer that solves each range from its distribution, some channels at a time.

    Under the rule "exact" ranges are cut to the data.
    """

    needs: ClassVar[Needs] = "histogram"

    @abstractmethod
    def solve(self, distribution: Distribution, target: Target) -> tuple[Array, Array]:
        """(lo, hi) of every range of `distribution`, float64 (C,). Ranges that hold nothing are not read."""

    def bounds(self, sketch: Sketch, spec: QuantSpec, rule: ScaleRule = "exact") -> Bounds:
        """See `Observer.bounds`."""
        if spec.is_fp8 and not self.for_floats:
            raise RecipeError(f"observer '{type(self).__name__}' is for integers, whose steps are even, not for fp8")
        whole = sketch.distribution()
        target = Target.of(spec, rule, sketch.finite / max(sketch.samples, 1))
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
        lo, hi = (end.astype(np.float32).reshape(shape) + np.float32(0) for end in (lo, hi))  # no negative zero
        return Bounds(np.asarray(lo), np.asarray(hi))


def row_tiles(distribution: Distribution) -> Iterator[slice]:
    """Slices of the ranges that together hold few enough bins to work on at once, one range at the least."""
    rows = max(1, TILE // max(1, distribution.left.shape[1]))
    yield from (slice(start, start + rows) for start in range(0, distribution.ranges, rows))


def rows_of(distribution: Distribution, rows: slice) -> Distribution:
    """Some of the ranges. Nothing is copied."""

    def part(values: Array) -> Array:
        return values[rows] if len(values) == distribution.ranges else values

    left = part(distribution.left)
    right = left if distribution.exact else part(distribution.right)
    counts = part(distribution.counts)
    return Distribution(left, right, counts, distribution.lo[rows], distribution.hi[rows], distribution.exact)


def mirrored(distribution: Distribution) -> Distribution:
    """The distribution of -x. Nothing is copied but the edges."""
    left = -distribution.right[:, ::-1]
    right = left if distribution.exact else -distribution.left[:, ::-1]
    return Distribution(
        left, right, distribution.counts[:, ::-1], -distribution.hi, -distribution.lo, distribution.exact
    )


def singles(distribution: Distribution) -> bool:
    """Whether every bin is one value that was seen once, as in the exact sketch of a constant."""
    counts = distribution.counts
    return distribution.exact and len(counts) == 1 and bool((counts == 1).all())


def mean_of(distribution: Distribution, function: Callable[[Array], Array]) -> Array:
    """Mean of `function` over the values (bins: at their middles), float64 (C,); some bins at a time."""
    total = np.zeros(distribution.ranges)
    for start in range(0, distribution.left.shape[1], TILE):
        columns = slice(start, start + TILE)
        middle = distribution.left[:, columns].astype(np.float64)
        if not distribution.exact:
            middle = (middle + distribution.right[:, columns]) / 2
        total += (function(middle) * distribution.counts[:, columns]).sum(axis=1)
    return np.asarray(total / np.maximum(distribution.total, 1))


def coarsened(distribution: Distribution) -> Distribution:
    """The distribution itself, or neighbouring bins as one where there are more than `TILE` to a range."""
    bins = distribution.left.shape[1]
    if bins <= TILE:
        return distribution
    starts = np.arange(0, bins, -(-bins // TILE))
    left, right = distribution.left[:, starts], distribution.right[:, np.append(starts[1:], bins) - 1]
    counts = np.add.reduceat(distribution.counts, starts, axis=1)
    wide = (left.astype(np.float64), right.astype(np.float64), counts)
    return Distribution(*wide, distribution.lo, distribution.hi, exact=False)
