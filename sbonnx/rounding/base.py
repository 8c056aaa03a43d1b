"""What every rounding does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from sbonnx.linear.layout import Layout
from sbonnx.moments import Moments
from sbonnx.spec import Array, QParams


@dataclass(frozen=True)
class Grid:
    """A weight and the values that it may take, as matrices (G, O, K); see `Layout`.

    Attributes:
        weight: float64.
        scale: float64, for each weight; read only.
        zero: float64, the code of 0.0 for each weight; read only.
        qmin, qmax: the lowest and highest code.
    """

    weight: Array
    scale: Array
    zero: Array
    qmin: int
    qmax: int

    @staticmethod
    def of(weight: Array, qparams: QParams, layout: Layout) -> Grid:
        """From a weight as it lies in the file."""
        return Grid(
            layout.matrices(np.asarray(weight, np.float64)),
            layout.spread(qparams.scale.astype(np.float64), qparams),
            layout.spread(qparams.zero_point.astype(np.float64), qparams),
            qparams.spec.qmin,
            qparams.spec.qmax,
        )

    def ratio(self) -> Array:
        """The weight in codes, not rounded: weight / scale + zero."""
        return np.asarray(self.weight / self.scale + self.zero)

    def values(self, codes: Array) -> Array:
        """What codes (G, O, K) mean, float64."""
        return np.asarray((codes - self.zero) * self.scale)


@dataclass(frozen=True)
class Rounded:
    """What a rounding found.

    Attributes:
        codes: of the weight's shape, dtype ``qparams.spec.dtype``, within [qmin, qmax].
        qparams: their scale and zero point: those that were given, but for a rounding that moves scales.
        loss: mean squared output error of the layer by its moments, summed over outputs; None without moments.
        nearest: that of rounding to nearest with the scales that were given; None without moments.
    """

    codes: Array
    qparams: QParams
    loss: float | None = None
    nearest: float | None = None


class Rounder(ABC):
    """Weight codes from a weight, its scale and the moments of its inputs. The same input gives the same codes."""

    needs_moments: bool = True
    moves_scales: bool = False

    @final
    def round(self, weight: Array, qparams: QParams, moments: Moments | None = None) -> Rounded:
        """Codes of `weight`, output by output never worse than the nearest ones on the given moments.

        Args:
            weight: float32 or float16, as it lies in the file.
            qparams: scale and zero point, per tensor, along ``qparams.spec.axis`` or in blocks.
            moments: of the layer's inputs, centred where its bias will take up the mean error. None: the nearest.
        """
        nearest = qparams.quantize(weight)
        if moments is None or not self.needs_moments or qparams.spec.is_fp8:
            return Rounded(nearest, qparams)
        layout = moments.layout
        grid = Grid.of(weight, qparams, layout)
        codes, moved = self.solve(grid, moments, qparams)
        return _better(grid, moments, qparams, moved, layout.matrices(nearest), codes)

    @abstractmethod
    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """Codes (G, O, K) as whole numbers of any type within [qmin, qmax], and the scales that they are of.

        Args:
            grid: the weight and what it may become.
            moments: of the inputs; G and K are those of the grid.
            qparams: the scales of the grid, to be returned as they are unless ``moves_scales``.
        """


def _better(grid: Grid, moments: Moments, qparams: QParams, moved: QParams, nearest: Array, codes: Array) -> Rounded:
    """The codes that were found; the nearest for the outputs where those are better, where scales were not moved."""
    plain = moments.error(grid.weight, grid.values(nearest.astype(np.float64)))
    layout = moments.layout
    other = (
        grid
        if moved is qparams
        else replace(
            grid,
            scale=layout.spread(moved.scale.astype(np.float64), moved),
            zero=layout.spread(moved.zero_point.astype(np.float64), moved),
        )
    )
    found = moments.error(grid.weight, other.values(codes.astype(np.float64)))
    if moved is qparams:
        worse = found > plain
        codes = np.where(worse[..., None], nearest, codes)
        found = np.minimum(found, plain)
    elif found.sum() > plain.sum():
        codes, moved, found = nearest, qparams, plain
    whole = layout.weight(codes).astype(qparams.spec.dtype)
    return Rounded(whole, moved, float(found.sum()), float(plain.sum()))
