"""Decision which head a detector has: from its graph, the shapes of its outputs and the size of its input.

Values never decide. If the structure fits no head, or several, an error lists the choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, Final

from sbonnx.detectors.head import HEADS, Head, HeadChoice
from sbonnx.detectors.head_structure import (
    BOX_SIDES,
    activation,
    applies,
    box_form,
    distance_unit,
    ends_in,
    factor_unit,
    is_concat_of,
    is_selected,
    joins_boxes_and_scores,
    joins_levels_of,
    joins_scores_and_distances,
    selects_queries,
)
from sbonnx.detectors.levels import FCOS_ROWS, LEVELS, RETINA_ANCHORS, RETINA_ROWS, levels_of, rows_of_levels
from sbonnx.detectors.outputs import ANCHORS, DetectorOutputs, fitting_strides
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import is_of_tensorflow, joined_detections, named_parts
from sbonnx.metrics.image_sizes import PADDLE_INPUTS, size_values
from sbonnx.ops import OBJECT_BOX_CLASSES
from sbonnx.spec import Array

RAW_BOX_OBJECT_CLASSES: Final = ("", "Sigmoid", "Sigmoid")
"""Operators of the parts of a level of YOLOX; "": a linear layer."""

SELECTED: Final = 6
"""Columns of a selected box: four of the box, score and class."""

RTDETR_SIZES: Final = "orig_target_sizes"
"""Input of RT-DETR, D-FINE and DEIM, whose exports number classes from 0."""


def resolved_head(outputs: DetectorOutputs, choice: HeadChoice | None) -> Head:
    """Return the head: the one that the user states, else the one that the structure shows, with all its settings.

    Raises:
        DataError: the structure does not decide, or a setting is neither known from it nor stated.
    """
    head = recognized_head(outputs)
    if choice is not None:
        same = head is not None and head.name == choice.name
        head = choice.applied(head if same and head is not None else _described(outputs, HEADS[choice.name].head))
    if head is None:
        raise DataError(undecided(outputs))
    _check_known(outputs, head)
    return head


def unfit(outputs: DetectorOutputs, head: Head) -> str:
    """Return the message if outputs are not those of a head."""
    return (
        f"the head {head.name} does not fit the outputs {outputs.listed} of an input of {outputs.size[0]} x "
        f"{outputs.size[1]} pixels: it is {HEADS[head.name].form}. Name another head, or use --decode"
    )


def undecided(outputs: DetectorOutputs) -> str:
    """Return the message if the structure does not decide."""
    return (
        f"the structure of the model does not say how its outputs {outputs.listed}, of an input of "
        f"{outputs.size[0]} x {outputs.size[1]} pixels, are boxes{_hint(outputs)}: name the head with --head "
        f"({', '.join(HEADS)}; docs/metrics.md describes them), or decode them with --decode script.py:function"
    )


def _hint(outputs: DetectorOutputs) -> str:
    """Return which heads come into question, as a clause."""
    if _has_anchor_maps(outputs):
        return " (maps of anchors that the file does not have: yolov5 or yolov7)"
    if levels_of(outputs, "rtmdet") is not None:
        return " (rtmdet, if distances are from the corner of the cell)"
    if rows_of_levels(outputs, FCOS_ROWS, 1) is not None:
        return " (fcosrows, if distances are from the corner of the cell, as in torchvision)"
    if boxes_and_scores(outputs) is not None:
        return " (boxes and logits: detr, whose last class is no object, or rtdetr)"
    if any(value.shape[1] == 7 for value in outputs.of_rank(2).values()):
        return " (end2end7, if a row is image, x1, y1, x2, y2, class, score in this order)"
    if centerface_maps(outputs) is not None:
        return " (centerface, if sizes come before offsets)"
    if any(_has_columns_of_cells(outputs, value) for value in outputs.of_rank(3).values()):
        return " (yolov8, if the columns are boxes and scores of classes, without keypoints or angles)"
    return ""


def recognized_head(outputs: DetectorOutputs) -> Head | None:
    """Return the head that the structure shows, with the settings that it says; None: it does not decide."""
    arrays = outputs.arrays
    if named_parts(arrays) is not None:
        return _described(outputs, HEADS["nms"].head)
    if indices_of(outputs) is not None:
        return _described(outputs, HEADS["indices"].head)
    rows = outputs.of_rank(3)
    flat = outputs.of_rank(2)
    if rows_and_counts(outputs) is not None and inputs_of(outputs) & PADDLE_INPUTS:
        return HEADS["paddle"].head
    columns = SELECTED + outputs.mask_coefficients
    for name, value in {**rows, **flat}.items():
        if value.shape[-1] == columns and len(rows) + len(flat) == 1 and is_selected(outputs.tensor(name)):
            return HEADS["end2end"].head
    of_levels = next(
        (name for name, form in LEVELS.items() if form.decisive and levels_of(outputs, name) is not None), None
    )
    if of_levels is not None:
        return _described(outputs, HEADS[of_levels].head)
    pair = boxes_and_scores(outputs)
    if pair is not None:
        return _of_pair(outputs, pair)
    for name, value in rows.items():
        head = _of_rows(outputs, name, value)
        if head is not None:
            return head
    maps = outputs.of_rank(4)
    if len(maps) == len(arrays) == 1 and is_concat_of(outputs.tensor(next(iter(maps))), OBJECT_BOX_CLASSES):
        return HEADS["fastestdet"].head
    return None


def _of_rows(outputs: DetectorOutputs, name: str, value: Array) -> Head | None:
    """Return the head of one array with a row or column for each cell."""
    _, first, second = value.shape
    tensor = outputs.tensor(name)
    if is_selected(tensor):
        return None
    if _has_columns_of_cells(outputs, value):
        certain = joins_boxes_and_scores(tensor, first, outputs.mask_coefficients)
        return HEADS["yolov8"].head if certain else None
    if fitting_strides(first, outputs.size, 1) and joins_scores_and_distances(tensor):
        return HEADS["nanodet"].head
    if second > 5 and fitting_strides(first, outputs.size, ANCHORS):
        return HEADS["yolov5"].head
    if second > 5 and fitting_strides(first, outputs.size, 1):
        if applies(tensor, "Exp"):
            return HEADS["yolox"].head
        if joins_levels_of(tensor, RAW_BOX_OBJECT_CLASSES):
            return replace(HEADS["yolox"].head, decoded=False)
    return None


def _has_columns_of_cells(outputs: DetectorOutputs, value: Array) -> bool:
    """Return whether an array has boxes and more for each cell, (images, columns, cells)."""
    return value.shape[1] > BOX_SIDES and fitting_strides(value.shape[2], outputs.size, 1) is not None


def _of_pair(outputs: DetectorOutputs, pair: tuple[str, str]) -> Head | None:
    """Return the head of boxes and scores: DETR if boxes end in Sigmoid, SSD if they are decoded from priors.

    Boxes of RF-DETR are offsets to those that TopK selects, and its scores are logits.
    """
    boxes = outputs.tensor(pair[0])
    form, raw_scores = box_form(boxes), activation(outputs.tensor(pair[1])) is None
    of_selected = form.corners == "cxcywh" and form.unit != "pixels" and is_selected(boxes)
    if ends_in(boxes, "Sigmoid") or (of_selected and raw_scores):
        return HEADS["rtdetr"].head if selects_queries(outputs.graph) else None
    return _described(outputs, HEADS["ssd"].head)


def _described(outputs: DetectorOutputs, head: Head) -> Head:
    """Return a head with what the graph says about its boxes and scores."""
    if head.name == "nms" and is_of_tensorflow(outputs.arrays):
        return replace(head, unit="shares")
    if head.name in ("nms", "indices") and any(size_values(name) for name in inputs_of(outputs)):
        head = replace(head, unit="pixels")  # of the size that the input is given
    if head.name == "nms" and joined_detections(outputs.arrays) is not None:
        return replace(head, unit="pixels", classes="from0")
    if head.name == "nms" and RTDETR_SIZES in inputs_of(outputs):
        return replace(head, classes="from0")
    if head.name == "indices" and head.corners is None:
        return replace(head, corners="yxyx")  # the order of NonMaxSuppression
    levels = levels_of(outputs, "fcos") if head.name == "fcos" else None
    if levels is not None:
        return replace(head, unit=distance_unit(outputs.tensor(levels[0][1]["distances"])))
    levels = levels_of(outputs, "rtmdet") if head.name == "rtmdet" else None
    if levels is not None:
        return replace(head, unit=factor_unit(outputs.tensor(levels[0][1]["distances"])))
    pair = boxes_and_scores(outputs) if head.name == "ssd" else None
    if pair is None:
        return head
    form, scores = box_form(outputs.tensor(pair[0])), outputs.tensor(pair[1])
    return replace(
        head,
        corners=form.corners,
        unit=form.unit,
        decoded=not form.raw,
        scores=activation(scores),
        background="first" if ends_in(scores, "Softmax") else "none",
    )


def inputs_of(outputs: DetectorOutputs) -> set[str]:
    """Return the names of the inputs of the model."""
    return {tensor.name for tensor in outputs.graph.inputs}


def rows_and_counts(outputs: DetectorOutputs) -> tuple[str, str] | None:
    """Return the names of rows (N, 6) of all images and of their number in each image; None: these are others."""
    rows = [name for name, value in outputs.of_rank(2).items() if value.shape[1] == SELECTED]
    counts = (
        [
            name
            for name, value in outputs.arrays.items()
            if value.dtype.kind == "i"
            and value.shape == (outputs.images,)
            and value.sum() == len(outputs.arrays[rows[0]])
        ]
        if rows
        else []
    )
    return (rows[0], counts[0]) if len(rows) == len(counts) == 1 else None


def boxes_and_scores(outputs: DetectorOutputs) -> tuple[str, str] | None:
    """Return the names of boxes (images, N, 4) and scores, if there is one of each.

    Scores are (images, N, classes), or (images, classes, N), as PP-YOLOE has them without NMS. Of two arrays with four
    columns, boxes are the one that does not end in Softmax, or whose name says so.
    """
    rows = outputs.of_rank(3)
    if len(rows) == 2 and len({value.shape[:2] for value in rows.values()}) == 2:
        return _boxes_and_columns(rows)
    if len(rows) != 2:
        return None
    boxes = [name for name, value in rows.items() if value.shape[2] == 4]
    if len(boxes) == 2:
        boxes = [name for name in boxes if not ends_in(outputs.tensor(name), "Softmax")]
    if len(boxes) == 2:
        boxes = [name for name in boxes if "box" in name.lower()]
    return (boxes[0], next(name for name in rows if name != boxes[0])) if len(boxes) == 1 else None


def _boxes_and_columns(rows: Mapping[str, Array]) -> tuple[str, str] | None:
    """Return the names of boxes (images, N, 4) and scores (images, classes, N)."""
    pairs = [pair for pair in permutations(rows) if rows[pair[0]].shape[1:] == (rows[pair[1]].shape[2], BOX_SIDES)]
    return (pairs[0][0], pairs[0][1]) if len(pairs) == 1 else None


def indices_of(outputs: DetectorOutputs) -> tuple[str, str, str] | None:
    """Return the names of boxes, scores and indices of a NonMaxSuppression whose result is an output."""
    indices = [
        name
        for name, value in outputs.arrays.items()
        if value.dtype.kind == "i" and value.shape[-1:] == (3,) and is_selected(outputs.tensor(name))
    ]
    rows = {name: value for name, value in outputs.arrays.items() if value.ndim == 3 and value.dtype.kind == "f"}
    boxes = [name for name, value in rows.items() if value.shape[2] == 4]
    scores = [
        name for name, value in rows.items() if boxes and name != boxes[0] and value.shape[2] == rows[boxes[0]].shape[1]
    ]
    return (boxes[0], scores[0], indices[0]) if len(boxes) == len(scores) == len(indices) == 1 else None


def centerface_maps(outputs: DetectorOutputs) -> tuple[str, str, str] | None:
    """Return the names of heat map, sizes and offsets, in the order of the outputs; None: these are others."""
    maps = outputs.of_rank(4)
    names = sorted(maps, key=lambda name: maps[name].shape[1])
    fits = len(maps) == len(outputs.arrays) and [maps[name].shape[1] for name in names] == [1, 2, 2, 10]
    return (names[0], names[1], names[2]) if fits else None


def _has_anchor_maps(outputs: DetectorOutputs) -> bool:
    maps = {**outputs.of_rank(4), **outputs.of_rank(5)}
    return len(maps) == len(outputs.arrays) >= 2 and all(
        value.shape[1] == ANCHORS if value.ndim == 5 else value.shape[1] % ANCHORS == 0 for value in maps.values()
    )


def _check_known(outputs: DetectorOutputs, head: Head) -> None:
    """Check that all settings of a head are known.

    Raises:
        DataError: one is not, and the message names its values; or the outputs are not those of the head.
    """
    parts: Mapping[str, Sequence[Any] | None] = {
        "nms": named_parts(outputs.arrays),
        "indices": indices_of(outputs),
        "ssd": boxes_and_scores(outputs),
        "fcos": levels_of(outputs, "fcos"),
        "rtmdet": levels_of(outputs, "rtmdet"),
    }
    if parts.get(head.name, ()) is None:
        raise DataError(unfit(outputs, head))
    has_retina_rows = rows_of_levels(outputs, RETINA_ROWS, RETINA_ANCHORS) is not None
    if not head.decoded and head.name == "ssd" and head.priors is None:
        raise DataError(
            f"the boxes of {outputs.listed} are offsets to priors, which the file does not have: give them with --head "
            "ssd:priors=FILE.npy, (N, 4) of center x, center y, width, height as shares of the image"
            f"{', or --head retinanet for the anchors of torchvision' if has_retina_rows else ''}"
        )
    needed = {"corners": head.corners, "unit": head.unit, "scores": head.scores}
    if head.priors is not None:
        needed = {"scores": head.scores}
    missing = [key for key, value in needed.items() if value is None]
    if missing:
        example = {"corners": "xyxy", "unit": "pixels", "scores": "softmax"}
        words = {"corners": "xyxy, yxyx or cxcywh", "unit": "pixels or shares", "scores": "none, sigmoid or softmax"}
        words |= {"unit": "pixels or strides"} if head.name in LEVELS else {}
        raise DataError(
            f"the structure of the model does not say {' and '.join(f'{key} ({words[key]})' for key in missing)} of "
            f"its outputs {outputs.listed}: state it, such as --head {head.name}:"
            f"{','.join(f'{key}={example[key]}' for key in missing)}"
        )
