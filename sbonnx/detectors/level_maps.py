"""Decoders of detectors that give distances or sizes at the cells of each level, without anchors of several sizes."""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.detectors.box_selection import Decoded, best_of, corners_of, multi_label, sigmoid, softmax
from sbonnx.detectors.head import Head
from sbonnx.detectors.head_structure import BOX_SIDES, columns_of_scores, ends_in
from sbonnx.detectors.levels import LEVELS, levels_of
from sbonnx.detectors.outputs import DetectorOutputs, fitting_strides
from sbonnx.detectors.recognize import centerface_maps, unfit
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import Boxes
from sbonnx.spec import Array

NANODET_BINS: Final = 8
"""Bins of the distances of NanoDet where the graph does not say their number (reg_max: 7)."""


def grid_of(size: tuple[int, int], stride: int) -> Array:
    """Return x and y of all cells of a level, row by row, shape (cells, 2)."""
    height, width = (-(-side // stride) for side in size)
    return np.stack(np.meshgrid(np.arange(width), np.arange(height)), 2).reshape(-1, 2)


def picodet(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode, for each stride, scores (images, cells, classes) and distances (images, cells, 4 bins).

    Source: PaddleDetection ppdet/modeling/heads/pico_head.py: the distance to each side is the mean of the bin numbers
    under a softmax, times the stride, from the center of the cell.
    """
    corners, scores = [], []
    for stride, arrays in _levels(outputs, head):
        distances = mean_bins(arrays["distances"]) * stride
        corners.append(around((grid_of(outputs.size, stride) + 0.5) * stride, distances))
        scores.append(arrays["scores"])
    return of_levels(corners, scores, head)


def nanodet(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode (images, N, classes + 4 bins): a row for each cell, scores and then the distribution of the distances.

    Source: NanoDet nanodet/model/head/gfl_head.py (strides 8, 16, 32, distances from the center of the cell) and
    nanodet_plus_head.py (also 64, from its corner); boxes end at the border of the input.
    """
    name, rows = next(
        ((name, value) for name, value in outputs.of_rank(3).items() if value.shape[2] > BOX_SIDES), (None, None)
    )
    strides = None if rows is None else fitting_strides(rows.shape[1], outputs.size, 1)
    if name is None or rows is None or strides is None:
        raise DataError(unfit(outputs, head))
    classes = columns_of_scores(outputs.tensor(name)) or rows.shape[2] - BOX_SIDES * NANODET_BINS
    if classes <= 0 or (rows.shape[2] - classes) % BOX_SIDES:
        raise DataError(unfit(outputs, head))
    middle = 0.5 if len(strides) == 3 else 0.0
    centers = np.concatenate([(grid_of(outputs.size, stride) + middle) * stride for stride in strides])
    scales = np.concatenate([np.full((len(grid_of(outputs.size, stride)), 1), stride) for stride in strides])
    values = rows.astype(np.float64)
    corners = around(centers, mean_bins(values[..., classes:]) * scales)
    return of_levels([np.clip(corners, 0, np.tile(outputs.size[::-1], 2))], [values[..., :classes]], head)


def scrfd(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode, for each stride, scores (rows, 1) and distances in strides (rows, 4), with two rows for each cell.

    Source: InsightFace python-package/insightface/model_zoo/scrfd.py: distances count from the corner of the cell.
    """
    corners, scores = [], []
    for stride, arrays in _levels(outputs, head):
        cells = np.repeat(grid_of(outputs.size, stride), LEVELS["scrfd"].anchors, axis=0)
        corners.append(around(cells * stride, arrays["distances"] * stride))
        scores.append(arrays["scores"])
    return of_levels(corners, scores, head)


def fcos(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode, for each stride, classes, centerness and distances from the center of the cell.

    Source: AdelaiDet adet/modeling/fcos/fcos_outputs.py: the score is the root of class and centerness.
    """
    levels = levels_of(outputs, "fcos")
    if levels is None:
        raise DataError(unfit(outputs, head))
    rows, corners, scores = outputs.rows(), [], []
    for stride, names in levels:
        class_scores, centerness = (
            shares_of(outputs, names[key], rows[names[key]]) for key in ("scores", "centerness")
        )
        distances = rows[names["distances"]] * (stride if head.unit == "strides" else 1.0)
        corners.append(around((grid_of(outputs.size, stride) + 0.5) * stride, distances))
        scores.append(np.sqrt(class_scores * centerness))
    return of_levels(corners, scores, head)


def rtmdet(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode, for each stride, classes and distances from the corner of the cell.

    Source: MMDetection rtmdet_head.py, MlvlPointGenerator(offset=0) and DistancePointBBoxCoder; boxes end at the border
    of the input.
    """
    levels = levels_of(outputs, "rtmdet")
    if levels is None:
        raise DataError(unfit(outputs, head))
    rows, corners, scores = outputs.rows(), [], []
    for stride, names in levels:
        distances = rows[names["distances"]].astype(np.float64) * (stride if head.unit == "strides" else 1.0)
        boxes = around(grid_of(outputs.size, stride) * stride, distances)
        corners.append(np.clip(boxes, 0, np.tile(outputs.size[::-1], 2)))
        scores.append(shares_of(outputs, names["scores"], rows[names["scores"]]))
    return of_levels(corners, scores, head)


def shares_of(outputs: DetectorOutputs, name: str, values: Array) -> Array:
    """Return scores as probabilities: a Sigmoid is applied unless the graph has it."""
    values = values.astype(np.float64)
    return values if ends_in(outputs.tensor(name), "Sigmoid") else sigmoid(values)


def mean_bins(distances: Array) -> Array:
    """Return the means of the bin numbers under a softmax, (images, cells, 4), of (images, cells, 4 bins)."""
    bins = distances.reshape(*distances.shape[:2], BOX_SIDES, -1)
    means: Array = (softmax(bins) * np.arange(bins.shape[3])).sum(3)
    return means


def around(points: Array, distances: Array) -> Array:
    """Return corners, (images, cells, 4), of points (cells, 2) and distances to left, top, right and bottom."""
    return np.concatenate([points - distances[..., :2], points + distances[..., 2:]], 2)


def of_levels(corners: list[Array], scores: list[Array], head: Head) -> Decoded:
    """Select among the boxes and scores of all levels."""
    confidence = np.concatenate(scores, 1)
    pairs = zip(np.concatenate(corners, 1), confidence, strict=True)
    return Decoded([multi_label(*pair, head) for pair in pairs], confidence.shape[2])


def yunet(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode, for each stride, class and object scores (images, cells, 1) and boxes (images, cells, 4).

    Source: libfacedetection.train, yunet_head.py: xy = (raw + cell) stride, wh = exp(raw) stride; score of OpenCV's
    FaceDetectorYN: the root of class and object score.
    """
    corners, scores = [], []
    for stride, arrays in _levels(outputs, head):
        raw = arrays["boxes"]
        center = (raw[..., :2] + grid_of(outputs.size, stride)) * stride
        corners.append(corners_of(np.concatenate([center, np.exp(raw[..., 2:]) * stride], 2)))
        scores.append(np.sqrt(np.clip(arrays["class"], 0, 1) * np.clip(arrays["object"], 0, 1)))
    return of_levels(corners, scores, head)


def _levels(outputs: DetectorOutputs, head: Head) -> list[tuple[int, dict[str, Array]]]:
    """Return stride and float64 arrays by quantity of each level.

    Raises:
        DataError: the outputs are not those of the head.
    """
    levels = levels_of(outputs, head.name)
    if levels is None:
        raise DataError(unfit(outputs, head))
    rows = outputs.rows()
    return [(stride, {key: rows[name].astype(np.float64) for key, name in names.items()}) for stride, names in levels]


def centerface(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode a heat map (images, 1, h, w), then sizes and offsets (images, 2, h, w), each y before x.

    Source: CenterFace (Star-Clouds), decode: center = (cell + offset + 0.5) stride, size = exp(raw) stride; boxes begin
    and end inside the input.
    """
    names = centerface_maps(outputs)
    if names is None:
        raise DataError(unfit(outputs, head))
    heat, sizes, offsets = (outputs.arrays[name].astype(np.float64) for name in names)
    height, width = heat.shape[2:]
    stride = np.array([outputs.size[1] / width, outputs.size[0] / height])
    limits = np.array(outputs.size[::-1], np.float64)
    cells = np.stack(np.meshgrid(np.arange(width), np.arange(height)), 2)
    images = []
    for scores, size, offset in zip(heat, sizes, offsets, strict=True):
        extent = np.exp(size[::-1].transpose(1, 2, 0)) * stride
        low = np.clip((cells + offset[::-1].transpose(1, 2, 0) + 0.5) * stride - extent / 2, 0, limits)
        corners = np.concatenate([low, np.minimum(low + extent, limits)], 2).reshape(-1, 4)
        images.append(best_of(Boxes(corners, np.zeros(len(corners), np.int64), scores.reshape(-1)), head))
    return Decoded(images, 1)
