"""Generated pictures of shapes, with classes, boxes and masks, for the examples with images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

NAMES: Final = ("disc", "square", "triangle", "cross", "ring", "bar")


@dataclass(frozen=True)
class Scenes:
    """Pictures and their labels.

    Attributes:
        images: uint8, (N, size, size, 3), RGB.
        masks: class number + 1 of each pixel, 0 for the background; int64, (N, size, size).
        boxes: x1, y1, x2, y2 in pixels; float32, (N, most, 4), zeros where there is no shape.
        classes: class numbers, -1 where there is no shape; int64, (N, most).
    """

    images: NDArray[np.uint8]
    masks: NDArray[np.int64]
    boxes: NDArray[np.float32]
    classes: NDArray[np.int64]


def inside(name: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which coordinates, relative to centre and radius, lie in a shape."""
    if name == "disc":
        return x**2 + y**2 < 0.8
    if name == "square":
        return (abs(x) < 0.75) & (abs(y) < 0.75)
    if name == "triangle":
        return (y < 0.75) & (abs(x) < (y + 0.9) * 0.6)
    if name == "cross":
        return ((abs(x) < 0.28) | (abs(y) < 0.28)) & (abs(x) < 0.9) & (abs(y) < 0.9)
    if name == "ring":
        return (x**2 + y**2 < 0.9) & (x**2 + y**2 > 0.35)
    return (abs(x) < 0.95) & (abs(y) < 0.3)


def draw(count: int, size: int = 32, most: int = 1, seed: int = 0) -> Scenes:
    """Draw pictures with one to `most` rotated shapes on noisy gradients.

    Args:
        count: number of pictures.
        size: height and width.
        most: maximum number of shapes of a picture; later ones may cover earlier ones.
        seed: of the random numbers.
    """
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:size, :size]
    images = np.zeros((count, size, size, 3), np.uint8)
    masks = np.zeros((count, size, size), np.int64)
    boxes = np.zeros((count, most, 4), np.float32)
    classes = np.full((count, most), -1, np.int64)
    for at in range(count):
        ramp = (rows * random.normal() + columns * random.normal())[..., None] / size
        pixels = random.uniform(60, 160, 3) + 25 * ramp + random.normal(0, 12, (size, size, 3))
        for place in range(random.integers(1, most + 1)):
            kind = random.integers(len(NAMES))
            radius = size * (random.uniform(0.22, 0.4) if most == 1 else random.uniform(0.14, 0.24))
            centre_x, centre_y = random.uniform(radius, size - radius, 2)
            angle = random.uniform(-0.35, 0.35)
            dx, dy = (columns - centre_x) / radius, (rows - centre_y) / radius
            covered = inside(
                NAMES[kind], dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
            )
            pixels[covered] += random.choice([-1, 1], 3) * random.uniform(25, 70, 3)
            masks[at][covered] = kind + 1
            ys, xs = np.nonzero(covered)
            boxes[at, place] = xs.min(), ys.min(), xs.max() + 1, ys.max() + 1
            classes[at, place] = kind
        images[at] = pixels.clip(0, 255)
    return Scenes(images, masks, boxes, classes)
