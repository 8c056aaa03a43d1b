"""Batches of tensors from feeds, reshuffled in each epoch and reproducible by the seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from sbonnx.errors import DataError
from sbonnx.spec import Array

Feed = Mapping[str, Tensor]


@final
class Batches:
    """In-memory data set that is split into batches; the order depends only on the seed and the epoch.

    All samples of a batch have the same shapes (texts of different lengths are in different batches). The last batch
    of each shape may be smaller.

    Args:
        feeds: arrays by input name, with the samples along the leading axis. If an input has no leading axis, or one
            of a different length, the whole feed is one sample.
        size: samples per batch.
        seed: seed of the order.

    Raises:
        DataError: there are no samples.
    """

    def __init__(self, feeds: Iterable[Mapping[str, Array]], size: int, seed: int) -> None:
        if size < 1:
            raise ValueError("a batch has one sample at least")
        self._size, self._seed = size, seed
        self._groups: dict[object, list[dict[str, Array]]] = {}
        for feed in feeds:
            for sample in _samples(feed):
                key = tuple((name, value.shape, value.dtype.str) for name, value in sorted(sample.items()))
                self._groups.setdefault(key, []).append(sample)
        if not self._groups:
            raise DataError("there are no data to train on")

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(len(group) for group in self._groups.values())

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return sum(-(-len(group) // self._size) for group in self._groups.values())

    def epoch(self, number: int, device: str | torch.device = "cpu") -> Iterator[dict[str, Tensor]]:
        """Yield the batches of epoch `number`; each sample occurs once."""
        order = np.random.default_rng((self._seed, number))
        found: list[list[Mapping[str, Array]]] = []
        for group in self._groups.values():
            places = order.permutation(len(group))
            found += [
                [group[place] for place in places[first : first + self._size]]
                for first in range(0, len(group), self._size)
            ]
        for at in order.permutation(len(found)):
            yield _joined(found[at], device)


def _samples(feed: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Yield the samples of a feed, each with a leading axis of 1; the feed itself if it cannot be split."""
    arrays = {name: np.asarray(value) for name, value in feed.items()}
    lengths = {value.shape[0] if value.ndim else None for value in arrays.values()}
    count = next(iter(lengths)) if len(lengths) == 1 else None
    if count is None:
        yield arrays
        return
    for at in range(count):
        yield {name: value[at : at + 1] for name, value in arrays.items()}


def _joined(samples: Sequence[Mapping[str, Array]], device: str | torch.device) -> dict[str, Tensor]:
    """Concatenate samples into one batch on the device."""
    if len(samples) == 1:
        return {name: torch.from_numpy(np.array(value)).to(device) for name, value in samples[0].items()}
    return {
        name: torch.from_numpy(np.concatenate([sample[name] for sample in samples])).to(device) for name in samples[0]
    }
