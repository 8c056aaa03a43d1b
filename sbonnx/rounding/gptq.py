"""GPTQ: rounds weights column by column, where each column compensates the error of the previous ones."""

from __future__ import annotations

from typing import Final, final

import numpy as np

from sbonnx.errors import NumericError
from sbonnx.moments import WIDE, Moments
from sbonnx.recipe.sections.base import parameter
from sbonnx.recipe.sections.quantizers import GptqKeys
from sbonnx.rounding.base import Grid, Rounder
from sbonnx.rounding.search.beam import Planes, columns, nearest_plane, search
from sbonnx.rounding.search.descent import descend, descend_from
from sbonnx.rounding.search.factor import factor_of
from sbonnx.rounding.search.tabu import tabu
from sbonnx.spec import Array, QParams, QuantSpec

NOT_FINITE: Final = "the inputs of the layer hold NaN or infinite values"

AT_ONCE: Final = 1 << 24
"""Weights times beams that are rounded together; needs four float32 arrays of this size at most."""

FEW: Final = 512
MORE: Final = 4
"""Layers with fewer than `FEW` inputs get ``FEW // inputs`` times as many beams, at most `MORE` times."""

WIDE_BEAMS: Final = 4
"""Beams of layers with more than `WIDE` inputs, at most: 16 take four times as long and gain 0 to 3 % of the error that
remains, measured on a block of 2,048 / 7,168 channels."""


@final
class Gptq(GptqKeys, Rounder):
    """GPTQ with beam search, followed by tabu search and coordinate descent on the same objective.

    Columns are rounded one after another; columns not yet rounded compensate the error so far. With the factor ``A +
    damping * mean(diag A) = M M'``, M upper triangular, of the moments in the order of the columns, the squared error
    is, up to a constant, a sum over columns k of ``((w - v) M + Z)_k^2``. Minimizing these terms in turn gives

        v_k = round(w_k + (Z_k + sum over j < k of (w_j - v_j) M_jk) / M_kk),   Z M' = w F

    Z is 0 if float and quantized inputs are the same. No inverse is needed. With more than one beam the best few
    roundings of the columns so far are kept as candidates, see `sbonnx.rounding.search.beam`.

    Small floats, whose codes are not equally spaced, are rounded with one beam, and not changed afterwards.

    The damping is multiplied by ten each time the factorization fails. Layers with few inputs get up to four times as
    many beams. Those with more than `WIDE` have at most `WIDE_BEAMS`, and the descent runs before the tabu search,
    which continues with its gradient: both need one product with the moments. Of fewer rows than inputs there is no
    tabu search: it takes a quarter of the time and lowers the error of these rows only (`docs/decisions` 0009).

    Args:
        block: columns that are updated one by one; the others are updated by a matrix product after each block.

    Source: Frantar et al. 2022, "GPTQ", sections 3 and 4, and algorithm 1, in the form of Babai's nearest plane
    (Chen et al. 2025, "The geometry of LLM quantization"); the shift of the target for quantized inputs is ours.
    """

    keeps_zeros = True
    by_output = True

    beams: int = parameter(16)
    steps: int = parameter(8)
    sweeps: int = parameter(20)
    block: int = parameter(64)

    def __post_init__(self) -> None:
        if self.damping < 0 or self.beams < 1 or self.steps < 0 or self.block < 1 or self.sweeps < 0:
            raise ValueError("damping, steps and sweeps must be >= 0, beams and block >= 1")

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """Compute codes by GPTQ, tabu search and coordinate descent; see `Rounder.solve`."""
        codes, moved, _ = self.solve_with_gradient(grid, moments, qparams)
        return codes, moved

    def solve_with_gradient(
        self, grid: Grid, moments: Moments, qparams: QParams
    ) -> tuple[Array, QParams, Array | None]:
        """As `solve`, with the gradient of a wide layer without tabu search.

        Raises:
            NumericError: the moments contain NaN or Inf.
        """
        if not moments.is_finite:
            raise NumericError(NOT_FINITE)
        factor = factor_of(moments, self.damping, self.order)
        # more beams for few columns, where they are cheap, and one for a single column
        inputs = moments.layout.inputs
        beams = 1 if inputs == 1 or self.beams == 1 else self.beams * int(np.clip(FEW // inputs, 1, MORE))
        if inputs > WIDE:
            beams = min(beams, WIDE_BEAMS)
        searched = self._search(Planes.of(grid, factor, moments.pull(grid.weight)), beams)
        codes = columns(searched, np.argsort(factor.order, axis=1))
        del factor, searched
        if inputs > WIDE and self.sweeps:
            codes, rest = descend_from(grid, codes, moments, self.sweeps)
            few = moments.observed is not None and moments.observed < inputs
            if few or not self.steps:
                return codes, qparams, rest
            return tabu(grid, codes, moments, self.steps, rest), qparams, None
        codes = tabu(grid, codes, moments, self.steps)
        return descend(grid, codes, moments, self.sweeps), qparams, None

    def solve_floats(self, grid: Grid, moments: Moments, spec: QuantSpec) -> Array:
        """Compute codes of small floats by GPTQ; see `Rounder.solve_floats`.

        Raises:
            NumericError: the moments contain NaN or Inf.
        """
        if not moments.is_finite:
            raise NumericError(NOT_FINITE)
        factor = factor_of(moments, self.damping, self.order)
        planes = Planes.of(grid, factor, moments.pull(grid.weight))
        return columns(nearest_plane(planes, spec, self.block), np.argsort(factor.order, axis=1))

    def _search(self, planes: Planes, beams: int) -> Array:
        """Return codes (G, O, K) in the order of rounding. Runs on parts of the groups, or of the outputs if G is 1."""
        groups, outputs, count = planes.weight.shape
        if groups == 1:
            step = max(1, AT_ONCE // (count * beams))
            parts = [(slice(None), slice(at, at + step)) for at in range(0, outputs, step)]
        else:
            step = max(1, AT_ONCE // (outputs * count * beams))
            parts = [(slice(at, at + step), slice(None)) for at in range(0, groups, step)]
        codes = np.empty_like(planes.weight)
        for part in parts:
            codes[part], _ = search(planes.part(*part), beams, self.block)
        return codes
