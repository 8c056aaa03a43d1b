"""`Track`: minimum and maximum of each sample."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from sbonnx.spec import Array

TRACK: Final = ("track", "track_lo", "track_hi")
"""Names of the serialized arrays: positions int64 (S, 2), minima and maxima float32 (S, C)."""


class Track:
    """Extremes of samples, in any order, each with its position in the data; compact, as there may be many."""

    def __init__(self) -> None:
        self._places = array("q")
        self._lo = array("f")
        self._hi = array("f")

    def __len__(self) -> int:
        return len(self._places) // 2

    def append(self, index: int, row: int, lo: Sequence[float], hi: Sequence[float]) -> None:
        """Add the sample at (index, row)."""
        self._places.extend((index, row))
        self._lo.extend(lo)
        self._hi.extend(hi)

    def extend(self, other: Track) -> None:
        """Add all samples of another track."""
        self._places.extend(other._places)
        self._lo.extend(other._lo)
        self._hi.extend(other._hi)

    def sorted(self, channels: int) -> tuple[Array, Array, Array]:
        """Return (positions int64 (S, 2), lo, hi float32 (S, channels)) in the order of the data."""
        places = np.array(self._places, np.int64).reshape(-1, 2)
        order = np.lexsort((places[:, 1], places[:, 0]))
        lo, hi = (
            np.array(x, np.float32).reshape(len(places), channels)[order] + np.float32(0) for x in (self._lo, self._hi)
        )
        return places[order], lo, hi
