"""MSE observer: the range with the least mean squared error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

import numpy as np

from sbonnx.calib.observers.base import TILE, ObserverTarget, Solver, as_stored, coarsened
from sbonnx.calib.observers.cumulative import Curve
from sbonnx.calib.observers.quantization_error import bin_means, guessed_error, quantization_error
from sbonnx.calib.observers.value_errors import clipping_ends, step_means
from sbonnx.calib.sketches import Distribution, Sketch
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, ScaleRule

Errors = Callable[[Array, Array], Array]
"""(lo, hi) of K candidates for each of C ranges, float64 (K, C) → mean squared error, float64 (K, C)."""

CURVE_STEPS: Final = 1 << 10
"""Number of quantization steps up to which a `Curve` is faster than a pass over the bins."""


StepErrors = Callable[[Array, Array, Array], Array]
"""(scale, lowest, highest) of K candidates for each of C ranges, float64 (K, C) → mean squared error, float64 (K, C).

lowest and highest are the ends of the integers, minus the zero point.
"""


def errors_of(distributions: Sequence[Distribution], target: ObserverTarget) -> Errors:
    """Return a fast function that compares candidates for all ranges of `distributions`, in their order.

    It is accurate to about six digits and uses the final rounded zero points.
    """
    if target.spec.is_float:  # steps are not uniform

        def errors_of_floats(lo: Array, hi: Array) -> Array:
            rows = zip(*np.broadcast_arrays(lo, hi), strict=True)
            return np.stack([_true_errors(distributions, target.params(low, high)) for low, high in rows])

        return errors_of_floats
    parts = [
        (place, _step_errors(distribution, target))
        for place, distribution in zip(_places(distributions), distributions, strict=True)
    ]

    def errors(lo: Array, hi: Array) -> Array:
        params = target.params(lo, hi)
        scale = params.scale.astype(np.float64)
        zero = params.zero_point.astype(np.float64)
        lowest, highest = target.spec.qmin - zero, target.spec.qmax - zero
        by_part = [part(scale[:, place], lowest[:, place], highest[:, place]) for place, part in parts]
        return np.concatenate(by_part, axis=1) if len(by_part) > 1 else by_part[0]

    return errors


def _step_errors(distribution: Distribution, target: ObserverTarget) -> StepErrors:
    """Return the function of `errors_of` for one distribution and integers."""
    steps = target.spec.qmax - target.spec.qmin
    if distribution.ranges == 1 and steps <= CURVE_STEPS:
        curve = Curve.of(distribution)
        return lambda scale, lowest, highest: curve.errors(scale[:, 0], lowest[:, 0], highest[:, 0], steps)[:, None]
    weights = distribution.counts / np.maximum(distribution.counts.sum(axis=1, keepdims=True), 1)
    if distribution.exact:
        shares = weights.astype(np.float32)
        return lambda scale, lowest, highest: (
            step_means(distribution.left, shares, scale, lowest, highest) * scale * scale
        )

    def errors(scale: Array, lowest: Array, highest: Array) -> Array:
        rows = zip(scale, lowest, highest, strict=True)
        return np.stack([_means_of_bins(distribution, weights, s, a, b) * s * s for s, a, b in rows])

    return errors


def _places(distributions: Sequence[Distribution]) -> list[slice]:
    """Return the places of the ranges of each distribution among those of all."""
    bounds = np.cumsum([0, *(distribution.ranges for distribution in distributions)]).tolist()
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _params_of(params: QParams, place: slice) -> QParams:
    return QParams(params.scale[place], params.zero_point[place], params.spec)


def _true_errors(distributions: Sequence[Distribution], params: QParams) -> Array:
    """Compute the `quantization_error` of all ranges of `distributions`, float64 (C,)."""
    pairs = zip(distributions, _places(distributions), strict=True)
    return np.concatenate(
        [quantization_error(distribution, _params_of(params, place)) for distribution, place in pairs]
    )


def _means_of_bins(distribution: Distribution, weights: Array, scale: Array, lowest: Array, highest: Array) -> Array:
    """Compute the mean squared error of uniformly filled bins in steps, float64 (C,)."""
    wide, bottom, top = scale[:, None], lowest[:, None], highest[:, None]
    means = bin_means(distribution.left / wide, distribution.right / wide, bottom, top)
    means *= weights
    return np.asarray(means.sum(axis=1))


def least_ends(distribution: Distribution, error: Array) -> tuple[Array, Array]:
    """Compute the ends (lo, hi), float64 (C,): a range with an end closer to 0 clips away more than `error` per value.

    The cost of clipping decreases in the end. It is evaluated at the left edges of the bins, so it is never
    overestimated.

    Args:
        error: mean squared error of the range to improve on, float64 (C,).
    """
    below, above = clipping_ends(distribution, error * distribution.total)
    return -below, above


GOLDEN: Final = (5**0.5 - 1) / 2
GRID: Final = 12
"""Number of candidates of the first grid search along an end."""
STEPS: Final = 6
"""Golden sections after the grid: each leaves 0.62 of the interval, which is two steps of the grid at first."""
ANCESTORS_STEPS: Final = 80
"""The ancestor's grid: the range times 1, 0.99, 0.98 ... 0.21."""
GAIN: Final = 0.01
"""Minimum relative gain for which the whole range is replaced, if values are known only by their bin.

Many equal values at the end of the range look as if they were spread over their bin.
"""
CHANCE: Final = 3.0
"""Additional minimum relative gain, as a multiple of 1/sqrt(n) for n values.

The positions of n values in a step are assumed to be uniform, which leaves the mean of their squared errors (standard
deviation 0.9 of the mean) uncertain by 0.9/sqrt(n).
"""
DOUBT: Final = 0.5
"""Additional minimum gain, as a share of the error from bins at least half a step wide.

The positions of values in such bins are unknown: the multiples of one step (pixels, or previously quantized values)
have no error at all, but seem to have one.
"""
LEAST: Final = 2.0**-12
"""Smallest factor for shrinking an end: below it a range of 16 bits has lost all but its lowest four."""

