"""A digest of what calibration sees of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sbonnx.calib.data.dataset import Dataset
from sbonnx.graph.digests import array_digests, combined, text
from sbonnx.spec import Array


def data_digest(dataset: Dataset) -> str:
    """A digest of every feed in order: names, types, shapes and bytes, after splitting, limit and conversion.

    Files are read and checked as for a run, one feed at a time, and digested by a few threads meanwhile. What they
    are called, when they were written and in which form (.npz, .npy, a list in memory) does not count. Sizes and
    times of files would be read faster, and agree where a preprocessing was repeated with other constants into files
    whose times something set (archives and images of containers do): statistics of other data would be taken for
    those of this data.

    Measured: 77 MB in 128 feeds: 16 ms in memory; from files, the time of reading them.

    Raises:
        DataError: a feed cannot be read or does not fit the model.
    """
    names: list[list[str]] = []

    def arrays() -> Iterator[Array]:
        for feed in dataset:
            names.append(sorted(feed))
            yield from (feed[name] for name in names[-1])

    digests = iter(list(array_digests(arrays())))  # all of them first: that fills in the names
    feeds = []
    for own in names:
        parts = zip(own, islice(digests, len(own)), strict=True)
        feeds.append(combined("feed", *(part for name, digest in parts for part in (name.encode(), digest))))
    return text(combined("data", *feeds))


__all__ = ["data_digest"]
