"""GPTQ: weights one column after another, each making up for the error of those before it."""

from __future__ import annotations

from typing import Final, final

import numpy as np

from sbonnx.errors import NumericError
from sbonnx.moments import Moments
from sbonnx.rounding.base import Grid, Rounder
from sbonnx.rounding.search.beam import Planes, columns, search, shift
from sbonnx.rounding.search.descent import descend
from sbonnx.rounding.search.factor import Order, ordered_factor
from sbonnx.rounding.search.tabu import tabu
from sbonnx.spec import Array, QParams

AT_ONCE: Final = 1 << 24
"""Weights times beams that are rounded together: four arrays of that many float32 at most."""

FEW: Final = 512
MORE: Final = 4
"""With fewer inputs than this, beams are as many times as many as they go into it, up to so many times."""


@final
class Gptq(Rounder):
    """GPTQ's closed form with a beam of choices, then tabu search and descent on the same objective.

    Columns are rounded one after another; the error made so far is taken up by what is still free. With the factor
    ``A + damping * mean(diag A) = M M'``, M upper triangular, of the moments in the order of the columns, the squared
    error is, up to a constant, a sum over columns k of ``((w - v) M + Z)_k^2``, and rounding each term in turn to its
    least is

        v_k = round(w_k + (Z_k + sum over j < k of (w_j - v_j) M_jk) / M_kk),   Z M' = w (B - A)

    Z is 0 where float and quantized inputs are the same. No inverse is needed. With more than one beam the best few
    roundings of the columns so far stay in play, see `sbonnx.rounding.search.beam`.

    Args:
        damping: added to the diagonal, as a share of its mean; ten times as much, again, while the factor fails.
        order: of the columns, see `ordered_factor`.
        beams: choices of codes that each output keeps in play, up to four times as many in layers with few inputs;
            1 is plain GPTQ.
        steps: of tabu search for each column, see `sbonnx.rounding.search.tabu`.
        block: columns that are kept in step one by one, the others by a product of matrices after each block.
        sweeps: at most so many of coordinate descent afterwards.

    Source: Frantar et al. 2022, "GPTQ", sections 3 and 4, and algorithm 1, in the form of Babai's nearest plane
    (Chen et al. 2025, "The geometry of LLM quantization"); the shift of the target for quantized inputs is ours.
    """

    def __init__(
        self,
        damping: float = 0.01,
        order: Order = "pivot",
        beams: int = 16,
        steps: int = 8,
        block: int = 64,
        sweeps: int = 20,
    ) -> None:
        if damping < 0 or beams < 1 or steps < 0 or block < 1 or sweeps < 0:
            raise ValueError("damping, steps and sweeps must be >= 0, beams and block >= 1")
        self.damping = damping
        self.order: Order = order
        self.beams = beams
        self.steps = steps
        self.block = block
        self.sweeps = sweeps

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """See `Rounder.solve`.

        Raises:
            NumericError: the moments hold NaN or Inf.
        """
        if not (np.isfinite(moments.a).all() and np.isfinite(moments.b).all()):
            raise NumericError("the inputs of the layer hold NaN or infinite values")
        order, factor = ordered_factor(moments.a, self.damping, self.order)
        beams = self._beams(moments.layout.inputs)
        found = self._search(Planes.of(grid, order, factor, shift(grid, moments)), beams)
        del factor
        codes = columns(found, np.argsort(order, axis=1))
        codes = tabu(grid, codes, moments, self.steps)
        return descend(grid, codes, moments, self.sweeps), qparams

    def _beams(self, inputs: int) -> int:
        """More where there are few columns, and time for it; one column alone has nothing to make up for it."""
        if inputs == 1 or self.beams == 1:
            return 1
        return self.beams * int(np.clip(FEW // inputs, 1, MORE))

    def _search(self, planes: Planes, beams: int) -> Array:
        """Codes (G, O, K) in the order of rounding: groups, or outputs where there is one group, a part at a time."""
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
