"""Mean average precision of detections, as pycocotools computes it, and the layouts of detections and of true boxes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.errors import DataError
from sbonnx.metrics.arrays import LABEL_NAMES, counts_of, shown
from sbonnx.spec import Array

MOST_DETECTIONS: Final = 100
"""Maximum number of detections of an image and class (COCO: maxDets)."""

RECALLS: Final = np.linspace(0, 1, 101)
"""Recalls at which the precision is read (COCO: recThrs)."""

COCO_OVERLAPS: Final = tuple(float(value) for value in np.linspace(0.5, 0.95, 10))
"""IoU thresholds of "map" (COCO: iouThrs); "map50" has the first."""

CLASS_NAMES: Final = ("classes", "class", "labels", "label", "category", "class_ids")
"""Last words of the names of class outputs."""

LAYOUTS: Final = (
    "(images, detections, 6) of x1, y1, x2, y2, score, class; or outputs named boxes (x1, y1, x2, y2), scores and "
    "classes"
)


@dataclass(frozen=True)
class Boxes:
    """Boxes of one image.

    Attributes:
        corners: x1, y1, x2, y2, shape (boxes, 4), float64; the unit is that of the labels (pixels, or shares).
        classes: class numbers, shape (boxes,), int64.
        scores: confidences, shape (boxes,); ones for true boxes.
    """

    corners: Array
    classes: Array
    scores: Array


@dataclass
class _ImageMatches:
    """Detections of one class in one image, by falling score: scores, and whether each hits, (thresholds, boxes)."""

    image: int
    scores: Array
    hits: Array


@dataclass
class MeanAveragePrecision:
    """Mean over classes, and over IoU thresholds, of the average precision at 101 recalls (pycocotools: `COCOeval`).

    The detections of a class are matched by falling score, each with the free true box of the highest IoU. All sizes
    of boxes, at most 100 detections of an image and class; crowd annotations are not supported. Classes without true
    boxes are left out. Layouts: docs/metrics.md.

    Attributes:
        overlaps: IoU thresholds.
        labels: name of the label array, see `true_boxes`.
    """

    overlaps: tuple[float, ...]
    labels: str | None = None
    count: int = 0
    _matches: dict[int, list[_ImageMatches]] = field(default_factory=dict)
    _true: dict[int, dict[int, int]] = field(default_factory=dict)
    _ranked: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        predicted = detections(outputs)
        wanted = true_boxes(labels, len(predicted), self.labels)
        self._ranked.clear()
        for image, true in zip(predicted, wanted, strict=True):
            for number in np.unique(np.concatenate([image.classes, true.classes])):
                self._add_class(int(number), image, true)
            self.count += 1

    def _add_class(self, number: int, found: Boxes, true: Boxes) -> None:
        boxes = true.corners[true.classes == number]
        if len(boxes):
            self._true.setdefault(number, {})[self.count] = len(boxes)
        chosen = np.flatnonzero(found.classes == number)
        chosen = chosen[np.argsort(-found.scores[chosen], kind="stable")][:MOST_DETECTIONS]
        if len(chosen):
            hits = match(overlaps(found.corners[chosen], boxes), self.overlaps)
            self._matches.setdefault(number, []).append(_ImageMatches(self.count, found.scores[chosen], hits))

    def value(self, weights: Array | None = None) -> float:
        """Compute the mean average precision; nan without true boxes.

        Args:
            weights: how often each image counts, shape (count,): its detections and true boxes count as often.
        """
        counts = counts_of(weights, self.count)
        areas = []
        for number, images in self._true.items():
            total = sum(counts[image] * boxes for image, boxes in images.items())
            if total:
                areas.append(_average_precision(self._sorted(number), counts, total, len(self.overlaps)))
        return float(np.mean(areas)) if areas else float("nan")

    def _sorted(self, number: int) -> tuple[Array, Array]:
        """Return image and hits of all detections of a class, by falling score. Sorted once."""
        if number not in self._ranked:
            parts = self._matches.get(number, [])
            scores = np.concatenate([np.zeros(0), *(part.scores for part in parts)])
            images = np.repeat([part.image for part in parts], [len(part.scores) for part in parts]).astype(np.int64)
            hits = np.concatenate([np.zeros((len(self.overlaps), 0), bool), *(part.hits for part in parts)], axis=1)
            order = np.argsort(-scores, kind="stable")
            self._ranked[number] = images[order], hits[:, order]
        return self._ranked[number]


def _average_precision(ranked: tuple[Array, Array], counts: Array, total: float, thresholds: int) -> float:
    """Compute the mean over thresholds of the precision at `RECALLS` (0 at recalls that are not reached)."""
    images, hits = ranked
    weights = counts[images]
    hit = np.cumsum(hits * weights, axis=1)
    miss = np.cumsum(~hits * weights, axis=1)
    precisions = []
    for row, wrong in zip(hit, miss, strict=True):
        if not len(row):
            precisions.append(0.0)
            continue
        precision = row / np.maximum(row + wrong, np.spacing(1))
        envelope = np.maximum.accumulate(precision[::-1])[::-1]
        places = np.searchsorted(row / total, RECALLS, side="left")
        precisions.append(float(envelope[places[places < len(row)]].sum()) / len(RECALLS))
    return float(np.sum(precisions)) / thresholds


def overlaps(one: Array, other: Array) -> Array:
    """Compute the IoU of boxes, shapes (n, 4) and (m, 4) of corners: shape (n, m)."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(2)
    areas = [np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(1) for boxes in (one, other)]
    union = areas[0][:, None] + areas[1][None] - shared
    shares: Array = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return shares


