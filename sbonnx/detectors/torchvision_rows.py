"""Raw outputs of torchvision's FCOS and RetinaNet: rows for all cells of all levels, decoded with their anchors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from sbonnx.detectors.box_selection import Decoded, corners_of
from sbonnx.detectors.head import Head
from sbonnx.detectors.level_maps import around, of_levels, shares_of
from sbonnx.detectors.levels import FCOS_ROWS, FPN, RETINA_ANCHORS, RETINA_ROWS, rows_of_levels
from sbonnx.detectors.outputs import DetectorOutputs
from sbonnx.detectors.recognize import unfit
from sbonnx.errors import DataError
from sbonnx.spec import Array

ASPECT_RATIOS: Final = (0.5, 1.0, 2.0)
"""Height over width of the anchors of RetinaNet."""

SMALLEST_ANCHOR: Final = 4
"""Smallest of the three sizes of a level of RetinaNet, in strides."""

LARGEST_GROWTH: Final = math.log(1000 / 16)
"""Largest logarithm of the factor of a side (BoxCoder.bbox_xform_clip)."""


def fcos_rows(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode rows of classes, distances and centerness.

    Source: torchvision models/detection/fcos.py, postprocess_detections, and _utils.py, BoxLinearCoder: distances in
    sizes of the anchor, which is as large as the stride; the score is the root of class and centerness.
    """
    names = rows_of_levels(outputs, FCOS_ROWS, 1)
    if names is None:
        raise DataError(unfit(outputs, head))
    points = np.concatenate([points_of(outputs.size, stride) for stride in FPN])
    sizes = np.concatenate([np.full((len(points_of(outputs.size, stride)), 1), float(stride)) for stride in FPN])
    class_scores, centerness = (
        shares_of(outputs, names[key], outputs.arrays[names[key]]) for key in ("scores", "centerness")
    )
    corners = around(points, outputs.arrays[names["distances"]].astype(np.float64) * sizes)
    return of_levels([_inside(corners, outputs)], [np.sqrt(class_scores * centerness)], head)


def retinanet(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode rows of classes and offsets to anchors.

    Source: torchvision models/detection/retinanet.py, postprocess_detections, and _utils.py, BoxCoder with weights 1.
    """
    names = rows_of_levels(outputs, RETINA_ROWS, RETINA_ANCHORS)
    if names is None:
        raise DataError(unfit(outputs, head))
    anchors = np.concatenate(list(_anchors(outputs.size)))
    offsets = outputs.arrays[names["distances"]].astype(np.float64)
    sides = anchors[:, 2:] - anchors[:, :2]
    centers = anchors[:, :2] + sides / 2 + offsets[..., :2] * sides
    grown = np.exp(np.minimum(offsets[..., 2:], LARGEST_GROWTH)) * sides
    corners = corners_of(np.concatenate([centers, grown], 2))
    scores = shares_of(outputs, names["scores"], outputs.arrays[names["scores"]])
    return of_levels([_inside(corners, outputs)], [scores], head)


def points_of(size: tuple[int, int], stride: int) -> Array:
    """Return x, y of the corners of the cells of a level, in pixels, shape (cells, 2).

    The distance of points is that of torchvision's AnchorGenerator, the size of the input // the number of cells, which
    is less than the stride if the level is padded.
    """
    rows, columns = (-(-side // stride) for side in size)
    x, y = np.meshgrid(np.arange(columns) * (size[1] // columns), np.arange(rows) * (size[0] // rows))
    return np.stack([x.ravel(), y.ravel()], 1).astype(np.float64)


def _anchors(size: tuple[int, int]) -> Iterator[Array]:
    """Yield the anchors of each level, (cells * 9, 4) of x1, y1, x2, y2: at each cell all shapes, of each all sizes."""
    heights = np.sqrt(np.array(ASPECT_RATIOS, np.float32))
    for stride in FPN:
        smallest = SMALLEST_ANCHOR * stride
        sizes = np.array([smallest, int(smallest * 2 ** (1 / 3)), int(smallest * 2 ** (2 / 3))], np.float32)
        sides: Array = np.stack([np.outer(1 / heights, sizes).ravel(), np.outer(heights, sizes).ravel()], 1)
        shapes = np.round(np.concatenate([-sides, sides], 1) / 2).astype(np.float64)
        yield (np.tile(points_of(size, stride), 2)[:, None] + shapes).reshape(-1, 4)


def _inside(corners: Array, outputs: DetectorOutputs) -> Array:
    """Return boxes that end at the border of the input."""
    clipped: Array = np.clip(corners, 0, np.tile(outputs.size[::-1], 2))
    return clipped
