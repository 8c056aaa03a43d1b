"""True boxes of one image, and images with theirs, as all readers of annotations give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.readers.media_files import MediaFiles
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import CATEGORIES, PLACEMENT, Categories, ImagePlacement
from sbonnx.spec import Array

NAMED: Final = 3
"""Maximum number of files that a message names."""


@dataclass(frozen=True)
class ImageBoxes:
    """True boxes of one image.

    Attributes:
        where: file, or file and line, for messages.
        categories: classes of the data.
        corners: x1, y1, x2, y2 in pixels of the upright image, or shares of its width and height, (boxes, 4) float64.
        classes: positions in the categories, (boxes,) int64.
        shares: whether `corners` are shares.
        crowd, ignored, areas: as in `sbonnx.metrics.boxes.TrueBoxes`; None: no crowds, none, the areas of the boxes.
        size: height and width of the image according to the annotations; None: unknown.
    """

    where: str
    categories: Categories
    corners: Array
    classes: Array
    shares: bool = False
    crowd: Array | None = None
    ignored: Array | None = None
    areas: Array | None = None
    size: tuple[int, int] | None = None

    def labels(self, placement: ImagePlacement) -> dict[str, Any]:
        """Return the labels of the image by name, boxes in pixels.

        Raises:
            DataError: the image has another size than the annotations say.
        """
        height, width = placement.image
        if self.size not in (None, placement.image):
            assert self.size is not None
            raise DataError(
                f"{self.where}: the image has {height} x {width} pixels (upright, by its EXIF orientation) and the "
                f"annotations are of {self.size[0]} x {self.size[1]}: give the images that were annotated"
            )
        corners = self.corners * (width, height, width, height) if self.shares else self.corners
        none = np.zeros(len(corners), bool)
        return {
            "boxes": corners,
            "classes": self.classes,
            "crowd": none if self.crowd is None else self.crowd,
            "ignored": none if self.ignored is None else self.ignored,
            "areas": (corners[:, 2:] - corners[:, :2]).prod(1) if self.areas is None else self.areas,
            PLACEMENT: placement,
            CATEGORIES: self.categories,
        }


def rows_of(values: Sequence[Sequence[float]]) -> Array:
    """Return boxes as an array (boxes, 4), also of none."""
    return np.array(values, np.float64).reshape(-1, 4)


def numbered(names: Sequence[str], name: str) -> Categories:
    """Return categories with the numbers 0, 1, ..."""
    return Categories(tuple(range(len(names))), tuple(names), name)


def annotated(name: str, boxes: Mapping[Path, ImageBoxes]) -> MediaFiles:
    """Return images with their boxes.

    Raises:
        DataError: there are none, or files are missing.
    """
    if not boxes:
        raise DataError(f"{name} names no images")
    missing = [path for path in boxes if not path.is_file()]
    if missing:
        names = ", ".join(f"'{path}'" for path in missing[:NAMED])
        raise DataError(
            f"{name} names {len(boxes)} images and {len(missing)} are missing, such as {names}: put them there, or "
            "annotate those that are"
        )
    return MediaFiles(name, tuple(boxes), dict(boxes))
