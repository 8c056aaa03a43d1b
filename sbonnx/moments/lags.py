"""Second moments of a convolution's windows without im2col: the autocorrelation of its input.

The entry of taps k and l is a sum over output positions of x[position of k] x[position of l]. Pairs of taps at the same
distance have the same products, summed over boxes that differ only at the border. One box is summed completely, the
others follow from it by adding or subtracting thin strips. For a 3x3 window of stride 1 this takes 13 sums instead of
45.

Depthwise convolutions sum products of planes (`PackedSums`). The compiled loop and numpy give bit-identical results:
every sum consists of `LANES` interleaved float32 sums, which are added to a float64 sum after `SHORT` products each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias, final

import numpy as np

from sbonnx.spec import Array
from sbonnx.system.native import address, compiled

Interval: TypeAlias = tuple[int, int]
"""Half-open range of steps along one spatial axis."""

Box: TypeAlias = tuple[Interval, ...]


@dataclass(frozen=True)
class Lag:
    """Pair of positions along one axis, `distance` apart, the first at ``phase + step * t``."""

    distance: int
    step: int
    phase: int

    def slices(self, interval: Interval) -> tuple[slice, slice]:
        """Return slices of both positions for t in `interval`."""
        first, last = (self.phase + self.step * t for t in (interval[0], interval[1] - 1))
        here, there = (first, last + 1), (first + self.distance, last + self.distance + 1)
        return slice(*here, self.step), slice(*there, self.step)


Lags: TypeAlias = tuple[Lag, ...]


@dataclass(frozen=True)
class LagSum:
    """A sum over a box of products of positions `lags` apart."""

    lags: Lags
    box: Box

    @property
    def volume(self) -> int:
        return volume(self.box)

    def slices(self, most: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield slices of the left and right factor, in chunks of `most` positions or one step along the first axis."""
        (start, stop), rest = self.box[0], self.box[1:]
        step = max(most // max(volume(rest), 1), 1)
        for first in range(start, stop, step):
            part = ((first, min(first + step, stop)), *rest)
            pairs = [lag.slices(interval) for lag, interval in zip(self.lags, part, strict=True)]
            yield tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


@dataclass(frozen=True)
class LagPlan:
    """Sums to compute, and how the moments follow from them.

    Attributes:
        pieces: the sums.
        entries: for a pair of taps (k, l), numbered within the window: the sign of each piece that contributes.
            Pairs that never overlap are left out; if both factors are the same tensor, so are pairs k > l.
    """

    pieces: tuple[LagSum, ...]
    entries: dict[tuple[int, int], dict[int, int]]

    def nanoseconds(self, groups: int, channels: int, share: float) -> float:
        """Estimate the time of the sums over one input on one core.

        Measured with AVX-512, 3 to 256 channels, widths 7 to 112.

        Args:
            groups, channels: groups of the convolution, and channels of one group.
            share: share of the per-call overhead for one input, as calls process many inputs at a time.
        """
        positions = sum(piece.volume for piece in self.pieces)
        product = 0.6 if channels == 1 else 0.5 + 0.0235 * channels
        return len(self.pieces) * 8_000 * share + positions * groups * channels * product


def speed(size: int) -> float:
    """Estimate multiplications per nanosecond in a float32 matrix product of `size` rows and columns.

    Measured with OpenBLAS on one AVX-512 core. Only the choice of the cheaper method depends on it.
    """
    return min(40.0, size / 1.6)


def volume(box: Box) -> int:
    """Return the number of positions in a box."""
    return math.prod(stop - start for start, stop in box)


def lag_plan(tables: Sequence[Array], sizes: Sequence[int], *, same: bool) -> LagPlan:
    """Plan the sums for one input shape. Plans are shared by all layers with these windows: do not modify them.

    Args:
        tables: for each spatial axis, the position that a tap reads at each output position, `Geometry.sources`.
        sizes: sizes of the axes, which also mark positions in the padding.
        same: both factors are the same tensor, so only pairs of taps k <= l are needed.
    """
    windows = tuple((table.shape[1], table.tobytes()) for table in tables)
    return _lag_plan(windows, tuple(sizes), same)


@lru_cache(maxsize=256)
def _lag_plan(windows: tuple[tuple[int, bytes], ...], sizes: tuple[int, ...], same: bool) -> LagPlan:
    """Plan as `lag_plan`; `windows`: number of taps and bytes of the int64 table of each axis."""
    tables = [np.frombuffer(table, np.int64).reshape(-1, taps) for taps, table in windows]
    axes = [_meetings(table, size) for table, size in zip(tables, sizes, strict=True)]
    taps = list(itertools.product(*(range(table.shape[1]) for table in tables)))
    classes: dict[Lags, dict[Box, list[tuple[int, int]]]] = {}
    for (k, left), (number, right) in itertools.product(enumerate(taps), repeat=2):
        if same and k > number:
            continue
        met = [axis.get(pair) for axis, pair in zip(axes, zip(left, right, strict=True), strict=True)]
        overlaps = [meeting for meeting in met if meeting is not None]
        if len(overlaps) == len(met):
            boxes = classes.setdefault(tuple(lag for lag, _ in overlaps), {})
            boxes.setdefault(tuple(interval for _, interval in overlaps), []).append((k, number))
    pieces: dict[LagSum, int] = {}
    entries: dict[tuple[int, int], dict[int, int]] = {}
    for lags, boxes in classes.items():
        sums: dict[Box, dict[int, int]] = {}
        for box in sorted(boxes):
            sums[box] = _sum_of(box, lags, sums, pieces)
            entries.update((pair, sums[box]) for pair in boxes[box])
    return LagPlan(tuple(pieces), entries)


def _meetings(table: Array, size: int) -> dict[tuple[int, int], tuple[Lag, Interval]]:
    """Return lag and overlap of all pairs of taps along one axis. Pairs that are never both inside are left out."""
    taps, meetings = table.shape[1], {}
    for k, number in itertools.product(range(taps), repeat=2):
        both = (table[:, k] < size) & (table[:, number] < size)
        if not both.any():
            continue
        left, right = table[both, k], table[both, number]
        step = int(left[1] - left[0]) if len(left) > 1 else 1
        start, phase = divmod(int(left[0]), step)
        meetings[k, number] = Lag(int(right[0] - left[0]), step, phase), (start, start + len(left))
    return meetings


def _sum_of(box: Box, lags: Lags, sums: dict[Box, dict[int, int]], pieces: dict[LagSum, int]) -> dict[int, int]:
    """Express the sum over `box` by pieces: a known box plus strips if that is less work, else a new piece."""
    best, least = None, volume(box)
    for base in sums:
        strips = _strips(base, box)
        if strips is not None and (work := sum(volume(strip) for strip, _ in strips)) < least:
            best, least = (base, strips), work
    if best is None:
        return {pieces.setdefault(LagSum(lags, box), len(pieces)): 1}
    total = dict(sums[best[0]])
    for strip, sign in best[1]:
        number = pieces.setdefault(LagSum(lags, strip), len(pieces))
        total[number] = total.get(number, 0) + sign
    return {number: sign for number, sign in total.items() if sign}


def _strips(known: Box, box: Box) -> list[tuple[Box, int]] | None:
    """Return strips to add to the sum over `known` to get that over `box`.

    None if they differ along two axes or do not overlap.
    """
    differing = [axis for axis in range(len(box)) if known[axis] != box[axis]]
    if len(differing) != 1:
        return None
    axis = differing[0]
    (start, stop), (wanted, end) = known[axis], box[axis]
    if wanted >= stop or end <= start:
        return None
    edges = [(min(start, wanted), max(start, wanted), 1 if wanted < start else -1)]
    edges.append((min(stop, end), max(stop, end), 1 if end > stop else -1))
    return [((*box[:axis], (low, high), *box[axis + 1 :]), sign) for low, high, sign in edges if high > low]


def tap_sums(total: Array, tables: Sequence[Array]) -> Array:
    """Sum the values that each tap reads over all positions.

    Args:
        total: inputs summed over the batch, float64 (C, *space).
        tables: `Geometry.sources`.

    Returns:
        float64 (C, taps).
    """
    for table in tables:
        size = total.shape[1]
        reads = np.zeros((size + 1, table.shape[1]))
        np.add.at(reads, (table, np.arange(table.shape[1])), 1.0)
        total = np.tensordot(total, reads[:size], axes=(1, 0))
    return np.asarray(total.reshape(len(total), -1))


loops = compiled("sbonnx.moments._lags")

LANES: Final = 16
SHORT: Final = 256
"""Must equal the constants in `_lags.c`."""


@final
@dataclass(frozen=True)
class PackedSums:
    """The sums of a plan in the layout of the compiled loop.

    The loop reads planes in which columns `step` apart were made adjacent.

    Attributes:
        table: int64 (pieces, 5): offsets of both factors, row stride, number of rows, number of columns.
        step: distance between columns, the same in all pieces with more than one column.
    """

    table: Array
    step: int

    @staticmethod
    def of(plan: LagPlan, space: tuple[int, ...]) -> PackedSums | None:
        """Build the table for images of `space`. None if unsupported: three axes, or columns with two steps."""
        steps = {piece.lags[-1].step for piece in plan.pieces if _size(piece, -1) > 1} or {1}
        if not plan.pieces or len(space) > 2 or len(steps) > 1:
            return None
        step = steps.pop()
        return PackedSums(np.array([_row(piece, step, -(-space[-1] // step)) for piece in plan.pieces], np.int64), step)

    def zeros(self, channels: int) -> Array:
        """Return zero-initialized sums, float64 (pieces, C, 1, 1)."""
        return np.zeros((len(self.table), channels, 1, 1))

    def add(self, sums: Array, one: Array, other: Array) -> None:
        """Add the sums over two batches of images (N, C, H, W) or rows (N, C, W), float32, to `sums`.

        `one` and `other` may be the same array.
        """
        batch, channels, *space = one.shape
        height, width = space if len(space) > 1 else (1, *space)
        if loops is None:
            self._add_in_numpy(sums, one, other, (batch, channels, height, width))
            return
        left = np.ascontiguousarray(one)
        right = left if other is one else np.ascontiguousarray(other)
        arrays = (address(array) for array in (left, right, self.table, sums))
        loops.correlate(*arrays, batch, channels, height, width, self.step, len(self.table))

    def _add_in_numpy(self, sums: Array, first: Array, second: Array, shape: tuple[int, int, int, int]) -> None:
        """Fallback of `add` without the compiled loop."""
        left = _side_by_side(first, shape, self.step)
        right = left if second is first else _side_by_side(second, shape, self.step)
        for total, (here, there, stride, rows, columns) in zip(sums, self.table.tolist(), strict=True):
            first, second = (_lines(plane, at, stride, rows, columns) for plane, at in ((left, here), (right, there)))
            for image in _sum_over(first, second, columns).reshape(shape[:2]):
                total[:, 0, 0] += image

    def nanoseconds(self, planes: int, size: int) -> float:
        """Estimate the time of the sums over `planes` planes of `size` on one core, compiled. Measured with AVX-512."""
        positions = float((self.table[:, 3] * self.table[:, 4]).sum())
        return planes * (len(self.table) * 7.0 + positions * 0.15 + (size if self.step > 1 else 0.0))


def _side_by_side(x: Array, shape: tuple[int, int, int, int], step: int) -> Array:
    """Reshape images to planes (N C, size) in which columns `step` apart are adjacent, padded with `LANES` zeros."""
    batch, channels, height, width = shape
    columns = -(-width // step)
    wide = np.zeros((batch * channels, height, columns * step), np.float32)
    wide[:, :, :width] = x.reshape(-1, height, width)
    planes = wide.reshape(-1, height, columns, step).swapaxes(2, 3).reshape(batch * channels, -1)
    return np.pad(planes, ((0, 0), (0, LANES)))


def _lines(planes: Array, first: int, stride: int, rows: int, columns: int) -> Array:
    """View of the columns of a box in planes (N C, size), `LANES` at a time: (N C, rows, columns / LANES, LANES)."""
    per_plane, item = planes.strides
    shape = (len(planes), rows, -(-columns // LANES), LANES)
    strides = (per_plane, stride * item, LANES * item, item)
    return np.lib.stride_tricks.as_strided(planes[:, first:], shape, strides, writeable=False)


def _sum_over(left: Array, right: Array, columns: int) -> Array:
    """Compute the sums over a box of all planes, float64 (N C,), in the same order as `sum_over` in C.

    numpy adds sequentially, not pairwise, along an axis that is not the last one (see `numpy.sum`).
    """
    planes, rows, across, _ = left.shape
    mask = (np.arange((across - 1) * LANES, across * LANES) < columns).astype(np.float32)
    total = np.zeros(planes)
    some = -(-SHORT * LANES // columns)  # rows after which a float32 sum ends
    for first in range(0, rows, some):
        products = left[:, first : first + some] * right[:, first : first + some]
        products[:, :, -1] *= mask
        lanes = products.reshape(planes, -1, LANES).sum(axis=1)
        short = np.zeros(planes, np.float32)
        for lane in range(LANES):  # one after the other, in float32
            short += lanes[:, lane]
        total += short
    return total


def _row(piece: LagSum, step: int, each: int) -> tuple[int, ...]:
    """Compute one row of the table. A single axis counts as columns; `each`: adjacent columns of a row."""
    places, counts = [0, 0], [1, 1]
    between = step * each
    for axis in range(len(piece.box)):
        lag = piece.lags[axis]
        first = lag.phase + lag.step * piece.box[axis][0]
        for factor, at in enumerate((first, first + lag.distance)):
            places[factor] += at % step * each + at // step if axis == len(piece.box) - 1 else at * step * each
        if axis < len(piece.box) - 1:
            between, counts[0] = lag.step * step * each, _size(piece, axis)
    return (*places, between, counts[0], _size(piece, -1))


def _size(piece: LagSum, axis: int) -> int:
    start, stop = piece.box[axis]
    return stop - start