def match(iou: Array, thresholds: tuple[float, ...]) -> Array:
    """Match detections, in order, with true boxes: each takes the free box of the highest IoU above the threshold.

    Args:
        iou: shape (detections, boxes).

    Returns:
        Whether each detection hits, shape (thresholds, detections).
    """
    least = np.array(thresholds)[:, None]
    hits = np.zeros((len(thresholds), len(iou)), bool)
    free = np.ones((len(thresholds), iou.shape[1]), bool)
    if not iou.shape[1]:
        return hits
    rows = np.arange(len(thresholds))
    for place, row in enumerate(iou):
        open_to = np.where(free & (row >= least - 1e-10), row, -1.0)
        best = open_to.shape[1] - 1 - open_to[:, ::-1].argmax(1)  # of equal IoU the last, as in pycocotools
        hit = open_to[rows, best] >= 0
        hits[:, place] = hit
        free[rows[hit], best[hit]] = False
    return hits


PARTNERS: Final = 0.5
"""IoU from which on boxes of one class in two models are the same detection."""


def overlap_share(one: Boxes, other: Boxes) -> float | None:
    """Return how much the detections of two models overlap, in boxes and scores; None if there are none.

        sum over pairs of 2 min(s, s') IoU  /  (sum of s + sum of s')

    Pairs are detections of one class: by falling score, each with the free one of the highest IoU, from `PARTNERS` on.
    """
    scores, others = (np.maximum(boxes.scores, 0.0) for boxes in (one, other))
    total, shared = float(scores.sum() + others.sum()), 0.0
    if not total:
        return None
    for number in np.intersect1d(one.classes, other.classes):
        rows, columns = np.flatnonzero(one.classes == number), np.flatnonzero(other.classes == number)
        rows = rows[np.argsort(-scores[rows], kind="stable")]
        free = overlaps(one.corners[rows], other.corners[columns])
        for row, place in enumerate(rows):
            best = int(free[row].argmax())
            if free[row, best] >= PARTNERS:
                shared += 2 * min(scores[place], others[columns[best]]) * free[row, best]
                free[:, best] = -1.0
    return float(shared / total)


