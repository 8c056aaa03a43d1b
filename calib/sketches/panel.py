"""`Panel`: updates many sketches with one call of compiled code per sample."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not
from typing import Final

import numpy as np

from sbonnx.calib.sketches import kernels
from sbonnx.calib.sketches.sketch import MANTISSA, Sketch
from sbonnx.spec import Array
from sbonnx.system.native import address

JOB: Final = 5
"""Number of integers that describe one array to the compiled code: see `panel` in _kernels.c."""


class Panel:
    """Sketches in a fixed order, each updated with one array per sample. Not thread-safe.

    Python threads that each call compiled code a hundred times per sample block each other; a panel calls it once. The
    sketches are complete after `settle`, and then equal to those of `Sketch.observe`.
    """

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        self.sketches = tuple(sketches)
        self._tracks = any(sketch.tracks for sketch in self.sketches)
        self._arrays: list[Array] = []
        self._track: list[tuple[int, list[int], Array, Array]] = []  # index of the sample, positions, lo, hi
        self._list([])

    def observe(self, arrays: Sequence[Array], index: int = 0, samples: int = 1) -> list[int]:
        """Update the i-th sketch with the i-th array, see `Sketch.observe`.

        Args:
            arrays: float arrays; fastest if they are the same objects as in the last call, with new values.
            index: position of the (first) sample in the data.
            samples: number of samples in each array.

        Returns:
            Positions of the arrays that hold NaN or Inf.

        Raises:
            NumericError: see `Sketch.observe`.
        """
        if len(arrays) != len(self._arrays) or any(map(is_not, arrays, self._arrays)):
            self._arrays = list(arrays)
            self._prepare()
        bad = []
        left = self._take_compiled(index, samples)
        for i in left:
            sketch = self.sketches[i]
            before = sketch.nan + sketch.inf
            sketch.observe(arrays[i], index, samples)
            if sketch.nan + sketch.inf > before:
                bad.append(i)
        if any(self._is_ready(i) for i in left):
            self._prepare()
        return bad

    def settle(self) -> None:
        """Write the collected statistics into the sketches."""
        counts = (self._runs - self._missed).tolist()
        for at, (i, seen, size) in enumerate(zip(self._ready, counts, self._sizes, strict=True)):
            if seen:
                lo, hi = self._lo[at : at + 1].copy(), self._hi[at : at + 1].copy()
                self.sketches[i].take_summary(seen * self._samples, seen * size, lo, hi)
        for index, where, lows, highs in self._track:
            for i, low, high in zip(where, lows.tolist(), highs.tolist(), strict=True):
                if self.sketches[i].tracks and low <= high:
                    self.sketches[i].take_track(index, low, high)
        self._track.clear()
        self._list(self._ready)

    def _list(self, ready: list[int]) -> None:
        """Start collecting for the sketches at `ready`."""
        count = len(ready)
        self._ready = ready
        self._others = sorted(set(range(len(self.sketches))) - set(ready))
        self._sizes = [self._arrays[i].size for i in ready]
        self._runs = 0  # calls, each of `_samples` samples
        self._samples = 0
        self._missed = np.zeros(count, np.int64)  # calls that the compiled code declined
        self._lo, self._hi = np.full(count, np.inf, np.float32), np.full(count, -np.inf, np.float32)
        self._found = np.empty(count, np.float32), np.empty(count, np.float32), np.empty(count, np.uint8)
        self._jobs = np.zeros((count, JOB), np.int64)
        for job, i in zip(self._jobs, ready, strict=True):
            pages = self.sketches[i].pages
            job[:3] = address(self._arrays[i]), self._arrays[i].size, -1
            if pages is not None:
                job[2:] = MANTISSA, address(pages.slots), address(pages.counts)
        self._places = address(self._jobs), tuple(address(x) for x in self._found)

    def _is_ready(self, i: int) -> bool:
        sketch, x = self.sketches[i], self._arrays[i]
        single = not sketch.tracks or x.ndim == 0 or x.shape[0] == 1
        plain = x.dtype == np.float32 and x.size > 0 and x.flags.c_contiguous
        return sketch.axis is None and single and plain and (sketch.detail == "range" or sketch.pages is not None)

    def _prepare(self) -> None:
        """Update the list of arrays that the compiled code supports."""
        self.settle()
        self._list([] if kernels.native is None else [i for i in range(len(self._arrays)) if self._is_ready(i)])

    def _take_compiled(self, index: int, samples: int) -> list[int]:
        """Update the supported sketches, and return the positions of the others."""
        if not self._ready or kernels.native is None:
            return self._others
        if samples != self._samples:
            self.settle()
            self._samples = samples
        jobs, addresses = self._places
        kernels.native.panel(jobs, len(self._ready), address(kernels.table(MANTISSA)), *addresses)
        lo, hi, status = self._found
        declined = np.flatnonzero(status)
        lo[declined], hi[declined] = np.inf, -np.inf
        np.minimum(self._lo, lo, out=self._lo)
        np.maximum(self._hi, hi, out=self._hi)
        self._missed[declined] += 1
        self._runs += 1
        if self._tracks:
            self._track.append((index, self._ready, lo.copy(), hi.copy()))
        return sorted([*self._others, *(self._ready[at] for at in declined.tolist())])