Ends = Callable[[Array], tuple[Array, Array]]
"""Shares in [0, 1], float64 (K, C) → candidates (lo, hi), float64 (K, C)."""


@final
@dataclass(frozen=True)
class Mse(Solver):
    """Minimizes the mean of (x - dequantize(quantize(x)))^2, with the final rounded zero point.

    A grid search over the ends, from the whole range down to where clipping alone costs more than the whole range, is
    followed by golden-section search around its best candidate. A symmetric range has one end. For an affine range both
    ends are first shrunk together, then each in turn with the other fixed, twice. Every range is searched separately.
    The result is compared with the whole range by `quantization_error` at the end, and is never worse; if values are
    known only by their bin, it must be better by more than the resulting uncertainty (`to_beat`). Under the rule
    "sparsebit": the best of the ancestor's grid of 80 steps, both ends shrunk by the same factor.

    Error bound: with w the root mean square of the widths of the bins (0 if the sketch is exact; below a 128th of the
    root mean square of the values, per channel a 32nd), the root of the true error is at most 2 w above that of the
    whole range, and, if that was replaced, of any range tried. The search itself equals a dense one on average, and is
    some percent above it at worst.

    Source: the grid is the ancestor's `mse` observer; golden sections, Kiefer 1953.
    """

    def solve(self, distribution: Distribution, target: ObserverTarget) -> tuple[Array, Array]:
        return self._searched([distribution], target)

    def bounds_of(self, sketches: Sequence[Sketch], spec: QuantSpec, rule: ScaleRule = "exact") -> list[Bounds]:
        """Compute the ranges of several tensors; those of one range each are searched together, with equal results."""
        target = ObserverTarget.of(spec, rule)
        searched: dict[int, Bounds] = {}
        for places, distributions in _batches(sketches):
            lo, hi = self._searched(distributions, target)
            if rule == "exact":
                low, high = (
                    np.concatenate(ends)
                    for ends in zip(*((member.lo, member.hi) for member in distributions), strict=True)
                )
                lo, hi = (np.clip(end, low, high) for end in (lo, hi))
            pairs = zip(as_stored(lo), as_stored(hi), strict=True)
            searched.update((place, Bounds(*map(np.asarray, ends))) for place, ends in zip(places, pairs, strict=True))
        return [searched[i] if i in searched else self.bounds(sketch, spec, rule) for i, sketch in enumerate(sketches)]

    def _searched(self, distributions: Sequence[Distribution], target: ObserverTarget) -> tuple[Array, Array]:
        search = _Search(distributions, target)
        if target.rule == "sparsebit":
            search.ancestors_grid()
        elif target.spec.symmetric:
            search.one_end()
        else:
            search.two_ends()
        return search.result()


