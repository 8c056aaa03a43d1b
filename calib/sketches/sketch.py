"""`Sketch`: mergeable statistics of one tensor."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

from sbonnx.calib.sketches.distribution import Distribution, binned
from sbonnx.calib.sketches.kernels import PAGES, Pages, extremes
from sbonnx.errors import NumericError
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


Detail = Literal["range", "histogram"]

EXACT: Final = 1 << 14
"""Number of values, over all channels, that a sketch keeps exactly before it counts them in bins."""

MANTISSA: Final = 7
"""Leading bits of the mantissa that name a bin, for one range per tensor: bins of at most 1/128 of their value."""

CHANNEL_MANTISSA: Final = 5
"""Leading bits of the mantissa for ranges per channel, of which a tensor has thousands: bins of at most 1/32."""

FORMAT: Final = 1
"""Format version of `Sketch.to_arrays`."""

ZERO: Final = np.float32(0.0)


class Sketch:
    """Minimum, maximum, counts and histogram of a tensor, updated array by array; mergeable, of bounded size.

    The state is integers, exact extremes, and raw values in no order: it depends on the observed values, not on the
    batches, their order, or how sketches of parts were merged. Values are counted in bins named by their leading bits:
    sign, exponent, and 7 bits of the mantissa (5 per channel), so no range is needed beforehand. The first 16,384
    values are kept exactly; a sketch that never sees more is exact.

    Args:
        axis: channel axis of ranges per channel, or None for one range.
        detail: "range": extremes and counts only; "histogram": the histogram too.
        track: keep the extremes of every sample as well, 24 bytes each (per tensor).

    Attributes:
        elements: number of observed values, finite or not.
        nan, inf: number of NaN and infinite values; these affect no other statistic.
        samples: number of observed samples.
    """

    def __init__(self, *, axis: int | None = None, detail: Detail = "histogram", track: bool = False) -> None:
        self.axis = axis
        self.detail: Detail = detail
        self.tracks = track
        self.elements = self.nan = self.inf = self.samples = 0
        self._keep: int | None = EXACT  # number of values to keep raw; None: all
        self._lo: Array | None = None  # float32 (C,), +inf without finite values
        self._hi: Array | None = None
        self._raw: list[Array] = []  # float32 (C, n) each
        self.pages: Pages | None = None  # counts, after values were folded into bins
        self._track = Track()

    @classmethod
    def of(cls, x: Array, axis: int | None = None) -> Sketch:
        """Create the sketch of one constant, exact whatever its size."""
        sketch = cls(axis=axis)
        sketch._keep = None
        sketch.observe(x)
        return sketch

    @property
    def finite(self) -> int:
        """Number of finite values, which all other statistics are of."""
        return self.elements - self.nan - self.inf

    @property
    def lo(self) -> Array:
        """Exact smallest finite value, float32, () or (C,); 0 if there is none."""
        return self._shaped(self._lo)

    @property
    def hi(self) -> Array:
        """Exact largest finite value, float32, () or (C,); 0 if there is none."""
        return self._shaped(self._hi)

    def observe(self, x: Array, index: int = 0, samples: int = 1) -> None:
        """Update the statistics with one array.

        Args:
            x: float16, float32 or float64, any shape that has `axis`.
            index: position of the sample in the data; used only with `track`.
            samples: number of samples in it.

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
        """Merge the statistics of `other`, which is unchanged.

        Raises:
            ValueError: it has another axis or another detail.
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
        """Return the distribution of the finite values.

        Raises:
            ValueError: the sketch has no histogram.
        """
        if self.detail != "histogram":
            raise ValueError("this sketch remembers extremes only")
        lo, hi = (np.atleast_1d(x).astype(np.float64) for x in (self.lo, self.hi))
        if self.pages is not None:
            return binned(self.pages, lo, hi)
        values = np.sort(np.concatenate(self._raw, axis=1), axis=1) + ZERO if self._raw else np.zeros((len(lo), 0))
        values = np.asarray(values, np.float32)
        return Distribution(values, values, np.broadcast_to(np.int64(1), (1, values.shape[1])), lo, hi, exact=True)

    def floored(self, cut: float, floor: float) -> Sketch:
        """Return a copy without infinite values and values below `cut`, in whose place is one value `floor`.

        Of samples that are tracked, `floor` becomes the smallest value.

        No value may be between `cut` and the next one below it by less than the width of a bin.

        Raises:
            ValueError: the sketch has channels.
        """
        if self.axis is not None:
            raise ValueError("this sketch has channels")
        copy = Sketch.from_arrays(self.to_arrays())
        copy._keep, copy.inf = self._keep, 0
        copy._raw = [raw[:, raw[0] >= cut] for raw in copy._raw]
        count = sum(raw.size for raw in copy._raw)
        if copy.pages is not None:
            copy.pages.clear_below(cut)
            count += int(copy.pages.counts.sum())
        copy.elements = copy.nan + count
        copy._lo = None if copy._lo is None else np.maximum(copy._lo, np.float32(floor))
        if self.tracks:
            places, _, high = self._track.sorted(1)
            copy._track = Track()
            for (index, row), hi in zip(places.tolist(), high.tolist(), strict=True):
                copy._track.append(index, row, [floor], hi)
        copy._take(np.full((1, 1), floor, np.float32))
        copy.elements += 1
        return copy

    def track(self) -> tuple[Array, Array]:
        """Return the extremes of every sample in the order of the data: float32 (S,) or (S, C).

        A sample is a slice of the leading axis; one without a finite value is left out.

        Raises:
            ValueError: the sketch does not track samples.
        """
        if not self.tracks:
            raise ValueError("this sketch does not remember samples")
        channels = 1 if self.axis is None else (0 if self._lo is None else len(self._lo))
        _, lo, hi = self._track.sorted(channels)
        return (lo[:, 0], hi[:, 0]) if self.axis is None else (lo, hi)

    def take_summary(self, samples: int, elements: int, lo: Array, hi: Array) -> None:
        """Add finite arrays whose extremes, float32 (C,), and bins (in `pages`) were computed elsewhere.

        Raises:
            NumericError: the channel axis has another length than before.
        """
        self._check_channels(len(lo))
        self.samples += samples
        self.elements += elements
        self._widen(lo, hi)

    def take_track(self, index: int, lo: float, hi: float, row: int = 0) -> None:
        """Add the extremes, computed elsewhere, of the sample in that row of the array at `index`."""
        self._track.append(index, row, [lo], [hi])

    # --- updating -----------------------------------------------------------------------------------

    def _rows(self, x: Array) -> Array:
        """Convert `x` to contiguous float32 (C, values of a channel)."""
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
        if self._lo is not None and len(self._lo) != channels:
            raise NumericError(
                f"axis {self.axis} had {len(self._lo)} channels and now has {channels}; "
                "an axis of changing length needs one range per tensor"
            )

    def _take(self, rows: Array) -> None:
        """Update the statistics with float32 (C, n >= 1), finite or not."""
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
        """Return the counts to restore if rows are not finite: several rows may be counted partly, one row is not."""
        if len(rows) == 1:
            return pages
        return Pages(pages.mantissa, pages.slots.copy(), pages.counts.copy())

    def _take_finite(self, rows: Array) -> None:
        """Update the statistics with the finite values of (C, n); rare, and a run stops there unless tolerant."""
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
        """Add finite values to the histogram; extremes and totals are updated already."""
        if self._raw_fits(rows.size):
            self._raw.append(rows.copy())
        else:
            self._fold()
            self._pages_for(rows).count(np.ascontiguousarray(rows))

    def _raw_fits(self, size: int) -> bool:
        """Return whether `size` more values may be kept exactly."""
        if self.pages is not None:
            return False
        return self._keep is None or sum(raw.size for raw in self._raw) + size <= self._keep

    def _fold(self) -> None:
        raw, self._raw = self._raw, []
        for rows in raw:
            self._pages_for(rows).count(rows)

    def _pages_for(self, rows: Array) -> Pages:
        """Return the counts, created when first needed."""
        if self.pages is None:
            self.pages = Pages.empty(len(rows), MANTISSA if self.axis is None else CHANNEL_MANTISSA)
        return self.pages

    def _widen(self, lo: Array, hi: Array) -> None:
        """Extend the range to include [lo, hi], float32 (C,)."""
        self._lo = lo if self._lo is None else np.minimum(self._lo, lo)
        self._hi = hi if self._hi is None else np.maximum(self._hi, hi)

    def _follow(self, x: Array, index: int) -> None:
        """Track the extremes of each sample of `x`; an array without axes, or of channels only, is one sample."""
        single = x.ndim == 0 or self.axis == 0
        for row, sample in enumerate([x] if single else x):
            alone = Sketch(axis=self.axis if single or self.axis is None else self.axis - 1, detail="range")
            alone.observe(np.asarray(sample))
            if alone._lo is not None and alone._hi is not None and (alone._lo <= alone._hi).all():
                self._track.append(index, row, alone._lo.tolist(), alone._hi.tolist())

    def _shaped(self, values: Array | None) -> Array:
        """Convert extremes for reading: 0 for none, no negative zero (its sign would depend on the order)."""
        if values is None:
            return np.zeros(() if self.axis is None else 0, np.float32)
        fine = np.where(np.isfinite(values), values, ZERO) + ZERO
        return np.asarray(fine[0] if self.axis is None else fine, np.float32)

    # --- serialization ------------------------------------------------------------------------------

    def to_arrays(self) -> dict[str, Array]:
        """Return the state as arrays; equal states give equal arrays."""
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
        """Restore a sketch from the arrays of `to_arrays`.

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
