"""Mean average precision of detections, as pycocotools computes it, and the overlap of the detections of two models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from sbonnx.metrics.arrays import counts_of
from sbonnx.metrics.boxes import Boxes, TrueBoxes, detections, overlaps, placements, true_boxes
from sbonnx.spec import Array

MOST_DETECTIONS: Final = 100
"""Maximum number of detections of an image and class (COCO: maxDets)."""

RECALLS: Final = np.linspace(0, 1, 101)
"""Recalls at which the precision is read (COCO: recThrs)."""

COCO_OVERLAPS: Final = tuple(float(value) for value in np.linspace(0.5, 0.95, 10))
"""IoU thresholds of "map" (COCO: iouThrs); "map50" has the first."""

AreaRange = tuple[float, float]

ALL_AREAS: Final[AreaRange] = (0.0, 1e10)
COCO_AREAS: Final[Mapping[str, AreaRange]] = {
    "small": (0.0, 32.0**2),
    "medium": (32.0**2, 96.0**2),
    "large": (96.0**2, 1e10),
}
"""Ranges of areas in square pixels of the image (COCO: areaRng), ends included."""


@dataclass
class _ImageMatches:
    """Detections of one class in one image, by falling score.

    Attributes:
        image: number of the image.
        scores: scores.
        hits: whether each matches a true box that counts, shape (thresholds, detections).
        ignored: whether each does not count, shape (thresholds, detections).
    """

    image: int
    scores: Array
    hits: Array
    ignored: Array


@dataclass
class MeanAveragePrecision:
    """Mean over classes, and over IoU thresholds, of the average precision at 101 recalls (pycocotools: `COCOeval`).

    The detections of a class are matched by falling score, each with the free true box of the highest IoU; at most 100
    detections of an image and class. Detections that match a crowd or an ignored box do not count. Classes without
    true boxes that count are left out. Layouts: docs/metrics.md. Detections are mapped back to the image where the
    labels have a `ImagePlacement`.

    Attributes:
        overlaps: IoU thresholds.
        labels: name of the label array, see `true_boxes`.
        areas: true boxes of other areas are ignored, and detections of other areas do not count without a match.
    """

    overlaps: tuple[float, ...]
    labels: str | None = None
    areas: AreaRange = ALL_AREAS
    count: int = 0
    _matches: dict[int, list[_ImageMatches]] = field(default_factory=dict)
    _true: dict[int, dict[int, int]] = field(default_factory=dict)
    _ranked: dict[int, tuple[Array, Array, Array]] = field(default_factory=dict)

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        images = detections(outputs)
        wanted = true_boxes(labels, len(images), self.labels)
        self._ranked.clear()
        for boxes, true, placement in zip(images, wanted, placements(labels, len(images)), strict=True):
            image = boxes if placement is None else replace(boxes, corners=placement.back(boxes.corners))
            for number in np.unique(np.concatenate([image.classes, true.classes])):
                self._add_class(int(number), image, true)
            self.count += 1

    def _add_class(self, number: int, boxes: Boxes, true: TrueBoxes) -> None:
        low, high = self.areas
        chosen = true.classes == number
        ignored = true.ignored[chosen] | (true.areas[chosen] < low) | (true.areas[chosen] > high)
        if not ignored.all():
            self._true.setdefault(number, {})[self.count] = int((~ignored).sum())
        ranked = np.flatnonzero(boxes.classes == number)
        ranked = ranked[np.argsort(-boxes.scores[ranked], kind="stable")][:MOST_DETECTIONS]
        if not len(ranked):
            return
        corners, crowd = boxes.corners[ranked], true.crowd[chosen]
        matched, passed = match(overlaps(corners, true.corners[chosen], crowd), self.overlaps, ignored, crowd)
        areas = (corners[:, 2:] - corners[:, :2]).prod(1)
        passed |= ~matched & ((areas < low) | (areas > high))
        self._matches.setdefault(number, []).append(
            _ImageMatches(self.count, boxes.scores[ranked], matched & ~passed, passed)
        )

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

    def _sorted(self, number: int) -> tuple[Array, Array, Array]:
        """Return image, hits and ignored of all detections of a class, by falling score. Sorted once."""
        if number not in self._ranked:
            parts = self._matches.get(number, [])
            nothing = np.zeros((len(self.overlaps), 0), bool)
            scores = np.concatenate([np.zeros(0), *(part.scores for part in parts)])
            images = np.repeat([part.image for part in parts], [len(part.scores) for part in parts]).astype(np.int64)
            hits = np.concatenate([nothing, *(part.hits for part in parts)], axis=1)
            ignored = np.concatenate([nothing, *(part.ignored for part in parts)], axis=1)
            order = np.argsort(-scores, kind="stable")
            self._ranked[number] = images[order], hits[:, order], ignored[:, order]
        return self._ranked[number]


def _average_precision(ranked: tuple[Array, Array, Array], counts: Array, total: float, thresholds: int) -> float:
    """Compute the mean over thresholds of the precision at `RECALLS` (0 at recalls that are not reached)."""
    images, hits, ignored = ranked
    weights = counts[images]
    right = np.cumsum(hits * weights, axis=1)
    wrong = np.cumsum(~(hits | ignored) * weights, axis=1)
    precisions = []
    for row, misses in zip(right, wrong, strict=True):
        if not len(row):
            precisions.append(0.0)
            continue
        precision = row / np.maximum(row + misses, np.spacing(1))
        envelope = np.maximum.accumulate(precision[::-1])[::-1]
        places = np.searchsorted(row / total, RECALLS, side="left")
        precisions.append(float(envelope[places[places < len(row)]].sum()) / len(RECALLS))
    return float(np.sum(precisions)) / thresholds


def match(iou: Array, thresholds: tuple[float, ...], ignored: Array, crowd: Array) -> tuple[Array, Array]:
    """Match detections, in order, with true boxes: each takes the free box of the highest IoU above the threshold.

    Boxes that are ignored are taken only if no other box fits; crowds are never used up.

    Args:
        iou: shape (detections, boxes).
        ignored, crowd: shape (boxes,).

    Returns:
        Whether each detection is matched, and whether with an ignored box; both of shape (thresholds, detections).
    """
    least = np.array(thresholds)[:, None]
    matched = np.zeros((len(thresholds), len(iou)), bool)
    passed = np.zeros_like(matched)
    if not iou.shape[1]:
        return matched, passed
    free = np.ones((len(thresholds), iou.shape[1]), bool)
    rows = np.arange(len(thresholds))
    for place, row in enumerate(iou):
        fits = (free | crowd) & (row >= least)
        counting = fits & ~ignored
        open_to = np.where(np.where(counting.any(1, keepdims=True), counting, fits), row, -1.0)
        best = open_to.shape[1] - 1 - open_to[:, ::-1].argmax(1)  # of equal IoU the last, as in pycocotools
        hit = open_to[rows, best] >= 0
        matched[:, place] = hit
        passed[:, place] = hit & ignored[best]
        free[rows[hit], best[hit]] = False
    return matched, passed


PARTNERS: Final = 0.5
"""IoU from which on boxes of one class in two models are the same detection."""


def compared_detections(boxes: Boxes) -> Boxes:
    """Return the detections that an overlap is computed of, by falling score: those with a score and an area.

    The IoU of a box without an area is 0 even with itself: it would count as lost where the models are equal.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        areas = np.clip(boxes.corners[:, 2:] - boxes.corners[:, :2], 0.0, None).prod(1)
    counting = np.flatnonzero((areas > 0) & np.isfinite(areas) & (boxes.scores > 0) & np.isfinite(boxes.scores))
    order = counting[np.argsort(-boxes.scores[counting], kind="stable")]
    return Boxes(boxes.corners[order], boxes.classes[order], boxes.scores[order])


def overlap_share(one: Boxes, other: Boxes) -> float | None:
    """Return how much the detections of two models overlap, in boxes and scores; None if there are none.

        sum over pairs of 2 min(s, s') IoU  /  (sum of s + sum of s')

    Pairs are detections of one class: by falling score, each with the free one of the highest IoU, from `PARTNERS` on,
    of equal IoU that of the highest score. The share of detections with themselves is 1. Detections without an area or
    a score do not count, see `compared_detections`.
    """
    one, other = compared_detections(one), compared_detections(other)
    total = math.fsum(one.scores) + math.fsum(other.scores)
    if not total:
        return None
    shared = []
    for number in np.intersect1d(one.classes, other.classes):
        rows, columns = np.flatnonzero(one.classes == number), np.flatnonzero(other.classes == number)
        free = overlaps(one.corners[rows], other.corners[columns])
        for row, place in enumerate(rows):
            best = int(free[row].argmax())
            if free[row, best] >= PARTNERS:
                shared.append(2 * min(one.scores[place], other.scores[columns[best]]) * free[row, best])
                free[:, best] = -1.0
    return math.fsum(shared) / total
