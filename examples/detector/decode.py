"""Non-maximum suppression of the detector's output, for `--decode decode.py:decode`."""

from __future__ import annotations

from typing import Any

import numpy as np

LEAST_SCORE, MOST_OVERLAP, MOST = 0.05, 0.5, 20


def decode(outputs: dict[str, Any]) -> dict[str, Any]:
    """Return boxes (N, 20, 4) of x1, y1, x2, y2, scores (N, 20) and classes (N, 20), -1 where there is no detection.

    Args:
        outputs: the array `detections` (N, cells, 4 + classes) of x, y, width, height and a score for each class.
    """
    detections = outputs["detections"]
    boxes = np.zeros((len(detections), MOST, 4))
    scores = np.zeros((len(detections), MOST))
    classes = np.full((len(detections), MOST), -1)
    for image, rows in enumerate(detections):
        half = rows[:, 2:4] / 2
        corners = np.concatenate([rows[:, :2] - half, rows[:, :2] + half], axis=1)
        for place, (cell, kind) in enumerate(suppress(corners, rows[:, 4:])):
            boxes[image, place], scores[image, place], classes[image, place] = corners[cell], rows[cell, 4 + kind], kind
    return {"boxes": boxes, "scores": scores, "classes": classes}


def suppress(corners: Any, scores: Any) -> list[tuple[int, int]]:
    """Return (cell, class) of at most `MOST` detections by falling score, without overlaps of the same class."""
    kept: list[tuple[int, int]] = []
    for at in np.argsort(-scores, axis=None):
        cell, kind = (int(index) for index in np.unravel_index(at, scores.shape))
        if scores[cell, kind] < LEAST_SCORE or len(kept) == MOST:
            break
        if all(other != kind or overlap(corners[cell], corners[box]) < MOST_OVERLAP for box, other in kept):
            kept.append((cell, kind))
    return kept


def overlap(one: Any, other: Any) -> float:
    """Return intersection over union of two boxes of x1, y1, x2, y2."""
    sides = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    shared = float(sides.clip(0).prod())
    return shared / float((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod() - shared)
