"""Digest of the calibration data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sbonnx.calib.data.dataset import Dataset
from sbonnx.graph.digests import array_digests, combined, text
from sbonnx.spec import Array


def data_digest(dataset: Dataset) -> str:
    """Compute a digest of every feed in order: names, types, shapes and bytes, after splitting, limit and conversion.

    Files are read and checked as for a run, one feed at a time, while a few threads compute the digests. File names,
    modification times and formats (.npz, .npy, a list in memory) do not matter. Sizes and times of files would be
    faster to read, but they can be equal for different data: when preprocessing is repeated with other constants and
    the file times are set by a tool (as archives and container images do). The cache would then return statistics of
    other data.

    Measured: 77 MB in 128 feeds: 16 ms in memory; from files, the time of reading them.

    Raises:
        DataError: a feed cannot be read or does not fit the model.
    """
    names: list[list[str]] = []

    def arrays() -> Iterator[Array]:
        for feed in dataset:
            names.append(sorted(feed))
            yield from (feed[name] for name in names[-1])

    digests = iter(list(array_digests(arrays())))  # computed first, because that fills in the names
    feeds = []
    for own in names:
        parts = zip(own, islice(digests, len(own)), strict=True)
        feeds.append(combined("feed", *(part for name, digest in parts for part in (name.encode(), digest))))
    return text(combined("data", *feeds))
