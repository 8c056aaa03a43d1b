"""`Sketch`: everything calibration remembers of one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np

from sbonnx.calib.sketches.distribution import Distribution, binned
from sbonnx.calib.sketches.kernels import PAGES, Pages, extremes
from sbonnx.calib.sketches.track import TRACK, Track
from sbonnx.errors import NumericError
from sbonnx.spec import Array

Detail = Literal["range", "histogram"]

EXACT: Final = 1 << 14
"""Values, over all channels, that a sketch keeps as they are before it folds them into bins."""

MANTISSA: Final = 7
"""Leading bits of the mantissa that name a bin, for one range per tensor: bins of at most 1/128 of their value."""

CHANNEL_MANTISSA: Final = 5
"""The same for ranges per channel, of which a tensor has thousands: bins of at most 1/32."""

FORMAT: Final = 1
"""Version of what `Sketch.to_arrays` gives."""

ZERO: Final = np.float32(0.0)


class Sketch:
    """Extremes, counts and distribution of a tensor, seen array by array; mergeable, of bounded size.

    The state is integers, exact extremes, and raw values in no order: it depends on what was seen, not on the batches,
    their order, or how sketches of parts were merged. Values are put in bins named by their leading bits: sign,
    exponent, and 7 bits of the mantissa (5 per channel), so no range is needed beforehand. The first 16,384 values
    are kept as they are; a sketch that never sees more is exact.

    Args:
        axis: channel axis of ranges per channel, or None for one range.
        detail: "range": extremes and counts only; "histogram": the distribution too.
        track: remember the extremes of every sample as well, 24 bytes each (per tensor).

    Attributes:
        elements: how many values were seen, finite or not.
        nan, inf: how many of them were NaN and infinite; these are in nothing else.
        samples: how many samples were seen.
    """

    def __init__(self, *, axis: int | None = None, detail: Detail = "histogram", track: bool = False) -> None:
        self.axis = axis
        self.detail: Detail = detail
        self.tracks = track
        self.elements = self.nan = self.inf = self.samples = 0
        self._keep: int | None = EXACT  # values to keep raw; None: all
        self._lo: Array | None = None  # float32 (C,), +inf where nothing finite was seen
        self._hi: Array | None = None
        self._raw: list[Array] = []  # float32 (C, n) each
        self.pages: Pages | None = None  # counts, once values were folded
        self._track = Track()

    @classmethod
    def of(cls, x: Array, axis: int | None = None) -> Sketch:
        """The sketch of one constant, exact whatever its size."""
        sketch = cls(axis=axis)
        sketch._keep = None
        sketch.observe(x)
        return sketch

    @property
    def finite(self) -> int:
        """Number of values that everything else rests on."""
        return self.elements - self.nan - self.inf

    @property
    def lo(self) -> Array:
        """Exact smallest finite value, float32, () or (C,); 0 where there is none."""
        return self._shaped(self._lo)

    @property
    def hi(self) -> Array:
        """Exact largest finite value, float32, () or (C,); 0 where there is none."""
        return self._shaped(self._hi)

    def observe(self, x: Array, index: int = 0, samples: int = 1) -> None:
        """Take in one array.

        Args:
            x: float16, float32 or float64, any shape that has `axis`.
            index: position of the sample in the data; read only with `track`.
            samples: how many samples it holds.

        Raises:
            NumericError: the channel axis is missing or has another length than before.
        """
        rows = self._rows(x)
        self.samples += samples
        self.elements += rows.size
        if rows.size:
            self._take(rows)
        elif self._lo is None:
            self._widen(np.full(len(rows), np.inf, np.float32), np.full(len(rows), -np.inf, np.float32))
        if self.tracks:
            self._follow(x, index)

    def merge(self, other: Sketch) -> None:
        """Take in what `other` saw; it is unchanged.

        Raises:
            ValueError: it watches another axis, or in other detail.
        """
        mine, theirs = (self.axis, self.detail, self.tracks), (other.axis, other.detail, other.tracks)
        if mine != theirs:
            raise ValueError(f"cannot merge a sketch of (axis, detail, track) {theirs} into one of {mine}")
        self.elements += other.elements
        self.nan += other.nan
        self.inf += other.inf
        self.samples += other.samples
        self._track.extend(other._track)
        if other._lo is not None and other._hi is not None:
            self._check_channels(len(other._lo))
            self._widen(other._lo, other._hi)
        if other.pages is not None:
            self._fold()
            if self.pages is None:
                self.pages = Pages.empty(len(other.pages.counts), other.pages.mantissa)
            self.pages.merge(other.pages)
        for raw in other._raw:
            self._add(raw)

    def distribution(self) -> Distribution:
        """How the finite values are distributed.

        Raises:
            ValueError: the sketch has extremes only.
        """
        if self.detail != "histogram":
            raise ValueError("this sketch remembers extremes only")
        lo, hi = (np.atleast_1d(x).astype(np.float64) for x in (self.lo, self.hi))
        if self.pages is not None:
            return binned(self.pages, lo, hi)
        values = np.sort(np.concatenate(self._raw, axis=1), axis=1) + ZERO if self._raw else np.zeros((len(lo), 0))
        values = np.asarray(values, np.float32)
        return Distribution(values, values, np.broadcast_to(np.int64(1), (1, values.shape[1])), lo, hi, exact=True)

    def track(self) -> tuple[Array, Array]:
        """Extremes of every sample in the order of the data: float32 (S,) or (S, C).

        A sample is a slice of the leading axis; one without a finite value is left out.

        Raises:
            ValueError: they were not remembered.
        """
        if not self.tracks:
            raise ValueError("this sketch does not remember samples")
        channels = 1 if self.axis is None else (0 if self._lo is None else len(self._lo))
        _, lo, hi = self._track.sorted(channels)
        return (lo[:, 0], hi[:, 0]) if self.axis is None else (lo, hi)

    def take_summary(self, samples: int, elements: int, lo: Array, hi: Array) -> None:
        """Take in finite arrays whose extremes, float32 (1,), and bins (in `pages`) were found elsewhere."""
        self.samples += samples
        self.elements += elements
        self._widen(lo, hi)

    def take_track(self, index: int, lo: float, hi: float, row: int = 0) -> None:
        """Take in the extremes of the sample in that row of the array at `index`, found elsewhere."""
        self._track.append(index, row, [lo], [hi])

    # --- taking in ----------------------------------------------------------------------------------

    def _rows(self, x: Array) -> Array:
        """`x` as float32 (C, values of a channel), contiguous."""
        if self.axis is not None and self.axis >= x.ndim:
            raise NumericError(f"a range per channel of axis {self.axis} needs that axis; the shape is {x.shape}")
        if x.dtype != np.float32:
            with np.errstate(over="ignore"):
                x = x.astype(np.float32)
        if self.axis is None:
            return np.ascontiguousarray(x).reshape(1, -1)
        channels = x.shape[self.axis]
        self._check_channels(channels)
        return np.ascontiguousarray(np.moveaxis(x, self.axis, 0)).reshape(
            channels, x.size // channels if channels else 0
        )

    def _check_channels(self, channels: int) -> None:
        """The channels are as many as before."""
        if self._lo is not None and len(self._lo) != channels:
            raise NumericError(
                f"axis {self.axis} had {len(self._lo)} channels and now has {channels}; "
                "an axis of changing length needs one range per tensor"
            )

    def _take(self, rows: Array) -> None:
        """Take in float32 (C, n >= 1), whatever it holds."""
        if self.detail == "range" or self._raw_fits(rows.size):
            lo, hi, fine = extremes(rows)
            if fine:
                self._widen(lo, hi)
                if self.detail == "histogram":
                    self._raw.append(rows.copy())
                return
        else:
            self._fold()
            counted = self._pages_for(rows)
            before = self._pages_before(counted, rows)
            lo, hi, fine = counted.count(rows)
            if fine:
                self._widen(lo, hi)
                return
            self.pages = before
        self._take_finite(rows)

    def _pages_before(self, pages: Pages, rows: Array) -> Pages | None:
        """What to go back to if rows turn out not to be finite: only those of several rows are counted in part."""
        if len(rows) == 1:
            return pages
        return Pages(pages.mantissa, pages.slots.copy(), pages.counts.copy())

    def _take_finite(self, rows: Array) -> None:
        """Take in the finite values of (C, n) that holds others; rare, and the walk stops after it."""
        fine = np.isfinite(rows)
        self.nan += int(np.isnan(rows).sum())
        self.inf += int(np.isinf(rows).sum())
        low = np.min(rows, axis=1, where=fine, initial=np.inf)
        self._widen(low, np.max(rows, axis=1, where=fine, initial=-np.inf))
        if self.detail != "histogram":
            return
        if len(rows) == 1:
            kept = rows[:, fine[0]]
            if kept.size:
                self._add(kept)
            return
        self._fold()
        pages = self._pages_for(rows)
        for channel in range(len(rows)):  # rows of different lengths: one by one, into the counts of their channel
            kept = np.ascontiguousarray(rows[channel : channel + 1, fine[channel]])
            if kept.size:
                alone = Pages.empty(1, pages.mantissa)
                alone.count(kept)
                wide = Pages(alone.mantissa, alone.slots, np.zeros((len(rows), *alone.counts.shape[1:]), np.int64))
                wide.counts[channel] = alone.counts[0]
                pages.merge(wide)

    def _add(self, rows: Array) -> None:
        """Take finite values into the distribution; extremes and totals are done."""
        if self._raw_fits(rows.size):
            self._raw.append(rows.copy())
        else:
            self._fold()
            self._pages_for(rows).count(np.ascontiguousarray(rows))

    def _raw_fits(self, size: int) -> bool:
        """Whether so many more values may be kept as they are."""
        if self.pages is not None:
            return False
        return self._keep is None or sum(raw.size for raw in self._raw) + size <= self._keep

    def _fold(self) -> None:
        """Raw values into bins."""
        raw, self._raw = self._raw, []
        for rows in raw:
            self._pages_for(rows).count(rows)

    def _pages_for(self, rows: Array) -> Pages:
        """The counts, made where there are none."""
        if self.pages is None:
            self.pages = Pages.empty(len(rows), MANTISSA if self.axis is None else CHANNEL_MANTISSA)
        return self.pages

    def _widen(self, lo: Array, hi: Array) -> None:
        """Include [lo, hi], float32 (C,)."""
        self._lo = lo if self._lo is None else np.minimum(self._lo, lo)
        self._hi = hi if self._hi is None else np.maximum(self._hi, hi)

    def _follow(self, x: Array, index: int) -> None:
        """Remember the extremes of each sample of `x`; an array without axes, or of channels only, is one sample."""
        one = x.ndim == 0 or self.axis == 0
        for row, sample in enumerate([x] if one else x):
            alone = Sketch(axis=self.axis if one or self.axis is None else self.axis - 1, detail="range")
            alone.observe(np.asarray(sample))
            if alone._lo is not None and alone._hi is not None and (alone._lo <= alone._hi).all():
                self._track.append(index, row, alone._lo.tolist(), alone._hi.tolist())

    def _shaped(self, values: Array | None) -> Array:
        """Extremes for reading: 0 for none, no negative zero (which of the two is found depends on the order)."""
        if values is None:
            return np.zeros(() if self.axis is None else 0, np.float32)
        fine = np.where(np.isfinite(values), values, ZERO) + ZERO
        return np.asarray(fine[0] if self.axis is None else fine, np.float32)

    # --- keeping ------------------------------------------------------------------------------------

    def to_arrays(self) -> dict[str, Array]:
        """The state as arrays; equal states give equal arrays."""
        head = [FORMAT, -1 if self.axis is None else self.axis, self.detail == "histogram", self.tracks]
        head += [self._lo is not None, self.pages is not None, self.elements, self.nan, self.inf, self.samples]
        arrays = {"head": np.array(head, np.int64)}
        if self._lo is not None and self._hi is not None:
            arrays["lo"], arrays["hi"] = self._lo + ZERO, self._hi + ZERO
        if self.pages is not None:
            pages = np.flatnonzero(self.pages.slots >= 0)
            counts = self.pages.counts[:, self.pages.slots[pages]]
            arrays["pages"], arrays["counts"] = pages.astype(np.int16), counts
        elif self._raw:
            arrays["raw"] = np.sort(np.concatenate(self._raw, axis=1), axis=1) + ZERO
        if len(self._track) and self._lo is not None:
            arrays["track"], arrays["track_lo"], arrays["track_hi"] = self._track.sorted(len(self._lo))
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Sketch:
        """The sketch whose `to_arrays` gave `arrays`.

        Raises:
            ValueError: another version wrote them.
        """
        version, axis, histogram, tracks, seen, binned, *totals = (int(x) for x in arrays["head"])
        if version != FORMAT:
            raise ValueError(f"a sketch of format {version}, where {FORMAT} is read")
        sketch = cls(axis=None if axis < 0 else axis, detail="histogram" if histogram else "range", track=bool(tracks))
        sketch.elements, sketch.nan, sketch.inf, sketch.samples = totals
        if seen:
            sketch._lo, sketch._hi = arrays["lo"], arrays["hi"]
        if binned:
            slots = np.full(PAGES, -1, np.int16)
            slots[arrays["pages"]] = np.arange(len(arrays["pages"]))
            counts = np.array(arrays["counts"], np.int64, order="C")
            sketch.pages = Pages(int(counts.shape[2]).bit_length() - 1, slots, counts)
        elif "raw" in arrays:
            sketch._raw = [np.array(arrays["raw"], np.float32, order="C")]
        if "track" in arrays:
            for (index, row), lo, hi in zip(*(arrays[name].tolist() for name in TRACK), strict=True):
                sketch._track.append(index, row, lo, hi)
        return sketch


__all__ = ["Detail", "Sketch"]