def to_beat(distribution: Distribution, whole: QParams, error: Array) -> Array:
    """Compute the error that a range must stay below to replace the whole range, float64 (C,).

    Args:
        whole: parameters of the whole range.
        error: its `quantization_error`.
    """
    if distribution.exact:
        return error
    kept = 1 - GAIN - CHANCE / np.sqrt(np.maximum(distribution.total, 1))
    return np.asarray(kept * error - DOUBT * guessed_error(distribution, whole))


def _batches(sketches: Sequence[Sketch]) -> Iterator[tuple[list[int], list[Distribution]]]:
    """Yield places in `sketches` and distributions that `_Search` takes together: one range each, of the same signs.

    A batch ends when it has `TILE` bins. Sketches per channel, or without values, are left out.
    """
    waiting: dict[tuple[bool, bool], tuple[list[int], list[Distribution]]] = {}
    for place, sketch in enumerate(sketches):
        if sketch.axis is not None or not sketch.finite:
            continue
        distribution = sketch.distribution()
        signs = bool(distribution.lo[0] < 0), bool(distribution.hi[0] > 0)
        places, batch = waiting.setdefault(signs, ([], []))
        places.append(place)
        batch.append(distribution)
        if sum(member.left.shape[1] for member in batch) >= TILE:
            yield waiting.pop(signs)
    yield from waiting.values()


