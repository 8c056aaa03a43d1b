"""Outputs of heads as detections of each image, in pixels of the input: one function a head.

Formulas are those of the reference implementations, named at each function. A box with several classes above the score
gives several detections, as these do for mAP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from sbonnx.detectors.box_selection import Decoded, best_of, corners_of, multi_label, sigmoid, softmax
from sbonnx.detectors.head import Head
from sbonnx.detectors.level_maps import centerface, fcos, grid_of, nanodet, picodet, rtmdet, scrfd, yunet
from sbonnx.detectors.outputs import ANCHORS, DetectorOutputs, fitting_strides
from sbonnx.detectors.recognize import SELECTED, boxes_and_scores, indices_of, rows_and_counts, unfit
from sbonnx.detectors.torchvision_rows import fcos_rows, retinanet
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import Boxes, boxes_of, detections
from sbonnx.spec import Array

ANCHOR_SIZES: Final[Mapping[str, tuple[tuple[tuple[int, int], ...], ...]]] = {
    "yolov5": (
        ((10, 13), (16, 30), (33, 23)),
        ((30, 61), (62, 45), (59, 119)),
        ((116, 90), (156, 198), (373, 326)),
    ),
    "yolov7": (
        ((12, 16), (19, 36), (40, 28)),
        ((36, 75), (76, 55), (72, 146)),
        ((142, 110), (192, 243), (459, 401)),
    ),
}
"""Widths and heights of the anchors of strides 8, 16, 32 in pixels (models/yolov5s.yaml, cfg/training/yolov7.yaml)."""

VARIANCES: Final = (0.1, 0.2)
"""Factors of the offsets of centers and sizes to priors (SSD)."""


def decoded(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode the outputs of a feed.

    Raises:
        DataError: the outputs are not those of the head.
    """
    return _DECODERS[head.name](outputs, head)


