"""Batches of tensors from feeds, reshuffled in each epoch and reproducible by the seed; augmentation of image batches.

No labels are needed for augmentation: the float network gets the same augmented batch, and its outputs are the targets.
Each augmentation takes a batch and a random generator, and returns a new batch; the same generator state gives the same
batch. Only images are changed, i.e. floating-point inputs with four axes, channels first (N, C, H, W) or last
(N, H, W, C). Other inputs stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from sbonnx.errors import DataError, RecipeError
from sbonnx.spec import Array

Batch = dict[str, Tensor]
Augment = Callable[[Batch, torch.Generator], Batch]
"""(batch, random generator) → augmented batch, which both the trained and the float network get."""

REACH: Final = 8
"""Reciprocal of the largest relative shift: `shift` moves an image by up to an eighth of its height and width (4 of 32
pixels, as is usual for CIFAR)."""

CHANNELS: Final = (1, 3, 4)
"""Possible numbers of channels of an image."""


def flip(batch: Batch, chance: torch.Generator) -> Batch:
    """Flip each image horizontally with probability 1/2."""

    def change(images: Tensor, which: Tensor) -> Tensor:
        return torch.where(_per_image(which, images), images.flip(_axes(images)[1]), images)

    return _changed(batch, lambda count: torch.rand(count, generator=chance) < 0.5, change)


def shift(batch: Batch, chance: torch.Generator) -> Batch:
    """Shift each image by up to an eighth of its size along both axes, with reflection padding.

    Source: He et al. 2016, section 4.2, with reflection padding instead of zeros, which do not look like an image.
    """

    def change(images: Tensor, by: Tensor) -> Tensor:
        shifted = images
        for axis, parts in zip(_axes(images), by.T, strict=True):
            size = images.shape[axis]
            places = torch.arange(size) - torch.round(parts * (size // REACH)).long()[:, None]
            places = (size - 1) - ((size - 1) - places.abs()).abs()  # reflection without repeating the edge
            layout = [len(images) if at == 0 else size if at == axis else 1 for at in range(4)]
            shifted = torch.gather(shifted, axis, places.to(images.device).reshape(layout).expand(images.shape))
        return shifted

    return _changed(batch, lambda count: 2.0 * torch.rand((count, 2), generator=chance) - 1.0, change)


def mixup(batch: Batch, chance: torch.Generator) -> Batch:
    """Mix each image with another image of the batch (mixup).

        x_i <- a_i x_i + (1 - a_i) x_j,   a_i uniform in [0, 1]

    Source: Zhang et al. 2018, "mixup", equation 1 with alpha 1.
    """

    def change(images: Tensor, drawn: tuple[Tensor, Tensor]) -> Tensor:
        parts = _per_image(drawn[1], images).to(images.dtype)
        return parts * images + (1.0 - parts) * images[drawn[0].to(images.device)]

    return _changed(
        batch, lambda count: (torch.randperm(count, generator=chance), torch.rand(count, generator=chance)), change
    )


def cutmix(batch: Batch, chance: torch.Generator) -> Batch:
    """Replace a rectangle of each image by that of another image of the batch; its relative area is random in [0, 1].

    Source: Yun et al. 2019, "CutMix", section 3.1 with alpha 1.
    """

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        other, area = torch.randperm(count, generator=chance), torch.rand(count, generator=chance)
        return other, area, torch.rand((count, 2), generator=chance)

    def change(images: Tensor, drawn: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        count, (other, area, centre) = len(images), drawn
        inside = torch.ones(count, *[1] * (images.ndim - 1), dtype=torch.bool)
        for axis, middle in zip(_axes(images), centre.T, strict=True):
            size = images.shape[axis]
            away = (torch.arange(size) + 0.5 - (middle * size)[:, None]).abs()
            along = away < 0.5 * size * area.sqrt()[:, None]
            inside = inside & along.reshape([count if at == 0 else size if at == axis else 1 for at in range(4)])
        return torch.where(inside.to(images.device), images[other.to(images.device)], images)

    return _changed(batch, draw, change)


AUGMENTATIONS: Final[dict[str, Augment]] = {"flip": flip, "shift": shift, "cutmix": cutmix, "mixup": mixup}
"""Augmentations by name."""


@final
@dataclass(frozen=True)
class Chain:
    """Composition of augmentations, applied in order.

    Attributes:
        names: keys of `AUGMENTATIONS`.
    """

    names: tuple[str, ...]

    def __call__(self, batch: Batch, chance: torch.Generator) -> Batch:
        """Apply all augmentations to the batch, in order."""
        for name in self.names:
            batch = AUGMENTATIONS[name](batch, chance)
        return batch


def make_augment(wanted: str | Sequence[str]) -> Chain:
    """Create a chain of augmentations from their names, in the given order.

    Args:
        wanted: keys of `AUGMENTATIONS`, as a sequence or separated by commas: "flip,shift,cutmix".

    Raises:
        RecipeError: there is no such augmentation.
    """
    names = [name.strip() for name in wanted.split(",")] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if name not in AUGMENTATIONS:
            raise RecipeError(f"augment: there is no '{name}'; there are: {', '.join(AUGMENTATIONS)}")
    return Chain(tuple(names))


def names_of(augment: Augment | None) -> list[str] | None:
    """Return the names of the augmentations for a checkpoint: [] without augmentation, None for a user's function."""
    if augment is None:
        return []
    return list(augment.names) if isinstance(augment, Chain) else None


def _changed(batch: Batch, draw: Callable[[int], Any], change: Callable[[Tensor, Any], Tensor]) -> Batch:
    """Apply `change` to each input with images; all get the same random numbers, `draw` of the number of images."""
    images = {name: value for name, value in batch.items() if value.is_floating_point() and value.ndim == 4}
    drawn = draw(len(next(iter(images.values())))) if images else None
    return {**batch, **{name: change(value, drawn) for name, value in images.items()}}


def _axes(images: Tensor) -> tuple[int, int]:
    """Return the axes of height and width; channels are first unless only the last axis has a size of `CHANNELS`."""
    last = images.shape[3] in CHANNELS and images.shape[1] not in CHANNELS
    return (1, 2) if last else (2, 3)


def _per_image(values: Tensor, images: Tensor) -> Tensor:
    return values.to(images.device).reshape(-1, *[1] * (images.ndim - 1))


@final
class ShuffledBatches:
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
            raise ValueError(f"size must be 1 or more, got {size}")
        self._size, self._seed = size, seed
        self._groups: dict[object, list[dict[str, Array]]] = {}
        for feed in feeds:
            for sample in _samples(feed):
                key = tuple((name, value.shape, value.dtype.str) for name, value in sorted(sample.items()))
                self._groups.setdefault(key, []).append(sample)
        if not self._groups:
            raise DataError("there are no samples to train on")

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
        batches: list[list[Mapping[str, Array]]] = []
        for group in self._groups.values():
            places = order.permutation(len(group))
            batches += [
                [group[place] for place in places[first : first + self._size]]
                for first in range(0, len(group), self._size)
            ]
        for at in order.permutation(len(batches)):
            yield _joined(batches[at], device)


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
    if len(samples) == 1:
        return {name: torch.from_numpy(np.array(value)).to(device) for name, value in samples[0].items()}
    return {
        name: torch.from_numpy(np.concatenate([sample[name] for sample in samples])).to(device) for name in samples[0]
    }