class _Search:
    """Search state: the best candidate so far for every range of some distributions.

    The ranges are independent. Only `two_ends` expects that, if one range has values below 0, all have, and above 0.

    Attributes:
        first_lo, first_hi: the whole ranges, float64 (C,).
        lo, hi: the best so far, float64 (C,).
        error: its error as computed by `errors`, float64 (C,).
    """

    def __init__(self, distributions: Sequence[Distribution], target: ObserverTarget) -> None:
        self.distributions = distributions
        self.target = target
        self.parts = list(zip(distributions, _places(distributions), strict=True))
        self.first_lo = np.concatenate([distribution.lo for distribution in distributions])
        self.first_hi = np.concatenate([distribution.hi for distribution in distributions])
        self.lo, self.hi = self.first_lo, self.first_hi
        self.whole = self._true_errors(self.lo, self.hi)
        self.error = self.whole

    def ancestors_grid(self) -> None:
        """Try both ends times 1 - i / 100, in float32."""
        lo, hi = self.lo.astype(np.float32), self.hi.astype(np.float32)
        for step in range(ANCESTORS_STEPS):
            share = np.float32(1 - 0.01 * step)
            low, high = ((share * end).astype(np.float64) for end in (lo, hi))
            self._keep(low, high, self._true_errors(low, high))

    def one_end(self) -> None:
        """Search [max(lo, -t), min(hi, t)] over t."""
        errors, low, high = self._begin()
        lo, hi = self.lo, self.hi
        far, near = np.maximum(-lo, hi), np.maximum(-low, high)

        def ends(share: Array) -> tuple[Array, Array]:
            t = _shrunk(far, near, share)
            return np.maximum(lo, -t), np.minimum(hi, t)

        self._along(errors, ends, *_everywhere(lo))

    def two_ends(self) -> None:
        """Search [lo, hi], each end separately."""
        errors, low, high = self._begin()
        lo, hi = -self.lo, self.hi

        def both(share: Array) -> tuple[Array, Array]:
            return -_shrunk(lo, -low, share), _shrunk(hi, high, share)

        def left(share: Array) -> tuple[Array, Array]:
            return -_shrunk(lo, -low, share), np.broadcast_to(self.hi, share.shape)

        def right(share: Array) -> tuple[Array, Array]:
            return np.broadcast_to(self.lo, share.shape), _shrunk(hi, high, share)

        ends = [end for end, there in ((right, (hi > 0).any()), (left, (lo > 0).any())) if there]
        if len(ends) < 2:
            for end in ends:
                self._along(errors, end, *_everywhere(lo))
            return
        self._along(errors, both, *_everywhere(lo), sections=0)
        near = [self._along(errors, end, *_everywhere(lo), sections=STEPS // 2) for end in ends]
        for end, (start, stop) in zip(ends, near, strict=True):
            self._along(errors, end, start, stop, grid=GRID // 4, sections=STEPS // 2)

    def result(self) -> tuple[Array, Array]:
        """Return the best range if it is significantly better than the whole one, else the whole range."""
        lo, hi = (end.astype(np.float32).astype(np.float64) for end in (self.lo, self.hi))
        limit = self.whole
        if self.target.rule == "exact":
            whole = self.target.params(self.first_lo, self.first_hi)
            limits = [
                to_beat(distribution, _params_of(whole, place), self.whole[place]) for distribution, place in self.parts
            ]
            limit = np.concatenate(limits)
        better = self._true_errors(lo, hi) < limit
        return np.where(better, lo, self.first_lo), np.where(better, hi, self.first_hi)

    def _begin(self) -> tuple[Errors, Array, Array]:
        """Return the fast error function and the smallest allowed ends."""
        coarse = [coarsened(distribution) for distribution in self.distributions]
        ends = [
            least_ends(distribution, self.whole[place])
            for distribution, (_, place) in zip(coarse, self.parts, strict=True)
        ]
        low, high = (np.concatenate(end) for end in zip(*ends, strict=True))
        return errors_of(coarse, self.target), np.maximum(low, self.lo), np.minimum(high, self.hi)

    def _true_errors(self, lo: Array, hi: Array) -> Array:
        """Compute the `quantization_error` of ranges, float64 (C,)."""
        return _true_errors(self.distributions, self.target.params(lo, hi))

    def _keep(self, lo: Array, hi: Array, error: Array) -> None:
        """Replace the best candidate where (lo, hi) are better."""
        better = error < self.error
        self.lo, self.hi = np.where(better, lo, self.lo), np.where(better, hi, self.hi)
        self.error = np.where(better, error, self.error)

    def _along(
        self, errors: Errors, ends: Ends, start: Array, stop: Array, *, grid: int = GRID, sections: int = STEPS
    ) -> tuple[Array, Array]:
        """Try shares from `start` to `stop`, float64 (C,): first on a grid, then by golden sections.

        Returns:
            (start, stop): one step of the grid on either side of its best candidate.
        """

        def attempt(share: Array) -> Array:
            """Compute the errors of `share` (K, C) and keep the best candidates."""
            lo, hi = ends(share)
            candidate_errors = errors(lo, hi)
            best = np.argmin(candidate_errors, axis=0)[None]
            self._keep(*(np.take_along_axis(x, best, axis=0)[0] for x in (lo, hi, candidate_errors)))
            return candidate_errors

        step = (stop - start) / (grid - 1)
        shares = start + np.arange(grid)[:, None] * step
        best = np.take_along_axis(shares, np.argmin(attempt(shares), axis=0)[None], axis=0)[0]
        start, stop = np.maximum(best - step, start), np.minimum(best + step, stop)
        if sections:
            _golden(attempt, start, stop, sections)
        return start, stop


def _golden(attempt: Callable[[Array], Array], start: Array, stop: Array, sections: int) -> None:
    """Run golden-section search on [start, stop], float64 (C,), for all ranges at once; `attempt` keeps the best."""
    inner = np.stack([stop - GOLDEN * (stop - start), start + GOLDEN * (stop - start)])
    inner_errors = attempt(inner)
    for _ in range(sections - 2):
        left = inner_errors[0] < inner_errors[1]
        start, stop = np.where(left, start, inner[0]), np.where(left, inner[1], stop)
        new = np.where(left, stop - GOLDEN * (stop - start), start + GOLDEN * (stop - start))
        error = attempt(new[None])[0]
        inner = np.stack([np.where(left, new, inner[1]), np.where(left, inner[0], new)])
        inner_errors = np.stack([np.where(left, error, inner_errors[1]), np.where(left, inner_errors[0], error)])


def _everywhere(ends: Array) -> tuple[Array, Array]:
    return np.zeros(len(ends)), np.ones(len(ends))


def _shrunk(end: Array, least: Array, share: Array) -> Array:
    """Interpolate geometrically from `end` (share 0) to `least` (share 1); an end that is not above 0 stays."""
    moves = end > 0
    ratio = np.where(moves, np.clip(least / np.where(moves, end, 1.0), LEAST, 1.0), 1.0)
    return np.asarray(end * np.exp(share * np.log(ratio)))