def _rows(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode (images, N, 5 + classes) of center, size, object and classes (YOLOv5, v7), or maps of anchors.

    Of models with masks, whose coefficients are the last columns, only the boxes.
    """
    for rows in outputs.of_rank(3).values():
        if rows.shape[2] > 5 and fitting_strides(rows.shape[1], outputs.size, ANCHORS):
            return _of_objects(rows, head, outputs.mask_coefficients)
    masks = outputs.mask_coefficients if outputs.of_rank(5) else 0
    return _of_objects(_of_anchor_maps(outputs, head), head, masks)


def _of_objects(rows: Array, head: Head, masks: int = 0) -> Decoded:
    """Select among rows of center, size, object and classes, without the coefficients of masks after them."""
    classes = rows.shape[2] - 5 - masks
    return Decoded(
        [
            multi_label(corners_of(image[:, :4]), image[:, 4:5] * image[:, 5 : 5 + classes], head)
            for image in rows.astype(np.float64)
        ],
        classes,
    )


def _of_anchor_maps(outputs: DetectorOutputs, head: Head) -> Array:
    """Decode raw maps, (images, 3, h, w, 5 + classes) or (images, 3 (5 + classes), h, w), to rows.

    Source: YOLOv5 models/yolo.py, Detect.forward: xy = (2 s - 0.5 + cell) stride, wh = (2 s)^2 anchor.
    """
    maps = []
    for value in (outputs.of_rank(5) or outputs.of_rank(4)).values():  # beside the first, the second are of masks
        if value.ndim == 4 and value.shape[1] % ANCHORS == 0:
            value = value.reshape(len(value), ANCHORS, -1, *value.shape[2:]).transpose(0, 1, 3, 4, 2)
        maps.append(value)
    maps.sort(key=lambda value: -value.shape[2])
    sizes = ANCHOR_SIZES[head.name]
    if len(maps) != len(sizes) or any(value.ndim != 5 or value.shape[1] != ANCHORS for value in maps):
        raise DataError(unfit(outputs, head))
    rows = []
    for value, anchors in zip(maps, sizes, strict=True):
        shares = sigmoid(value.astype(np.float64))
        height, width = value.shape[2:4]
        stride = (outputs.size[1] / width, outputs.size[0] / height)
        grid = np.stack(np.meshgrid(np.arange(width), np.arange(height)), 2)
        shares[..., :2] = (shares[..., :2] * 2 - 0.5 + grid) * stride
        shares[..., 2:4] = (shares[..., 2:4] * 2) ** 2 * np.array(anchors, np.float64)[:, None, None]
        rows.append(shares.reshape(len(value), -1, value.shape[4]))
    return np.concatenate(rows, 1)


def _columns(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode (images, 4 + classes, N) of center, size and classes (YOLOv8). Of models with masks, only the boxes."""
    columns = _array(outputs, head, lambda value: value.ndim == 3 and value.shape[1] > 4)
    classes = columns.shape[1] - 4 - outputs.mask_coefficients
    images = columns.transpose(0, 2, 1).astype(np.float64)
    return Decoded(
        [multi_label(corners_of(image[:, :4]), image[:, 4 : 4 + classes], head) for image in images], classes
    )


def _yolox(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode (images, N, 5 + classes), a row for each cell.

    Source: YOLOX yolox/models/yolo_head.py, decode_outputs: xy = (raw + cell) stride, wh = exp(raw) stride.
    """
    rows = _array(outputs, head, lambda value: value.ndim == 3 and value.shape[2] > 5)
    rows = rows.astype(np.float64)
    strides = fitting_strides(rows.shape[1], outputs.size, 1)
    if strides is None:
        raise DataError(unfit(outputs, head))
    if not head.decoded:
        grids, scales = [], []
        for stride in strides:
            grids.append(grid_of(outputs.size, stride))
            scales.append(np.full((len(grids[-1]), 1), stride))
        grid, scale = np.concatenate(grids), np.concatenate(scales)
        rows[..., :2] = (rows[..., :2] + grid) * scale
        rows[..., 2:4] = np.exp(rows[..., 2:4]) * scale
    return _of_objects(rows, head)


def _after_selection(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode detections that the graph has selected: rows of six, or outputs by name."""
    arrays = dict(outputs.arrays)
    if head.name == "end2end":
        columns = SELECTED + outputs.mask_coefficients
        arrays = {"rows": _array(outputs, head, lambda value: value.shape[-1] == columns)[..., :SELECTED]}
    images = [
        best_of(Boxes(_in_pixels(_ordered(boxes.corners, head), head, outputs.size), boxes.classes, boxes.scores), head)
        for boxes in detections(arrays)
    ]
    return Decoded(images, None)


def _numbered_rows(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode rows (N, 7) of image, x1, y1, x2, y2, class, score of all images.

    Source: YOLOv7 models/experimental.py, ONNX_ORT.
    """
    rows = _array(outputs, head, lambda value: value.ndim == 2 and value.shape[1] == 7).astype(np.float64)
    numbers = np.rint(rows[:, 0])
    images = []
    for number in range(outputs.images):
        of_image = rows[numbers == number]
        images.append(best_of(Boxes(of_image[:, 1:5], np.rint(of_image[:, 5]).astype(np.int64), of_image[:, 6]), head))
    return Decoded(images, None)


def _counted_rows(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode rows (N, 6) of class, score, x1, y1, x2, y2 of all images, image by image, and their numbers (images,).

    Source: PaddleDetection ppdet/modeling/post_process.py, BBoxPostProcess; a row of class -1 says that there is none.
    """
    names = rows_and_counts(outputs)
    if names is None:
        raise DataError(unfit(outputs, head))
    rows, counts = (outputs.arrays[name] for name in names)
    images = np.split(rows.astype(np.float64), np.cumsum(counts)[:-1])
    return Decoded([best_of(boxes_of(image[:, 2:], image[:, 0], image[:, 1]), head) for image in images], None)


def _indices(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode boxes (images, N, 4), scores (images, classes, N) and rows (image, class, box) of NonMaxSuppression."""
    names = indices_of(outputs)
    if names is None:
        raise DataError(unfit(outputs, head))
    boxes, scores, chosen = (outputs.arrays[name] for name in names)
    chosen = chosen.reshape(-1, 3)
    chosen = chosen[(chosen >= 0).all(1)]
    images = []
    for number in range(len(boxes)):
        image, classes, places = chosen[chosen[:, 0] == number].T
        corners = _in_pixels(_ordered(boxes[image, places].astype(np.float64), head), head, outputs.size)
        images.append(best_of(Boxes(corners, classes, scores[image, classes, places].astype(np.float64)), head))
    return Decoded(images, scores.shape[1])


def _priors(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode boxes (images, N, 4) and scores of priors or cells (SSD, RetinaNet, UltraFace, PP-YOLOE without NMS)."""
    boxes, scores = _boxes_and_scores(outputs, head)
    if head.priors is not None:
        corners = _from_priors(boxes, prior_boxes(head.priors, boxes.shape[1]))
        corners = corners * np.tile(outputs.size[::-1], 2)
    else:
        corners = _in_pixels(_ordered(boxes, head), head, outputs.size)
    shares = _activated(scores, head)
    return Decoded(
        [
            multi_label(image, confidence, head)
            for image, confidence in zip(corners, _without_background(shares, head), strict=True)
        ],
        scores.shape[2],
    )


def _queries(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode logits (images, queries, classes) and boxes (images, queries, 4).

    Source: DETR models/detr.py, PostProcess: the best class of each query; Deformable DETR and RT-DETR: the best of all
    pairs of query and class.
    """
    boxes, logits = _boxes_and_scores(outputs, head)
    corners = _in_pixels(_ordered(boxes, head), head, outputs.size)
    shares = _without_background(_activated(logits, head), head)
    images = []
    for image, confidence in zip(corners, shares, strict=True):
        if head.background == "none":
            images.append(multi_label(image, confidence, head))
        else:
            best = confidence.argmax(1)
            images.append(best_of(Boxes(image, best, confidence[np.arange(len(best)), best]), head))
    return Decoded(images, logits.shape[2])


def _fastestdet(outputs: DetectorOutputs, head: Head) -> Decoded:
    """Decode (images, 5 + classes, h, w): object, offsets, sizes, classes.

    Source: FastestDet utils/tool.py, handle_preds: score = object^0.6 class^0.4, center = (cell + tanh) / cells,
    size = sigmoid.
    """
    maps = _array(outputs, head, lambda value: value.ndim == 4 and value.shape[1] > 5)
    images = []
    for image in maps.astype(np.float64):
        height, width = image.shape[1:]
        columns, lines = np.meshgrid(np.arange(width), np.arange(height))
        center = np.stack([(columns + np.tanh(image[1])) / width, (lines + np.tanh(image[2])) / height], 2)
        sizes = sigmoid(image[3:5]).transpose(1, 2, 0)
        corners = np.concatenate([center - sizes / 2, center + sizes / 2], 2).reshape(-1, 4)
        best = image[5:].argmax(0).reshape(-1)
        scores = np.clip(image[0], 0, None) ** 0.6 * np.clip(image[5:].max(0), 0, None) ** 0.4
        images.append(best_of(Boxes(corners * np.tile(outputs.size[::-1], 2), best, scores.reshape(-1)), head))
    return Decoded(images, maps.shape[1] - 5)


_DECODERS: Final[Mapping[str, Callable[[DetectorOutputs, Head], Decoded]]] = {
    "yolov5": _rows,
    "yolov7": _rows,
    "yolov8": _columns,
    "yolox": _yolox,
    "end2end": _after_selection,
    "end2end7": _numbered_rows,
    "paddle": _counted_rows,
    "nms": _after_selection,
    "indices": _indices,
    "ssd": _priors,
    "detr": _queries,
    "rtdetr": _queries,
    "fastestdet": _fastestdet,
    "picodet": picodet,
    "nanodet": nanodet,
    "fcos": fcos,
    "fcosrows": fcos_rows,
    "retinanet": retinanet,
    "rtmdet": rtmdet,
    "scrfd": scrfd,
    "yunet": yunet,
    "centerface": centerface,
}


def _array(outputs: DetectorOutputs, head: Head, fits: Callable[[Array], bool]) -> Array:
    """Return the first output that fits.

    Raises:
        DataError: none does.
    """
    values = [value for value in outputs.arrays.values() if value.dtype.kind == "f" and fits(value)]
    if not values:
        raise DataError(unfit(outputs, head))
    return values[0]


def _boxes_and_scores(outputs: DetectorOutputs, head: Head) -> tuple[Array, Array]:
    """Return boxes (images, N, 4) and scores (images, N, classes), float64."""
    names = boxes_and_scores(outputs)
    if names is None:
        raise DataError(unfit(outputs, head))
    boxes, scores = (outputs.arrays[name].astype(np.float64) for name in names)
    return boxes, scores if scores.shape[1] == boxes.shape[1] else scores.transpose(0, 2, 1)


def _ordered(boxes: Array, head: Head) -> Array:
    """Return x1, y1, x2, y2 of boxes in the order of the head."""
    if head.corners == "cxcywh":
        return corners_of(boxes)
    ordered: Array = boxes[..., [1, 0, 3, 2]] if head.corners == "yxyx" else boxes
    if head.name == "indices":  # NonMaxSuppression takes any two opposite corners
        ordered = np.concatenate(
            [np.minimum(ordered[..., :2], ordered[..., 2:]), np.maximum(ordered[..., :2], ordered[..., 2:])], -1
        )
    return ordered


def _in_pixels(corners: Array, head: Head, size: tuple[int, int]) -> Array:
    return corners * np.tile(size[::-1], 2) if head.unit == "shares" else corners


def _activated(scores: Array, head: Head) -> Array:
    """Apply the activation that the scores still need."""
    if head.scores == "sigmoid":
        return sigmoid(scores)
    if head.scores == "softmax":
        return softmax(scores)
    return scores


def _without_background(scores: Array, head: Head) -> Array:
    return scores[..., 1:] if head.background == "first" else scores[..., :-1] if head.background == "last" else scores


def prior_boxes(path: str, count: int) -> Array:
    """Read prior boxes, (count, 4) of center x, center y, width, height as shares of the image.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """
    try:
        priors = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"the priors '{path}' cannot be read: {error}") from error
    if getattr(priors, "shape", None) != (count, 4) or priors.dtype.kind != "f":
        raise DataError(f"the priors '{path}' must be float ({count}, 4)")
    return np.asarray(priors, np.float64)


def _from_priors(offsets: Array, priors: Array) -> Array:
    """Decode offsets to priors, shape (images, N, 4), to corners as shares.

    Source: Liu et al., SSD: Single Shot MultiBox Detector, equation 2, with the variances of its code.
    """
    centers = priors[:, :2] + offsets[..., :2] * VARIANCES[0] * priors[:, 2:]
    sizes = priors[:, 2:] * np.exp(offsets[..., 2:] * VARIANCES[1])
    return corners_of(np.concatenate([centers, sizes], -1))
