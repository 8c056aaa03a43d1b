"""Selection of the detections of an image among its candidates, and conversions that several heads share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbonnx.detectors.head import Head
from sbonnx.detectors.nms import suppressed
from sbonnx.metrics.boxes import Boxes
from sbonnx.spec import Array


@dataclass(frozen=True)
class Decoded:
    """Detections of each image of a feed.

    Attributes:
        images: detections, in pixels of the input; classes are those of the model, the background included.
        classes: number of classes, the background included; None: unknown.
    """

    images: list[Boxes]
    classes: int | None


def multi_label(corners: Array, scores: Array, head: Head) -> Boxes:
    """Return the detections of all pairs of box, shape (N, 4), and class, scores (N, classes), above the score."""
    place, number = np.nonzero(scores > head.score)
    number_of_model = number + (1 if head.background == "first" else 0)
    return suppressed(Boxes(corners[place], number_of_model, scores[place, number]), head.iou, head.most)


def best_of(boxes: Boxes, head: Head) -> Boxes:
    """Return the detections above the score, suppressed."""
    kept = boxes.scores > head.score
    return suppressed(Boxes(boxes.corners[kept], boxes.classes[kept], boxes.scores[kept]), head.iou, head.most)


def corners_of(boxes: Array) -> Array:
    """Return x1, y1, x2, y2 of center x, center y, width, height on the last axis."""
    return np.concatenate([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)


def sigmoid(values: Array) -> Array:
    """Compute the logistic function."""
    result: Array = 1 / (1 + np.exp(-np.clip(values, -500, 500)))
    return result


def softmax(values: Array) -> Array:
    """Compute the softmax over the last axis."""
    powers = np.exp(values - values.max(-1, keepdims=True))
    shares: Array = powers / powers.sum(-1, keepdims=True)
    return shares
