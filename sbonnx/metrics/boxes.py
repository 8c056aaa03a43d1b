"""Boxes of images: detections and true boxes, how they are read from outputs and labels, their overlaps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sbonnx.errors import DataError
from sbonnx.metrics.arrays import LABEL_NAMES, shown
from sbonnx.spec import Array

CLASS_NAMES: Final = ("classes", "class", "labels", "label", "category", "class_ids")
"""Last words of the names of class outputs."""

LAYOUTS: Final = (
    "(images, detections, 6) of x1, y1, x2, y2, score, class; or outputs named boxes (x1, y1, x2, y2), scores and "
    "classes"
)

PLACEMENT: Final = "placement"
CATEGORIES: Final = "categories"
"""Names of labels that readers of annotations give: one `ImagePlacement` and one `Categories` for each image."""


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


@dataclass(frozen=True)
class TrueBoxes(Boxes):
    """True boxes of one image.

    Attributes:
        crowd: whether a box is around many objects (COCO: iscrowd), shape (boxes,): any number of detections match it,
            and they do not count.
        ignored: whether a box is not to be found (VOC: difficult), shape (boxes,): a detection that matches it does
            not count. True for those of `crowd`.
        areas: areas of the objects, shape (boxes,); those of the boxes if the labels have none.
    """

    crowd: Array
    ignored: Array
    areas: Array


@dataclass(frozen=True)
class ImagePlacement:
    """Position of an image in the input of a model: ``input = image * scale + offset``.

    Attributes:
        scale: horizontal and vertical factor.
        offset: horizontal and vertical offset in pixels of the input.
        image: height and width of the image.
        size: height and width of the input.
    """

    scale: tuple[float, float]
    offset: tuple[float, float]
    image: tuple[int, int]
    size: tuple[int, int]

    def back(self, corners: Array) -> Array:
        """Map x1, y1, x2, y2 in pixels of the input to pixels of the image, clipped to it. Shape (boxes, 4)."""
        places = (corners - np.tile(self.offset, 2)) / np.tile(self.scale, 2)
        clipped: Array = np.clip(places, 0.0, np.tile(self.image[::-1], 2).astype(np.float64))
        return clipped


@dataclass(frozen=True)
class Categories:
    """Classes of annotated data, in the order of their numbers in the labels.

    Attributes:
        ids: number of each in the annotation file (COCO: 1 to 90 with gaps); else 0, 1, ...
        names: name of each.
        name: origin, for messages.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    name: str


def overlaps(one: Array, other: Array, crowd: Array | None = None) -> Array:
    """Compute the IoU of boxes, shapes (n, 4) and (m, 4) of corners: shape (n, m).

    Args:
        crowd: which of the m boxes are crowds, shape (m,): the overlap is the share of the first box inside.
    """
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(2)
    areas = [np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(1) for boxes in (one, other)]
    union = areas[0][:, None] + areas[1][None] - shared
    if crowd is not None:
        union = np.where(crowd[None], areas[0][:, None], union)
    shares: Array = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return shares


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
            return [boxes_of(image[:, :4], image[:, 5], image[:, 4]) for image in batch.astype(np.float64)]
    named = named_parts(arrays)
    if named is None:
        listed = ", ".join(f"'{name}' {shown(value)}" for name, value in arrays.items())
        raise DataError(
            f"map takes detections after NMS, {LAYOUTS}; the outputs are {listed}: name the head with --head, or "
            "decode them with --decode script.py:function"
        )
    boxes, scores, classes = named
    if boxes.ndim == 2:
        boxes, scores, classes = boxes[None], scores[None], classes[None]
    scores, classes = (part[..., 0] if part.ndim == 3 and part.shape[2] == 1 else part for part in (scores, classes))
    if boxes.ndim != 3 or boxes.shape[2] != 4 or not boxes.shape[:2] == scores.shape == classes.shape:
        sizes = ", ".join(shown(part) for part in (boxes, scores, classes))
        raise DataError(f"map takes boxes (images, boxes, 4), scores and classes (images, boxes), and they are {sizes}")
    valid = ending(arrays, ("num_detections", "num_dets"))
    lengths = [boxes.shape[1]] * len(boxes) if valid is None else [int(length) for length in valid.reshape(-1)]
    return [
        boxes_of(corners[:length], kinds[:length], confidence[:length])
        for corners, kinds, confidence, length in zip(boxes, classes, scores, lengths, strict=True)
    ]


def named_parts(arrays: Mapping[str, Array]) -> tuple[Array, Array, Array] | None:
    """Return boxes (x1, y1, x2, y2), scores and classes among outputs by their names; None if one is missing.

    MMDeploy joins boxes and scores: ``dets`` (images, detections, 5).
    """
    boxes, scores, classes = (
        ending(arrays, names) for names in (("boxes", "box", "bboxes"), ("scores", "score"), CLASS_NAMES)
    )
    joined = joined_detections(arrays)
    if joined is not None and classes is not None:
        return joined[..., :4], joined[..., 4], classes
    if boxes is None or scores is None or classes is None:
        return None
    return (boxes[..., [1, 0, 3, 2]] if is_of_tensorflow(arrays) else boxes), scores, classes


def joined_detections(arrays: Mapping[str, Array]) -> Array | None:
    """Return the output ``dets`` of x1, y1, x2, y2, score; None: there is none."""
    dets: Array | None = ending(arrays, ("dets",))
    return dets if dets is not None and dets.shape[-1:] == (5,) else None


