"""Base class and data types of all rounding methods, round to nearest, and the compiled loops that they share."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from sbonnx.cpu import cores
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import Moments
from sbonnx.native import compiled
from sbonnx.spec import Array, QParams


@dataclass(frozen=True)
class Grid:
    """Weight and quantization grid of one layer, as matrices (G, O, K); see `LinearLayer`.

    Attributes:
        weight: float64.
        scale: float64, one for each weight; read only.
        zero: float64, zero point for each weight; read only.
        qmin, qmax: the lowest and highest code.
    """

    weight: Array
    scale: Array
    zero: Array
    qmin: int
    qmax: int

    @staticmethod
    def of(weight: Array, qparams: QParams, layout: LinearLayer) -> Grid:
        """Create the grid of a weight in its file layout."""
        return Grid(
            layout.matrices(np.asarray(weight, np.float64)),
            layout.spread(qparams.scale.astype(np.float64), qparams),
            layout.spread(qparams.zero_point.astype(np.float64), qparams),
            qparams.spec.qmin,
            qparams.spec.qmax,
        )

    def ratio(self) -> Array:
        """Return the weight in units of codes, not rounded: weight / scale + zero."""
        return np.asarray(self.weight / self.scale + self.zero)

    def values(self, codes: Array) -> Array:
        """Dequantize codes (G, O, K) to float64."""
        return np.asarray((codes - self.zero) * self.scale)


@dataclass(frozen=True)
class Rounded:
    """Result of rounding one weight.

    Attributes:
        codes: in the weight's shape, dtype ``qparams.spec.dtype``, within [qmin, qmax].
        qparams: their scale and zero point: the given ones, unless the method changes scales.
        loss: mean squared output error of the layer by its moments, summed over outputs; None without moments.
        nearest: the same error for round-to-nearest with the given scales; None without moments.
    """

    codes: Array
    qparams: QParams
    loss: float | None = None
    nearest: float | None = None


class Rounder(ABC):
    """Rounding method: computes codes from a weight, its scale and the moments of its inputs. Deterministic."""

    needs_moments: bool = True
    moves_scales: bool = False

    @final
    def round(self, weight: Array, qparams: QParams, moments: Moments | None = None) -> Rounded:
        """Round `weight` to codes. The error of each output on the given moments is at most that of round-to-nearest.

        Args:
            weight: float32 or float16, in its file layout.
            qparams: scale and zero point, per tensor, along ``qparams.spec.axis`` or in blocks.
            moments: of the layer's inputs, centred if its bias will compensate the mean error. None: round to nearest.
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
        """Compute codes (G, O, K) as integers of any type within [qmin, qmax], and their scales.

        Args:
            grid: the weight and its quantization grid.
            moments: of the inputs; G and K are those of the grid.
            qparams: the scales of the grid, to be returned unchanged unless ``moves_scales``.
        """


def _better(grid: Grid, moments: Moments, qparams: QParams, moved: QParams, nearest: Array, codes: Array) -> Rounded:
    """Return the new codes, or the nearest codes for outputs with a lower error (for all outputs if scales changed)."""
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
    whole = layout.from_matrices(codes).astype(qparams.spec.dtype)
    return Rounded(whole, moved, float(found.sum()), float(plain.sum()))


@final
class Nearest(Rounder):
    """Rounds each weight to the nearest code."""

    needs_moments = False

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """Round every weight to the nearest code; see `Rounder.solve`."""
        return np.clip(np.rint(grid.ratio()), grid.qmin, grid.qmax), qparams


loops = compiled("sbonnx.rounding._search")

WORTH: Final = 1 << 22
"""Numbers to read below which a single thread is used."""


def over_rows(
    name: str, before: tuple[int, ...], rows: int, after: tuple[int, ...], reads: int, *, first: int = 0
) -> None:
    """Call the loop `name` as ``(*before, first, last, *after)`` on chunks of rows, with threads.

    Args:
        reads: total number of values read, which decides about threads.
    """
    loop = getattr(loops, name)
    threads = min(cores(), rows - first) if reads >= WORTH else 1
    if threads == 1:
        loop(*before, first, rows, *after)
        return
    edges = [first + (rows - first) * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads, thread_name_prefix="sbonnx-rounding") as pool:
        parts = [pool.submit(loop, *(*before, begin, end, *after)) for begin, end in itertools.pairwise(edges)]
    for part in parts:
        part.result()
