"""Sums of products of planes at a lag, over boxes in one fixed order, for depthwise convolutions.

The compiled loop and numpy give bit-identical results: every sum consists of `LANES` interleaved float32 sums, which
are added to a float64 sum after `SHORT` products each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np

from sbonnx.moments.lags import LagPlan, Piece
from sbonnx.native import address, compiled
from sbonnx.spec import Array

loops = compiled("sbonnx.moments._lags")

LANES: Final = 16
SHORT: Final = 256
"""Must equal the constants in `_lags.c`."""


@final
@dataclass(frozen=True)
class Boxes:
    """The sums of a plan in the layout of the compiled loop.

    The loop reads planes in which columns `step` apart were made adjacent.

    Attributes:
        table: int64 (pieces, 5): offsets of both factors, row stride, number of rows, number of columns.
        step: distance between columns, the same in all pieces with more than one column.
    """

    table: Array
    step: int

    @staticmethod
    def of(plan: LagPlan, space: tuple[int, ...]) -> Boxes | None:
        """Build the table for images of `space`. None if unsupported: three axes, or columns with two steps."""
        steps = {piece.lags[-1].step for piece in plan.pieces if _size(piece, -1) > 1} or {1}
        if not plan.pieces or len(space) > 2 or len(steps) > 1:
            return None
        step = steps.pop()
        return Boxes(np.array([_row(piece, step, -(-space[-1] // step)) for piece in plan.pieces], np.int64), step)

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
        arrays = (address(each) for each in (left, right, self.table, sums))
        loops.correlate(*arrays, batch, channels, height, width, self.step, len(self.table))

    def _add_in_numpy(self, sums: Array, one: Array, other: Array, shape: tuple[int, int, int, int]) -> None:
        """Fallback of `add` without the compiled loop."""
        left = _side_by_side(one, shape, self.step)
        right = left if other is one else _side_by_side(other, shape, self.step)
        for total, (here, there, stride, rows, columns) in zip(sums, self.table.tolist(), strict=True):
            one, other = (_lines(plane, at, stride, rows, columns) for plane, at in ((left, here), (right, there)))
            for image in _sum_over(one, other, columns).reshape(shape[:2]):
                total[:, 0, 0] += image

    def nanoseconds(self, planes: int, size: int) -> float:
        """Estimate the time of the sums over `planes` planes of `size` on one core, compiled. Measured with AVX-512."""
        positions = float((self.table[:, 3] * self.table[:, 4]).sum())
        return planes * (len(self.table) * 7.0 + positions * 0.15 + (size if self.step > 1 else 0.0))


def _side_by_side(x: Array, shape: tuple[int, int, int, int], step: int) -> Array:
    """Reshape images to planes (N C, size) in which columns `step` apart are adjacent, padded with `LANES` zeros."""
    batch, channels, height, width = shape
    each = -(-width // step)
    wide = np.zeros((batch * channels, height, each * step), np.float32)
    wide[:, :, :width] = x.reshape(-1, height, width)
    planes = wide.reshape(-1, height, each, step).swapaxes(2, 3).reshape(batch * channels, -1)
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
        total += _added(products.reshape(planes, -1, LANES).sum(axis=1))
    return total


def _added(sums: Array) -> Array:
    """Add the lanes one after the other, in float32."""
    total = np.zeros(len(sums), np.float32)
    for lane in range(LANES):
        total += sums[:, lane]
    return total


def _row(piece: Piece, step: int, each: int) -> tuple[int, ...]:
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


def _size(piece: Piece, axis: int) -> int:
    start, stop = piece.box[axis]
    return stop - start
