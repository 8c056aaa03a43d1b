"""Augmentations: what each does to an image, the same again for the same chance, and nothing to what is no image."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from sbonnx.errors import RecipeError
from sbonnx.training.batches import AUGMENTATIONS, cutmix, flip, make_augment, mixup, names_of, shift


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 64, *, last: bool = False, seed: int = 1) -> torch.Tensor:
    """Every value is another, so that each can be found again."""
    shape = (count, 16, 24, 3) if last else (count, 3, 16, 24)
    order = np.random.default_rng(seed).permutation(int(np.prod(shape)))
    return torch.from_numpy(order.reshape(shape).astype(np.float32))


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("last", [False, True])
def test_the_same_chance_gives_the_same_batch(name: str, last: bool) -> None:
    """And a new one: the batch that was given is not written over."""
    x = images(last=last)
    before = x.clone()
    change = AUGMENTATIONS[name]
    one, again, other = (change({"x": x}, chance(seed))["x"] for seed in (0, 0, 1))
    assert torch.equal(x, before)
    assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(one, x)
    assert one.shape == x.shape and one.dtype == x.dtype


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_both_layouts_alike(name: str) -> None:
    x = images()
    first = AUGMENTATIONS[name]({"x": x}, chance())["x"]
    last = AUGMENTATIONS[name]({"x": x.permute(0, 2, 3, 1)}, chance())["x"]
    assert torch.equal(first, last.permute(0, 3, 1, 2))


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_what_is_no_image_stays(name: str) -> None:
    batch = {
        "ids": torch.arange(12).reshape(4, 3),
        "state": torch.randn(4, 2, 5),
        "mask": torch.ones(4, 1, 8, 8).long(),
    }
    made = AUGMENTATIONS[name](dict(batch), chance())
    assert made.keys() == batch.keys() and all(made[key] is batch[key] for key in batch)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_images_of_one_sample_change_together(name: str) -> None:
    """A network with two images a sample: what happens to one happens to the other."""
    x = images()
    made = AUGMENTATIONS[name]({"left": x, "right": x.clone()}, chance())
    assert torch.equal(made["left"], made["right"])


def test_flip() -> None:
    x = images(400).numpy()
    made = flip({"x": torch.from_numpy(x)}, chance())["x"].numpy()
    turned = (made == np.flip(x, 3)).all((1, 2, 3))
    assert ((made == x).all((1, 2, 3)) ^ turned).all()
    assert 140 < turned.sum() < 260


def test_shift_is_padding_and_cutting() -> None:
    """Against numpy's own mirrored padding: every image is one of its windows, and all windows occur."""
    x = images(800).numpy()
    made = shift({"x": torch.from_numpy(x)}, chance())["x"].numpy()
    wide = np.pad(x, ((0, 0), (0, 0), (2, 2), (3, 3)), mode="reflect")
    windows = np.stack([wide[:, :, top : top + 16, left : left + 24] for top in range(5) for left in range(7)])
    found = (windows == made).all((2, 3, 4))
    assert (found.sum(0) == 1).all()
    assert found.any(1).all()


def test_mixup_is_a_line_between_two() -> None:
    """Every image lies between itself and one other, and each is the other of one."""
    x = torch.randn(32, 3, 8, 8, generator=chance(5), dtype=torch.float64)
    made = mixup({"x": x}, chance())["x"]
    flat, given = made.flatten(1).numpy(), x.flatten(1).numpy()
    others, parts = [], []
    for at in range(32):
        errors = []
        for other in range(32):
            line = given[at] - given[other]
            part = 1.0 if other == at else float(np.dot(flat[at] - given[other], line) / np.dot(line, line))
            errors.append((float(np.abs(given[other] + part * line - flat[at]).max()), part, other))
        error, part, other = min(errors)
        assert error < 1e-6 and -1e-6 <= part <= 1 + 1e-6
        others.append(other)
        parts.append(part)
    mixed = [other for at, other in enumerate(others) if other != at]
    assert len(set(mixed)) == len(mixed) and len(mixed) > 24
    assert min(parts) < 0.2 and max(parts) > 0.8


def test_cutmix_is_a_rectangle_of_another() -> None:
    x = images(200).numpy()
    made = cutmix({"x": torch.from_numpy(x)}, chance())["x"].numpy()
    areas = []
    for at in range(200):
        outside = (made[at] != x[at]).any(0)
        if not outside.any():
            continue
        rows, columns = np.flatnonzero(outside.any(1)), np.flatnonzero(outside.any(0))
        box = np.ix_(range(3), range(rows[0], rows[-1] + 1), range(columns[0], columns[-1] + 1))
        assert outside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert sum(np.array_equal(made[at][box], x[other][box]) for other in range(200)) == 1
        areas.append(outside.mean())
    assert len(areas) > 150 and min(areas) < 0.05 and max(areas) > 0.6


def test_names() -> None:
    x = images()
    made = make_augment("flip, shift,mixup")
    expected = {"x": x}
    draw = chance(3)
    for change in (flip, shift, mixup):
        expected = change(expected, draw)
    assert torch.equal(made({"x": x}, chance(3))["x"], expected["x"])
    assert names_of(made) == ["flip", "shift", "mixup"] and names_of(None) == [] and names_of(flip) is None
    with pytest.raises(RecipeError, match="augment: there is no 'rotate'; there are: flip, shift, cutmix, mixup"):
        make_augment(["rotate"])
