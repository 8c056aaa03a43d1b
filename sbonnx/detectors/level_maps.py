"""Decoders of anchor-free detectors with an output for each level and quantity: PicoDet, YuNet, CenterFace."""

from __future__ import annotations

import numpy as np

from sbonnx.detectors.box_selection import Decoded, best_of, corners_of, multi_label, softmax
from sbonnx.detectors.head import Head
from sbonnx.detectors.recognize import DetectorOutputs, centerface_maps, levels_of, unfit
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import Boxes
from sbonnx.spec import Array


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
        bins = arrays["distances"].reshape(*arrays["distances"].shape[:2], 4, -1)
        distances = (softmax(bins) * np.arange(bins.shape[3])).sum(3) * stride
        center = (grid_of(outputs.size, stride) + 0.5) * stride
        corners.append(np.concatenate([center - distances[..., :2], center + distances[..., 2:]], 2))
        scores.append(arrays["scores"])
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
    pairs = zip(np.concatenate(corners, 1), np.concatenate(scores, 1), strict=True)
    return Decoded([multi_label(*pair, head) for pair in pairs], 1)


def _levels(outputs: DetectorOutputs, head: Head) -> list[tuple[int, dict[str, Array]]]:
    """Return stride and float64 arrays by quantity of each level.

    Raises:
        DataError: the outputs are not those of the head.
    """
    levels = levels_of(outputs, head.name)
    if levels is None:
        raise DataError(unfit(outputs, head))
    return [
        (stride, {key: outputs.arrays[name].astype(np.float64) for key, name in names.items()})
        for stride, names in levels
    ]


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
