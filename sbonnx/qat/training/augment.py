"""Data augmentation of image batches, for training with few samples. No labels are needed: the float network gets the
same augmented batch, and its outputs are the targets.

Each augmentation takes a batch and a random generator, and returns a new batch; the same generator state gives the
same batch. Only images are changed, i.e. floating-point inputs with four axes, channels first (N, C, H, W) or last
(N, H, W, C). Other inputs stay unchanged.
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
"""(batch, random generator) → augmented batch, which both the trained and the float network get."""

REACH: Final = 8
"""Reciprocal of the largest relative shift: `shift` moves an image by up to an eighth of its height and width (4 of 32
pixels, as is usual for CIFAR)."""

CHANNELS: Final = (1, 3, 4)
"""Possible numbers of channels of an image."""


def flip(batch: Batch, chance: torch.Generator) -> Batch:
    """Flip each image horizontally with probability 1/2."""
    turned = {}
    which = None
    for name, images in _images(batch).items():
        which = _chances(len(images), chance) < 0.5 if which is None else which
        turned[name] = torch.where(_beside(which, images), images.flip(_axes(images)[1]), images)
    return {**batch, **turned}


def shift(batch: Batch, chance: torch.Generator) -> Batch:
    """Shift each image by up to an eighth of its size along both axes, with reflection padding.

    Source: He et al. 2016, section 4.2, with reflection padding instead of zeros, which do not look like an image.
    """
    moved = {}
    by = None
    for name, images in _images(batch).items():
        by = 2.0 * torch.rand((len(images), 2), generator=chance) - 1.0 if by is None else by
        found = images
        for axis, parts in zip(_axes(images), by.T, strict=True):
            size = images.shape[axis]
            places = torch.arange(size) - torch.round(parts * (size // REACH)).long()[:, None]
            places = (size - 1) - ((size - 1) - places.abs()).abs()  # reflection without repeating the edge
            found = _taken(found, axis, places.to(images.device))
        moved[name] = found
    return {**batch, **moved}


def mixup(batch: Batch, chance: torch.Generator) -> Batch:
    """Mix each image with another image of the batch (mixup).

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
    """Replace a rectangle of each image by that of another image of the batch; its relative area is random in [0, 1].

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


def _images(batch: Batch) -> Batch:
    """Return the inputs that are images."""
    return {name: value for name, value in batch.items() if value.is_floating_point() and value.ndim == 4}


def _axes(images: Tensor) -> tuple[int, int]:
    """Return the axes of height and width; channels are first unless only the last axis has a size of `CHANNELS`."""
    last = images.shape[3] in CHANNELS and images.shape[1] not in CHANNELS
    return (1, 2) if last else (2, 3)


def _chances(count: int, chance: torch.Generator) -> Tensor:
    return torch.rand(count, generator=chance)


def _order(count: int, chance: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=chance)


def _beside(values: Tensor, images: Tensor) -> Tensor:
    """Reshape one value per image so that it broadcasts against the images."""
    return values.to(images.device).reshape(-1, *[1] * (images.ndim - 1))


def _taken(images: Tensor, axis: int, places: Tensor) -> Tensor:
    """Gather the rows or columns `places` (N, size) of each image along `axis`."""
    shape = [places.shape[0] if at == 0 else places.shape[1] if at == axis else 1 for at in range(images.ndim)]
    return torch.gather(images, axis, places.reshape(shape).expand(images.shape))
