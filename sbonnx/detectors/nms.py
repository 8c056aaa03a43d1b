"""Selection of detections: class-wise suppression of overlapping boxes, in numpy."""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.metrics.boxes import Boxes, overlaps
from sbonnx.spec import Array

MOST_CANDIDATES: Final = 30_000
"""Maximum number of boxes before suppression, those of the highest scores (Ultralytics: max_nms)."""


def suppressed(boxes: Boxes, iou: float | None, most: int) -> Boxes:
    """Drop boxes that overlap one of the same class with a higher score by more than `iou`, and keep the `most` best.

    Of equal scores the first counts as the higher, as in torchvision.ops.batched_nms with a stable sort.

    Args:
        iou: None: no suppression.
    """
    order = np.argsort(-boxes.scores, kind="stable")[:MOST_CANDIDATES]
    if iou is not None:
        kept = np.zeros(len(order), bool)
        for number in np.unique(boxes.classes[order]):
            places = np.flatnonzero(boxes.classes[order] == number)
            kept[places[_kept(boxes.corners[order[places]], iou)]] = True
        order = order[kept]
    order = order[:most]
    return Boxes(boxes.corners[order], boxes.classes[order], boxes.scores[order])


def _kept(corners: Array, iou: float) -> Array:
    """Return the positions that remain of boxes of one class, shape (boxes, 4), by falling score."""
    waiting, kept = np.arange(len(corners)), []
    while len(waiting):
        kept.append(waiting[0])
        rest = waiting[1:]
        waiting = rest[overlaps(corners[waiting[:1]], corners[rest])[0] <= iou]
    return np.array(kept, np.int64)