def detections(outputs: Mapping[str, Array]) -> list[Boxes]:
    """Return the detections of each image of a feed.

    Raises:
        DataError: the outputs are of no layout of `LAYOUTS`.
    """
    arrays = {name: np.asarray(value) for name, value in outputs.items()}
    if len(arrays) == 1:
        (rows,) = arrays.values()
        if rows.shape[-1:] == (6,) and rows.ndim in (2, 3):
            batch = rows[None] if rows.ndim == 2 else rows
            return [_boxes(image[:, :4], image[:, 5], image[:, 4]) for image in batch.astype(np.float64)]
    boxes, scores, classes = (_ending(arrays, names) for names in (("boxes", "box"), ("scores", "score"), CLASS_NAMES))
    if boxes is None or scores is None or classes is None:
        listed = ", ".join(f"'{name}' {shown(value)}" for name, value in arrays.items())
        raise DataError(
            f"map takes detections after NMS, {LAYOUTS}; the outputs are {listed}: decode them with --decode "
            "script.py:function"
        )
    if any(name.lower().endswith("detection_boxes") for name in arrays):  # TensorFlow's object detection API
        boxes = boxes[..., [1, 0, 3, 2]]
    if boxes.ndim == 2:
        boxes, scores, classes = boxes[None], scores[None], classes[None]
    scores, classes = (
        array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array for array in (scores, classes)
    )
    if boxes.ndim != 3 or boxes.shape[2] != 4 or not boxes.shape[:2] == scores.shape == classes.shape:
        shapes = ", ".join(shown(array) for array in (boxes, scores, classes))
        raise DataError(
            f"map takes boxes (images, boxes, 4), scores and classes (images, boxes), and they are {shapes}"
        )
    valid = _ending(arrays, ("num_detections", "num_dets"))
    lengths = [boxes.shape[1]] * len(boxes) if valid is None else [int(one) for one in valid.reshape(-1)]
    return [
        _boxes(one[:length], kinds[:length], confidence[:length])
        for one, kinds, confidence, length in zip(boxes, classes, scores, lengths, strict=True)
    ]


def _ending(arrays: Mapping[str, Array], endings: tuple[str, ...]) -> Array | None:
    """Return the only array whose name is one of these words, or ends with it after a separator; None without one."""
    names = [
        value
        for name, value in arrays.items()
        if any(name.lower() == word or name.lower().endswith((f"_{word}", f"/{word}", f".{word}")) for word in endings)
    ]
    return names[0] if len(names) == 1 else None


def _boxes(corners: Array, classes: Array, scores: Array) -> Boxes:
    """Return boxes without padding (a negative class)."""
    whole = np.rint(np.asarray(classes, np.float64)).astype(np.int64)
    kept = whole >= 0
    return Boxes(
        np.asarray(corners, np.float64).reshape(-1, 4)[kept], whole[kept], np.asarray(scores, np.float64)[kept]
    )


def true_boxes(labels: Mapping[str, Any], images: int, wanted: str | None = None) -> list[Boxes]:
    """Return the true boxes of each image of a feed.

    Labels: arrays ``boxes`` (images, boxes, 4) and ``classes`` (images, boxes), or one array (images, boxes, 5) of
    class, x1, y1, x2, y2. A class of -1 is padding. The images axis can be left out for one image.

    Args:
        wanted: name of the array of (class, x1, y1, x2, y2); None: by the names above, or one of `LABEL_NAMES`.

    Raises:
        DataError: there are no such labels.
    """
    arrays = {name: np.asarray(value) for name, value in labels.items() if not isinstance(value, str)}
    boxes, classes = _ending(arrays, ("boxes", "box")), _ending(arrays, CLASS_NAMES)
    if wanted is None and boxes is not None and classes is not None:
        boxes = boxes[None] if boxes.ndim == 2 else boxes
        classes = classes[None] if classes.ndim == 1 else classes
        rows = np.concatenate([classes[..., None], boxes], 2) if classes.shape == boxes.shape[:2] else boxes
    else:
        names = [wanted] if wanted is not None else [name for name in arrays if name.lower() in LABEL_NAMES]
        if len(names) != 1 or names[0] not in arrays:
            there = ", ".join(f"'{name}'" for name in labels) or "none"
            raise DataError(
                "map takes labels 'boxes' (images, boxes, 4) and 'classes' (images, boxes), or one array (images, "
                f"boxes, 5) of class, x1, y1, x2, y2; the data has {there}"
            )
        rows = arrays[names[0]]
        rows = rows[None] if rows.ndim == 2 else rows
    if rows.ndim != 3 or rows.shape[2] != 5 or len(rows) != images:
        raise DataError(
            f"map takes true boxes of {images} images, (images, boxes, 5) of class, x1, y1, x2, y2, and they are "
            f"{shown(rows)}"
        )
    corners = rows[..., 1:]
    used = rows[..., 0] >= 0
    if (corners[used][:, 2:] < corners[used][:, :2]).any():
        raise DataError("map takes boxes as x1, y1, x2, y2, and some have x2 < x1 or y2 < y1: are they x, y, w, h?")
    return [_boxes(image[:, 1:], image[:, 0], np.ones(len(image))) for image in rows.astype(np.float64)]