def is_of_tensorflow(arrays: Mapping[str, Any]) -> bool:
    """Return whether outputs are those of TensorFlow's object detection API: y1, x1, y2, x2 as shares of the image."""
    return any(_plain(name).endswith("detection_boxes") for name in arrays)


def ending(arrays: Mapping[str, Any], endings: tuple[str, ...]) -> Any:
    """Return the only value whose name is one of these words, or ends with it after a separator; None without one."""
    values = [
        value
        for name, value in arrays.items()
        if any(_plain(name) == word or _plain(name).endswith((f"_{word}", f"/{word}", f".{word}")) for word in endings)
    ]
    return values[0] if len(values) == 1 else None


def _plain(name: str) -> str:
    """Return a name in lower case without the number that TensorFlow appends."""
    return re.sub(r":\d+$", "", name.lower())


def boxes_of(corners: Array, classes: Array, scores: Array) -> Boxes:
    """Return boxes without padding (a negative class)."""
    whole = np.rint(np.asarray(classes, np.float64)).astype(np.int64)
    kept = whole >= 0
    return Boxes(
        np.asarray(corners, np.float64).reshape(-1, 4)[kept], whole[kept], np.asarray(scores, np.float64)[kept]
    )


def true_boxes(labels: Mapping[str, Any], images: int, wanted: str | None = None) -> list[TrueBoxes]:
    """Return the true boxes of each image of a feed.

    Labels: ``boxes`` (images, boxes, 4) and ``classes`` (images, boxes), with ``crowd``, ``ignored`` and ``areas``
    (images, boxes) if there are any; or one array (images, boxes, 5) of class, x1, y1, x2, y2. Each is an array, where
    a class of -1 is padding, or a list of one array an image. The images axis can be left out for one image.

    Args:
        wanted: name of the array of (class, x1, y1, x2, y2); None: by the names above, or one of `LABEL_NAMES`.

    Raises:
        DataError: there are no such labels.
    """
    boxes, classes = ending(labels, ("boxes", "box")), ending(labels, CLASS_NAMES)
    if wanted is None and boxes is not None and classes is not None:
        corners, kinds = _by_image(boxes, 2), _by_image(classes, 1)
        rows = corners
        if [len(part) for part in corners] == [len(part) for part in kinds]:
            rows = [
                np.column_stack(pair) for pair in zip(kinds, (part.reshape(-1, 4) for part in corners), strict=True)
            ]
    else:
        names = [wanted] if wanted is not None else [name for name in labels if name.lower() in LABEL_NAMES]
        if len(names) != 1 or names[0] not in labels:
            there = ", ".join(f"'{name}'" for name in labels) or "none"
            raise DataError(
                "map takes labels 'boxes' (images, boxes, 4) and 'classes' (images, boxes), or one array (images, "
                f"boxes, 5) of class, x1, y1, x2, y2; the data has {there}. Of annotated images (COCO, YOLO, VOC), "
                "give the folder that has the annotations too, or their file (docs/data.md)"
            )
        rows = _by_image(labels[names[0]], 2)
    if len(rows) != images or any(part.ndim != 2 or part.shape[1] != 5 for part in rows):
        sizes = ", ".join(dict.fromkeys(shown(part) for part in rows))
        raise DataError(
            f"map takes true boxes of {images} images, (images, boxes, 5) of class, x1, y1, x2, y2, and they are "
            f"{len(rows)} of {sizes}"
        )
    extra = [_by_image(labels[name], 1) if name in labels else [] for name in ("crowd", "ignored", "areas")]
    return [
        _true_boxes(part, *(values[place] if values else None for values in extra)) for place, part in enumerate(rows)
    ]


def _by_image(value: Any, rank: int) -> list[Array]:
    """Return the labels of each image, arrays of `rank` axes."""
    if isinstance(value, (list, tuple)) and value and np.ndim(value[0]) == rank:
        return [np.asarray(part, np.float64) for part in value]
    array = np.asarray(value, np.float64)
    return [array] if array.ndim == rank else list(array)


def _true_boxes(rows: Array, crowd: Array | None, ignored: Array | None, areas: Array | None) -> TrueBoxes:
    """Return the boxes of one image without padding.

    Raises:
        DataError: a box is not x1, y1, x2, y2, or another label has another length.
    """
    used = rows[:, 0] >= 0
    corners = rows[used, 1:]
    if (corners[:, 2:] < corners[:, :2]).any():
        raise DataError("map takes boxes as x1, y1, x2, y2, and some have x2 < x1 or y2 < y1: are they x, y, w, h?")
    for name, values in (("crowd", crowd), ("ignored", ignored), ("areas", areas)):
        if values is not None and values.shape != used.shape:
            raise DataError(f"map takes labels '{name}' (images, boxes), one for each box, and one is {shown(values)}")
    many = np.zeros(len(corners), bool) if crowd is None else crowd[used] > 0
    return TrueBoxes(
        corners,
        np.rint(rows[used, 0]).astype(np.int64),
        np.ones(len(corners)),
        many,
        many if ignored is None else many | (ignored[used] > 0),
        (corners[:, 2:] - corners[:, :2]).prod(1) if areas is None else areas[used],
    )


def placements(labels: Mapping[str, Any], images: int) -> Sequence[ImagePlacement | None]:
    """Return the placement of each image of a feed; None for labels that have none."""
    return labels.get(PLACEMENT) or [None] * images
