"""Feeds as batches of tensors: drawn anew each epoch, the same ones for the same seed."""

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
    """Samples held in memory, and batches of them in an order that depends on the seed and the epoch alone.

    Samples of different shapes (texts of different lengths) never meet in a batch. The last batch of an epoch may be
    smaller.

    Args:
        feeds: arrays by input name, each with its samples along the leading axis; an input without one, or of another
            length than the others, makes its whole feed one batch.
        size: samples a batch.
        seed: of the order.

    Raises:
        DataError: there are none.
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
        """How many there are."""
        return sum(len(group) for group in self._groups.values())

    def __len__(self) -> int:
        """Batches of an epoch."""
        return sum(-(-len(group) // self._size) for group in self._groups.values())

    def epoch(self, number: int, device: str | torch.device = "cpu") -> Iterator[dict[str, Tensor]]:
        """All samples once, in the order of epoch `number`."""
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
    """The samples of a feed, each with a leading axis of 1; the feed itself where it cannot be cut."""
    arrays = {name: np.asarray(value) for name, value in feed.items()}
    lengths = {value.shape[0] if value.ndim else None for value in arrays.values()}
    count = next(iter(lengths)) if len(lengths) == 1 else None
    if count is None:
        yield arrays
        return
    for at in range(count):
        yield {name: value[at : at + 1] for name, value in arrays.items()}


def _joined(samples: Sequence[Mapping[str, Array]], device: str | torch.device) -> dict[str, Tensor]:
    """One feed of them."""
    if len(samples) == 1:
        return {name: torch.from_numpy(np.array(value)).to(device) for name, value in samples[0].items()}
    return {
        name: torch.from_numpy(np.concatenate([sample[name] for sample in samples])).to(device) for name in samples[0]
    }
