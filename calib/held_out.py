"""Hold-out set: samples excluded from calibration, on which the quantized file is verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sbonnx.calib.data import Feed, Source
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.samples import Samples
from sbonnx.graph.digests import array_digests, combined

MOST: Final = 64
"""Maximum number of held-out samples: the precision of a figure depends on their number, not on their share."""

FEWEST: Final = 32
"""Minimum number of samples for a hold-out set: below it calibration needs all. `LEAST` of 32 cost 0.1 to 0.7 dB on an
evaluation set, of 16 up to 3.6 dB (ResNet-20, MobileNetV2)."""

LEAST: Final = 6
"""Minimum number of held-out samples: fewer prove nothing."""

FEWEST_STEPS: Final = 64
"""Minimum number of steps of all sequences of a recurrent model for a hold-out set."""

FEWEST_SEQUENCES: Final = 8
"""Minimum number of sequences of a recurrent model for a hold-out set; at least one is held out then."""

LARGE: Final = 64 << 20
"""Bytes of a feed above which its remaining rows are yielded as contiguous views instead of one copy."""


@dataclass(frozen=True)
class HeldOutSplit:
    """Split of a data set into calibration samples and hold-out samples.

    Attributes:
        every: the whole data set.
        fit: calibration samples, and how they are run.
        held: hold-out samples, for verification; None if nothing is held out.
        seen: about as many samples of `fit` as `held` has, for comparison; None if nothing is held out.
        count: number of hold-out samples.
    """

    every: Dataset
    fit: Samples
    held: Dataset | None = None
    seen: Dataset | None = None
    count: int = 0

    @classmethod
    def whole(cls, samples: Samples) -> HeldOutSplit:
        """Return the split of which nothing is held out."""
        return cls(samples.data, samples)

    @property
    def judged(self) -> Dataset:
        """The samples to verify on."""
        return self.every if self.held is None else self.held


def divide(samples: Samples, share: float) -> HeldOutSplit:
    """Hold out a share of the samples: those whose contents have the smallest digests.

    The choice depends only on the set of samples, not on their order or batching, if the model treats the rows of a
    batch independently; else whole feeds are held out. Samples with the same content are held out together and count
    once, so that none is in both parts. Reads the data once.

    Args:
        samples: of the float model.
        share: of the samples, 0 to below 1; at least `LEAST`, at most `MOST`, and none of fewer than `FEWEST`.

    Raises:
        DataError: a feed cannot be read or does not fit the model.
    """
    rows = list(_rows(samples)) if share else []
    digests = sorted({row.digest for row in rows})
    count = min(MOST, max(LEAST, int(share * len(digests))))
    if len(digests) < FEWEST:
        return HeldOutSplit.whole(samples)
    data = samples.data
    held = _rows_by_feed(rows, digests[:count])
    seen = _rows_by_feed(rows, digests[count : 2 * count])
    sizes = Counter(row.feed for row in rows)
    emptied = frozenset(place for place, places in held.items() if len(places) == sizes[place])
    sums: Counter[int] = Counter()
    for row in rows:
        sums[row.feed] += row.bytes
    large = any(sums[place] > LARGE for place in held)
    rest = _dataset(data, lambda: _without(data, held, emptied), None if large else len(sizes) - len(emptied))
    return HeldOutSplit(
        every=data,
        fit=replace(samples, data=rest),
        held=_dataset(data, lambda: _only(data, held), len(held)),
        seen=_dataset(data, lambda: _only(data, seen), len(seen)),
        count=sum(map(len, held.values())),
    )


def divide_sequences(
    samples: Samples, states: Collection[str], share: float, unrolled: Callable[[Dataset | Source, float], Dataset]
) -> HeldOutSplit:
    """Hold out whole sequences of a recurrent model, because the steps of one sequence resemble each other.

    As in `divide`, sequences with the smallest digests are held out and equal ones count once. At least one sequence is
    held out if there are `FEWEST_SEQUENCES` or more with `FEWEST_STEPS` steps in all. Reads the data once.

    Args:
        samples: feeds in order, without states; a feed that has any of `states` begins a sequence.
        states: inputs that take the state.
        share: of the sequences, 0 to below 1; at most `MOST`.
        unrolled: adds the states to the steps of whole sequences; its second argument is the share of the selected
            steps that falls to these sequences.

    Raises:
        DataError: a feed cannot be read or does not fit the model.
    """
    steps = samples.data
    whole = HeldOutSplit.whole(replace(samples, data=unrolled(steps, 1.0)))
    if not share:
        return whole
    sequences: list[list[int]] = []
    parts: list[list[bytes]] = []
    for place, (_, feed) in enumerate(steps.items()):
        if not sequences or not feed.keys().isdisjoint(states):
            sequences.append([])
            parts.append([])
        sequences[-1].append(place)
        parts[-1].append(_digest(feed))
    by_digest: dict[bytes, list[int]] = {}
    for places, part in zip(sequences, parts, strict=True):
        by_digest.setdefault(combined("held out", *part), []).extend(places)
    if len(by_digest) < FEWEST_SEQUENCES or sum(map(len, sequences)) < FEWEST_STEPS:
        return whole
    digests = sorted(by_digest)
    count = min(MOST, max(1, int(share * len(digests))))
    held, seen, rest = (
        sorted(place for digest in some for place in by_digest[digest])
        for some in (digests[:count], digests[count : 2 * count], digests[count:])
    )

    def only(places: list[int], picked: float) -> Dataset:
        return unrolled(Source(steps.name, lambda: steps.at(places), len(places)), picked)

    picked = count / len(digests)
    verified = only(held, picked)
    fit = replace(samples, data=only(rest, 1.0 - picked))
    return HeldOutSplit(whole.every, fit, verified, only(seen, picked), count=len(verified))


@dataclass(frozen=True)
class _Row:
    """A row of a feed, or a whole feed.

    Attributes:
        digest: of its names, types, shapes and values.
        feed: position of the feed.
        row: None for a whole feed.
        bytes: size of its values.
    """

    digest: bytes
    feed: int
    row: int | None
    bytes: int


RowsByFeed = Mapping[int, Sequence[int | None]]
"""Row numbers by the position of the feed, ascending."""


def _rows(samples: Samples) -> Iterator[_Row]:
    feed = row = 0
    for unit in samples.units():
        digest = _digest(unit.feed)
        size = sum(int(values.nbytes) for values in unit.feed.values())
        yield _Row(digest, feed, None if unit.closes and row == 0 else row, size)
        feed, row = (feed + 1, 0) if unit.closes else (feed, row + 1)


def _digest(feed: Feed) -> bytes:
    names = sorted(feed)
    return combined("held out", *(name.encode() for name in names), *array_digests(feed[name] for name in names))


def _rows_by_feed(rows: Iterable[_Row], digests: Iterable[bytes]) -> RowsByFeed:
    wanted = frozenset(digests)
    places: dict[int, list[int | None]] = {}
    for row in rows:
        if row.digest in wanted:
            places.setdefault(row.feed, []).append(row.row)
    return places


def _dataset(data: Dataset, walk: Callable[[], Iterator[tuple[str, Feed]]], count: int | None) -> Dataset:
    return datasets.read(Source(data.name, walk, count), data.inputs)


def _only(data: Dataset, rows: RowsByFeed) -> Iterator[tuple[str, Feed]]:
    for place, (where, feed) in zip(rows, data.at(list(rows)), strict=True):
        if rows[place] == [None]:
            yield where, feed
        else:
            chosen = np.asarray(rows[place])
            yield f"samples {', '.join(map(str, chosen))} of {where}", {name: x[chosen] for name, x in feed.items()}


def _without(data: Dataset, held: RowsByFeed, emptied: frozenset[int]) -> Iterator[tuple[str, Feed]]:
    """Yield all feeds except the `emptied` ones, without the held-out rows."""
    for place, (where, feed) in enumerate(data.items()):
        if place in emptied:
            continue
        if place not in held:
            yield where, feed
            continue
        rows = [row for row in held[place] if row is not None]
        if sum(values.nbytes for values in feed.values()) > LARGE:
            yield from _runs(where, feed, rows)
        else:
            thinned = {name: np.delete(values, rows, axis=0) for name, values in feed.items()}
            yield f"{where} (without the {len(rows)} samples held out)", thinned


def _runs(where: str, feed: Feed, held: Sequence[int]) -> Iterator[tuple[str, Feed]]:
    """Yield the runs of rows between the held-out rows, as views."""
    ends = [*held, len(next(iter(feed.values())))]
    for begin, end in zip([0, *(row + 1 for row in held)], ends, strict=True):
        if begin < end:
            yield f"samples {begin} to {end - 1} of {where}", {name: x[begin:end] for name, x in feed.items()}
