"""Base class and data types of all rounding methods, round to nearest, and the compiled loops that they share."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
from numpy.typing import DTypeLike

from sbonnx.graph.storage.weights import release_pages
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import Moments
from sbonnx.spec import AT_ONCE, Array, QParams, QuantSpec
from sbonnx.system.cpu import cores
from sbonnx.system.native import compiled

SPARSE: Final = 0.25
"""Share of zeros from which a weight is sparse (3:4 has a quarter): its zeros are kept by every rounding."""

FAR: Final = 2.0**20
"""Spacing of the codes of a weight that stays zero, relative to its scale: no other code is ever nearer."""


def kept_zeros(weight: Array) -> Array | None:
    """Return which values of a sparse weight are zero and stay zero, bool of its shape; None if it is not sparse."""
    zeros = weight == 0
    return zeros if zeros.size and np.count_nonzero(zeros) >= SPARSE * zeros.size else None


@dataclass(frozen=True)
class Grid:
    """Weight and quantization grid of one layer, as matrices (G, O, K); see `LinearLayer`.

    Attributes:
        weight: float64, or float32.
        scale: like `weight`, one for each weight; read only.
        zero: like `weight`, zero point for each weight; read only.
        qmin, qmax: the lowest and highest code of each weight, any type; read only.
    """

    weight: Array
    scale: Array
    zero: Array
    qmin: Array
    qmax: Array

    @staticmethod
    def of(weight: Array, qparams: QParams, layout: LinearLayer, dtype: DTypeLike = np.float64) -> Grid:
        """Create the grid of a weight in its file layout."""
        matrices = layout.matrices(np.asarray(weight, dtype))
        scale = layout.spread(qparams.scale.astype(dtype), qparams)
        zero = layout.spread(qparams.zero_point.astype(dtype), qparams)
        if matrices.dtype == np.float32:  # a wide layer, of which rows are read again and again
            matrices, scale, zero = (np.ascontiguousarray(part) for part in (matrices, scale, zero))
        return Grid(matrices, scale, zero, *layout.code_limits(matrices / scale, qparams.spec))

    def nearest(self) -> Array:
        """Return the nearest code of each weight, (G, O, K) like `weight`."""
        return np.clip(np.rint(self.ratio()), self.qmin, self.qmax)

    def keeping_zeros(self) -> Grid:
        """Return the grid on which zeros of a sparse weight have no other code: their neighbours are `FAR` away."""
        zeros = kept_zeros(self.weight)
        return self if zeros is None else replace(self, scale=np.where(zeros, FAR * self.scale, self.scale))

    def ratio(self) -> Array:
        """Return the weight in units of codes, not rounded: weight / scale + zero."""
        return np.asarray(self.weight / self.scale + self.zero)

    def values(self, codes: Array) -> Array:
        """Dequantize codes (G, O, K) of the type of `weight`, or of integers of 8 or 16 bits, to that type."""
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


def nearest_codes(weight: Array, qparams: QParams) -> Array:
    """Quantize a weight; a large one slice by slice, and pages of a mapped one are released after each."""
    if weight.size <= AT_ONCE:
        return qparams.quantize(weight)
    codes = np.empty(weight.shape, qparams.spec.dtype)
    for part, params in qparams.parts(weight.shape):
        codes[part] = params.quantize(weight[part])
        release_pages()
    return codes


class Rounder(ABC):
    """Rounding method: computes codes from a weight, its scale and the moments of its inputs. Deterministic.

    Attributes:
        by_output: outputs are rounded independently of each other, with the given scales.
    """

    by_output: bool = False
    needs_moments: bool = True
    moves_scales: bool = False
    keeps_zeros: bool = False

    @final
    def round(self, weight: Array, qparams: QParams, moments: Moments | None = None) -> Rounded:
        """Round `weight` to codes. The error of each output on the given moments is at most that of round-to-nearest.

        Zeros of a sparse weight (`kept_zeros`) stay zero by methods that have ``keeps_zeros``.

        Args:
            weight: float32 or float16, in its file layout.
            qparams: scale and zero point, per tensor, along ``qparams.spec.axis`` or in blocks.
            moments: of the layer's inputs, centred if its bias will compensate the mean error. None: round to nearest.
        """
        nearest = nearest_codes(weight, qparams)
        if moments is None or not self.needs_moments:
            return Rounded(nearest, qparams)
        layout = moments.layout
        grid = Grid.of(weight, qparams, layout, moments.a.dtype if self.by_output else np.float64)
        if qparams.spec.is_float:
            codes = self.solve_floats(grid.keeping_zeros() if self.keeps_zeros else grid, moments, qparams.spec)
            return _better(grid, moments, qparams, qparams, layout.matrices(nearest), codes)
        own = grid.keeping_zeros() if self.keeps_zeros else grid
        codes, moved, gradient = self.solve_with_gradient(own, moments, qparams)
        codes = np.clip(codes, grid.qmin, grid.qmax)
        return _better(grid, moments, qparams, moved, layout.matrices(nearest), codes, gradient)

    def solve_floats(self, grid: Grid, moments: Moments, spec: QuantSpec) -> Array:
        """Compute codes (G, O, K) of small floats, as numbers; the default rounds to nearest. Args: see `solve`."""
        return np.asarray(np.clip(grid.ratio(), spec.qmin, spec.qmax).astype(spec.dtype))

    def solve_with_gradient(
        self, grid: Grid, moments: Moments, qparams: QParams
    ) -> tuple[Array, QParams, Array | None]:
        """As `solve`, with `Moments.gradient` at the codes if the method knows it: it saves a product."""
        return *self.solve(grid, moments, qparams), None

    @abstractmethod
    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """Compute codes (G, O, K) as integers of any type within the grid's limits, and their scales.

        Args:
            grid: the weight and its quantization grid.
            moments: of the inputs; G and K are those of the grid.
            qparams: the scales of the grid, to be returned unchanged unless ``moves_scales``. The grid of a weight that
                stays zero has another spacing if ``keeps_zeros``, see `Grid.keeping_zeros`.
        """


def _better(
    grid: Grid,
    moments: Moments,
    qparams: QParams,
    moved: QParams,
    nearest: Array,
    codes: Array,
    gradient: Array | None = None,
) -> Rounded:
    """Return the new codes, or the nearest codes for outputs with a lower error (for all outputs if scales changed)."""
    kind = grid.weight.dtype
    plain = moments.error(grid.weight, grid.values(nearest.astype(kind)))
    layout = moments.layout
    other = (
        grid
        if moved is qparams
        else replace(
            grid,
            scale=layout.spread(moved.scale.astype(kind), moved),
            zero=layout.spread(moved.zero_point.astype(kind), moved),
        )
    )
    errors = moments.error(grid.weight, other.values(codes.astype(kind, copy=False)), gradient)
    if moved is qparams:
        worse = errors > plain
        codes = np.where(worse[..., None], nearest, codes)
        errors = np.minimum(errors, plain)
    elif errors.sum() > plain.sum():
        codes, moved, errors = nearest, qparams, plain
    whole = layout.from_matrices(codes).astype(qparams.spec.dtype)
    return Rounded(whole, moved, float(errors.sum()), float(plain.sum()))


@final
class Nearest(Rounder):
    """Rounds each weight to the nearest code."""

    needs_moments = False
    keeps_zeros = True

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """Round every weight to the nearest code; see `Rounder.solve`."""
        return grid.nearest(), qparams


loops = compiled("sbonnx.rounding._search")

WORTH: Final = 1 << 22
"""Numbers to read below which a single thread is used."""


def limit_rows(ends: Array, kind: Any) -> tuple[Array, int]:
    """Return limits (G, O, K) as contiguous rows for a loop, and the distance between rows: 0 if there is only one."""
    if ends.strides[:2] == (0, 0):
        return np.ascontiguousarray(ends[0, 0], kind), 0
    return np.ascontiguousarray(ends, kind), ends.shape[2]


def over_rows(name: str, before: tuple[int, ...], rows: int, after: tuple[int, ...], reads: int) -> None:
    """Call the loop `name` as ``(*before, first, last, *after)`` on chunks of rows, with threads.

    Args:
        reads: total number of values read, which decides about threads.
    """
    loop = getattr(loops, name)
    threads = min(cores(), rows) if reads >= WORTH else 1
    if threads == 1:
        loop(*before, 0, rows, *after)
        return
    edges = [rows * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads, thread_name_prefix="sbonnx-rounding") as pool:
        parts = [pool.submit(loop, *(*before, begin, end, *after)) for begin, end in itertools.pairwise(edges)]
    for part in parts:
        part.result()
