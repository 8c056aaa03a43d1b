"""Classes of a model in the numbers of the labels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sbonnx.detectors.head import Head, Numbering
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import Boxes, Categories
from sbonnx.spec import Array

PADDING = -1
"""Class of detections that no category of the labels has, which do not count."""


def in_labels(boxes: Boxes, classes: int | None, head: Head, categories: Categories | None) -> Boxes:
    """Return detections with the class numbers of the labels.

    Args:
        classes: number of classes of the model, the background included; None: unknown.
        categories: classes of the labels; None, or without names: their numbers are those of the model without
            background.

    Raises:
        DataError: it is not known how the classes of the model are numbered, or one is not in the labels.
    """
    first = 1 if head.background == "first" else 0
    if categories is None or not categories.names:
        return replace(boxes, classes=boxes.classes - first)
    numbering = head.classes or _numbering(classes, head, categories)
    if numbering == "ids":
        return replace(boxes, classes=_positions(boxes.classes, categories))
    numbers = boxes.classes - (1 if numbering == "from1" else 0)
    if len(numbers) and (numbers.max() >= len(categories.names) or numbers.min() < 0):
        raise DataError(
            f"a detection has class {int(boxes.classes.max())}, and {categories.name} has {len(categories.names)} "
            f"categories: state how the model numbers them, --head {head.name}:classes=from0, from1 or ids"
        )
    return replace(boxes, classes=numbers)


def _numbering(classes: int | None, head: Head, categories: Categories) -> Numbering:
    """Return how a model numbers its classes, by their count: as many as there are categories, or up to the largest id.

    Raises:
        DataError: the count fits neither, or is unknown.
    """
    count, ids = len(categories.names), categories.ids
    extra = {"none": 0, "first": 1, "last": 1}[head.background]
    if classes == count + extra:
        return "from1" if head.background == "first" else "from0"
    if classes is not None and classes == max(ids) + 1 + (1 if head.background == "last" else 0):
        return "ids"
    has = "an unknown number of classes" if classes is None else f"{classes} classes"
    background = f", the background {head.background}," if extra else ""
    missing = classes is not None and classes - extra > count
    names = "; if the data lacks some, list all of the model, in its order, in classes.txt" if missing else ""
    raise DataError(
        f"the model has {has}{background} and {categories.name} has {count} categories "
        f"with ids {min(ids)} to {max(ids)}: state how the model numbers them, --head "
        f"{head.name}:classes=from0 (the first category is 0), from1 or ids{names}"
    )


def _positions(numbers: Array, categories: Categories) -> Array:
    """Return the positions of category ids; `PADDING` for others, which COCO leaves out as well."""
    table = np.full(max(*categories.ids, int(numbers.max(initial=0))) + 1, PADDING)
    table[list(categories.ids)] = np.arange(len(categories.ids))
    return table[numbers]
