"""`Panel`: many sketches fed at once, one call into compiled code a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from sbonnx.calib.sketches import kernels
from sbonnx.calib.sketches.sketch import MANTISSA, Sketch
from sbonnx.spec import Array

JOB: Final = 5
"""Numbers that tell the compiled code of one array: see `panel` in _kernels.c."""


class Panel:
    """Sketches in a fixed order, each of which sees one array a sample; not safe for several threads.

    Python threads that each call into compiled code a hundred times a sample wait for one another; here it is once.
    The sketches are complete after `settle`, and then as `Sketch.observe` would have made them.
    """

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        self.sketches = tuple(sketches)
        self._arrays: list[Array] = []
        self._ready = np.zeros(0, np.intp)  # positions of the sketches that compiled code can take
        self._jobs = np.zeros((0, JOB), np.int64)
        self._sizes = np.zeros(0, np.int64)
        count = len(self.sketches)
        self._lo, self._hi = np.full(count, np.inf, np.float32), np.full(count, -np.inf, np.float32)
        self._elements, self._samples = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._track: list[tuple[int, Array, Array, Array]] = []  # index of the sample, positions, lo, hi

    def observe(self, arrays: Sequence[Array], index: int = 0, samples: int = 1) -> list[int]:
        """Feed the i-th array to the i-th sketch, see `Sketch.observe`.

        Args:
            arrays: float arrays; cheapest where they are the same objects as last time, with new values.
            index: position of the (first) sample in the data.
            samples: how many samples each array holds.

        Returns:
            Positions of the arrays that hold NaN or Inf.

        Raises:
            NumericError: see `Sketch.observe`.
        """
        if len(arrays) != len(self._arrays) or any(x is not y for x, y in zip(arrays, self._arrays, strict=True)):
            self._arrays = list(arrays)
            self._prepare()
        taken = self._take_compiled(index, samples)
        bad = []
        for i in np.flatnonzero(~taken).tolist():
            sketch = self.sketches[i]
            before = sketch.nan + sketch.inf
            sketch.observe(arrays[i], index, samples)
            if sketch.nan + sketch.inf > before:
                bad.append(i)
        if not taken.all() and any(self._is_ready(i) for i in np.flatnonzero(~taken).tolist()):
            self._prepare()
        return bad

    def settle(self) -> None:
        """Write what was gathered here into the sketches."""
        for i in np.flatnonzero(self._samples).tolist():
            sketch = self.sketches[i]
            sketch.take_summary(
                int(self._samples[i]), int(self._elements[i]), self._lo[i : i + 1].copy(), self._hi[i : i + 1].copy()
            )
        for index, where, lo, hi in self._track:
            for i, low, high in zip(where.tolist(), lo.tolist(), hi.tolist(), strict=True):
                if self.sketches[i].tracks:
                    self.sketches[i].take_track(index, low, high)
        self._track.clear()
        self._lo.fill(np.inf)
        self._hi.fill(-np.inf)
        self._elements.fill(0)
        self._samples.fill(0)

    def _is_ready(self, i: int) -> bool:
        """Whether compiled code can take the i-th array."""
        sketch, x = self.sketches[i], self._arrays[i]
        one = not sketch.tracks or x.ndim == 0 or x.shape[0] == 1
        plain = x.dtype == np.float32 and x.size > 0 and x.flags.c_contiguous
        return sketch.axis is None and one and plain and (sketch.detail == "range" or sketch.pages is not None)

    def _prepare(self) -> None:
        """List what compiled code can take."""
        ready = [] if kernels.native is None else [i for i in range(len(self._arrays)) if self._is_ready(i)]
        self._ready = np.array(ready, np.intp)
        self._jobs = np.zeros((len(ready), JOB), np.int64)
        self._sizes = np.array([self._arrays[i].size for i in ready], np.int64)
        for job, i in zip(self._jobs, ready, strict=True):
            pages = self.sketches[i].pages
            job[:3] = kernels.address(self._arrays[i]), self._arrays[i].size, -1
            if pages is not None:
                job[2:] = MANTISSA, kernels.address(pages.slots), kernels.address(pages.counts)

    def _take_compiled(self, index: int, samples: int) -> Array:
        """Feed those that are ready; bool (n,), which were taken in."""
        taken = np.zeros(len(self.sketches), bool)
        count = len(self._ready)
        if not count or kernels.native is None:
            return taken
        lo, hi, status = np.empty(count, np.float32), np.empty(count, np.float32), np.empty(count, np.uint8)
        table = kernels.table(MANTISSA)
        numbers = (kernels.address(x) for x in (table, lo, hi, status))
        kernels.native.panel(kernels.address(self._jobs), count, *numbers)
        done = status == 0
        where = self._ready[done]
        lo, hi = lo[done], hi[done]
        self._lo[where] = np.minimum(self._lo[where], lo)
        self._hi[where] = np.maximum(self._hi[where], hi)
        self._elements[where] += self._sizes[done]
        self._samples[where] += samples
        if any(sketch.tracks for sketch in self.sketches):
            self._track.append((index, where, lo, hi))
        taken[where] = True
        return taken
