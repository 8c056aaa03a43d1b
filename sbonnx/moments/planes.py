"""Products of planes a lag apart, summed over boxes by the compiled loop: for depthwise convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np

from sbonnx.loops import address, compiled
from sbonnx.moments.lags import LagPlan, Piece
from sbonnx.spec import Array

loops: Final = compiled("sbonnx.moments._lags")


@final
@dataclass(frozen=True)
class Boxes:
    """The sums of a plan as the loop reads them, in planes whose columns that lie `step` apart were put side by side.

    Attributes:
        table: int64 (pieces, 5): where both factors begin, what lies between their rows, rows, columns.
        step: between columns, in all pieces with several.
    """

    table: Array
    step: int

    @staticmethod
    def of(plan: LagPlan, space: tuple[int, ...]) -> Boxes | None:
        """Of a plan for images of `space`; None where the loop does not do it: three axes, or columns in two steps.

        None, too, where it was not compiled.
        """
        steps = {piece.lags[-1].step for piece in plan.pieces if _size(piece, -1) > 1} or {1}
        if loops is None or not plan.pieces or len(space) > 2 or len(steps) > 1:
            return None
        step = steps.pop()
        return Boxes(np.array([_row(piece, step, -(-space[-1] // step)) for piece in plan.pieces], np.int64), step)

    def zeros(self, channels: int) -> Array:
        """Sums to begin with, float64 (pieces, C, 1, 1)."""
        return np.zeros((len(self.table), channels, 1, 1))

    def add(self, sums: Array, one: Array, other: Array) -> None:
        """To `sums` those over two batches of images (N, C, H, W) or rows (N, C, W), float32; the same array or two."""
        assert loops is not None, "there are boxes only where there is a loop"
        batch, channels, *space = one.shape
        height, width = space if len(space) > 1 else (1, *space)
        left = np.ascontiguousarray(one)
        right = left if other is one else np.ascontiguousarray(other)
        arrays = (address(each) for each in (left, right, self.table, sums))
        loops.correlate(*arrays, batch, channels, height, width, self.step, len(self.table))

    def nanoseconds(self, planes: int, size: int) -> float:
        """About what the sums over so many planes of `size` take on one core. Measured on one with AVX-512."""
        positions = float((self.table[:, 3] * self.table[:, 4]).sum())
        return planes * (len(self.table) * 7.0 + positions * 0.15 + (size if self.step > 1 else 0.0))


def _row(piece: Piece, step: int, each: int) -> tuple[int, ...]:
    """Of the table. A single axis is that of columns; `each`: columns of a row that are side by side."""
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
    """How many positions a piece has along an axis."""
    start, stop = piece.box[axis]
    return stop - start
