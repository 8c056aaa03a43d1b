"""Batches of images changed at random, so that few of them go a long way. No labels are needed: the float network
sees what the quantized one sees, and says what is right.

Each takes a batch and where its chance comes from, and gives a new batch; the same chance gives the same batch. What
is changed are inputs of four axes in floating point: images, channels first (N, C, H, W) or last (N, H, W, C). Other
inputs stay as they are, and so does a batch without images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from sbonnx.errors import RecipeError

Batch = dict[str, Tensor]
Augment = Callable[[Batch, torch.Generator], Batch]
"""(a batch, where its chance comes from) → the batch that is trained on; the float network sees the same."""

REACH: Final = 8
"""`shift` moves an image by up to an eighth of its height and width: 4 of 32 pixels, as is usual on CIFAR."""

CHANNELS: Final = (1, 3, 4)
"""How many channels an image has."""


def flip(batch: Batch, chance: torch.Generator) -> Batch:
    """Every second image, by chance, is mirrored: left is right."""
    turned = {}
    which = None
    for name, images in _images(batch).items():
        which = _chances(len(images), chance) < 0.5 if which is None else which
        turned[name] = torch.where(_beside(which, images), images.flip(_axes(images)[1]), images)
    return {**batch, **turned}


def shift(batch: Batch, chance: torch.Generator) -> Batch:
    """Each image is moved by up to an eighth of its size along both axes; what enters mirrors what stands at the edge.

    Source: He et al. 2016, section 4.2, with mirrored edges instead of zeros, which no image has.
    """
    moved = {}
    by = None
    for name, images in _images(batch).items():
        by = 2.0 * torch.rand((len(images), 2), generator=chance) - 1.0 if by is None else by
        found = images
        for axis, parts in zip(_axes(images), by.T, strict=True):
            size = images.shape[axis]
            places = torch.arange(size) - torch.round(parts * (size // REACH)).long()[:, None]
            places = (size - 1) - ((size - 1) - places.abs()).abs()  # mirrored without the edge itself
            found = _taken(found, axis, places.to(images.device))
        moved[name] = found
    return {**batch, **moved}


def mixup(batch: Batch, chance: torch.Generator) -> Batch:
    """Each image is mixed with another of the batch, in parts between none and all of it.

        x_i <- a_i x_i + (1 - a_i) x_j,   a_i uniform in [0, 1]

    Source: Zhang et al. 2018, "mixup", equation 1 with alpha 1.
    """
    mixed = {}
    drawn = None
    for name, images in _images(batch).items():
        drawn = (_order(len(images), chance), _chances(len(images), chance)) if drawn is None else drawn
        parts = _beside(drawn[1], images).to(images.dtype)
        mixed[name] = parts * images + (1.0 - parts) * images[drawn[0].to(images.device)]
    return {**batch, **mixed}


def cutmix(batch: Batch, chance: torch.Generator) -> Batch:
    """In each image a rectangle comes from another image of the batch, of an area between none and all of it.

    Source: Yun et al. 2019, "CutMix", section 3.1 with alpha 1.
    """
    mixed = {}
    drawn = None
    for name, images in _images(batch).items():
        count = len(images)
        if drawn is None:
            drawn = (_order(count, chance), _chances(count, chance), torch.rand((count, 2), generator=chance))
        other, area, centre = drawn
        inside = torch.ones(count, *[1] * (images.ndim - 1), dtype=torch.bool)
        for axis, middle in zip(_axes(images), centre.T, strict=True):
            size = images.shape[axis]
            away = (torch.arange(size) + 0.5 - (middle * size)[:, None]).abs()
            along = away < 0.5 * size * area.sqrt()[:, None]
            inside = inside & along.reshape([count if at == 0 else size if at == axis else 1 for at in range(4)])
        mixed[name] = torch.where(inside.to(images.device), images[other.to(images.device)], images)
    return {**batch, **mixed}


AUGMENTATIONS: Final[dict[str, Augment]] = {"flip": flip, "shift": shift, "cutmix": cutmix, "mixup": mixup}
"""Ways to change images, by name."""


@final
@dataclass(frozen=True)
class Chain:
    """Augmentations one after another.

    Attributes:
        names: of `AUGMENTATIONS`.
    """

    names: tuple[str, ...]

    def __call__(self, batch: Batch, chance: torch.Generator) -> Batch:
        """The batch, changed by each in turn."""
        for name in self.names:
            batch = AUGMENTATIONS[name](batch, chance)
        return batch


def make_augment(wanted: str | Sequence[str]) -> Chain:
    """Augmentations by name, in the order given.

    Args:
        wanted: names of `AUGMENTATIONS`, as a sequence or with commas between: "flip,shift,cutmix".

    Raises:
        RecipeError: there is no such augmentation.
    """
    names = [name.strip() for name in wanted.split(",")] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if name not in AUGMENTATIONS:
            raise RecipeError(f"augment: there is no '{name}'; there are: {', '.join(AUGMENTATIONS)}")
    return Chain(tuple(names))


def names_of(augment: Augment | None) -> list[str] | None:
    """What a checkpoint says of an augmentation: names, none, or None for a function, of which nothing is known."""
    if augment is None:
        return []
    return list(augment.names) if isinstance(augment, Chain) else None


def _images(batch: Batch) -> Batch:
    """The inputs that are images."""
    return {name: value for name, value in batch.items() if value.is_floating_point() and value.ndim == 4}


def _axes(images: Tensor) -> tuple[int, int]:
    """Height and width: behind the channels, unless only the last axis can be that of the channels."""
    last = images.shape[3] in CHANNELS and images.shape[1] not in CHANNELS
    return (1, 2) if last else (2, 3)


def _chances(count: int, chance: torch.Generator) -> Tensor:
    return torch.rand(count, generator=chance)


def _order(count: int, chance: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=chance)


def _beside(values: Tensor, images: Tensor) -> Tensor:
    """One value an image, so that it broadcasts against them."""
    return values.to(images.device).reshape(-1, *[1] * (images.ndim - 1))


def _taken(images: Tensor, axis: int, places: Tensor) -> Tensor:
    """Of each image the rows or columns `places`, (N, size), along `axis`."""
    shape = [places.shape[0] if at == 0 else places.shape[1] if at == axis else 1 for at in range(images.ndim)]
    return torch.gather(images, axis, places.reshape(shape).expand(images.shape))
