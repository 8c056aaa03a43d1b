"""`HeadDecoder`: outputs of a detector as the boxes, scores and classes that mean average precision takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np

from sbonnx.detectors.box_selection import Decoded
from sbonnx.detectors.class_numbers import in_labels
from sbonnx.detectors.decode import decoded
from sbonnx.detectors.head import Head, HeadChoice
from sbonnx.detectors.outputs import DetectorOutputs
from sbonnx.detectors.recognize import resolved_head
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.metrics.boxes import CATEGORIES, PLACEMENT, Boxes, detections, named_parts
from sbonnx.spec import Array

IMAGE_CHANNELS = (1, 3)


@final
class HeadDecoder:
    """Decodes the outputs of a detector, feed by feed. The head is resolved by the first one.

    Outputs that are detections already pass unchanged if the labels have no placement: their unit is that of the
    labels. Otherwise detections are in pixels of the input of the model, and their class numbers those of the labels.

    Args:
        load: returns the graph of the model; called only if the head is needed.
        choice: the head that the user states; None: recognized.
    """

    def __init__(self, load: Callable[[], Graph], choice: HeadChoice | None = None) -> None:
        self._load, self._choice = load, choice
        self._known: tuple[Graph, Head] | None = None

    @property
    def stated(self) -> bool:
        """Whether the user states the head."""
        return self._choice is not None

    def __call__(
        self, outputs: Mapping[str, Any], feed: Mapping[str, Array], labels: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return ``boxes``, ``scores`` and ``classes`` of a feed, padded with class -1.

        Raises:
            DataError: the head cannot be recognized or does not fit; the classes are not those of the labels.
        """
        result = self._decoded(outputs, feed, labels)
        if result is None:
            return {name: np.asarray(value) for name, value in outputs.items()}
        decoded_boxes, head = result
        categories = (labels.get(CATEGORIES) or [None])[0]
        return _padded([in_labels(boxes, decoded_boxes.classes, head, categories) for boxes in decoded_boxes.images])

    def check(self, outputs: Mapping[str, Any], feed: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        """Check that the head is stated or recognized, and fits outputs of these shapes, whatever their values.

        Raises:
            DataError: it does not.
        """
        self._decoded(outputs, feed, labels)

    def _decoded(
        self, outputs: Mapping[str, Any], feed: Mapping[str, Array], labels: Mapping[str, Any]
    ) -> tuple[Decoded, Head] | None:
        """Return the boxes of each image, and the head; None if the outputs are detections already."""
        arrays = {name: np.asarray(value) for name, value in outputs.items()}
        if self._choice is None and PLACEMENT not in labels and _are_detections(arrays):
            return None
        images, size = _input_form(feed, labels)
        if self._known is None:
            graph = self._load()
            self._known = graph, resolved_head(DetectorOutputs(graph, arrays, size, images), self._choice)
        graph, head = self._known
        return decoded(DetectorOutputs(graph, arrays, size, images), head), head


def _are_detections(arrays: Mapping[str, Array]) -> bool:
    """Return whether outputs have a layout of detections after NMS."""
    if len(arrays) == 1:
        return next(iter(arrays.values())).shape[-1:] == (6,) and bool(detections(arrays))
    return named_parts(arrays) is not None


def _input_form(feed: Mapping[str, Array], labels: Mapping[str, Any]) -> tuple[int, tuple[int, int]]:
    """Return the number of images of a feed, and height and width of the image input.

    Raises:
        DataError: no input is an image.
    """
    if PLACEMENT in labels:
        size: tuple[int, int] = labels[PLACEMENT][0].size
        return len(labels[PLACEMENT]), size
    for value in feed.values():
        shape = np.shape(value)[-3:]
        images = int(np.shape(value)[0]) if np.ndim(value) == 4 else 1
        if len(shape) == 3 and shape[0] in IMAGE_CHANNELS:
            return images, (int(shape[1]), int(shape[2]))
        if len(shape) == 3 and shape[2] in IMAGE_CHANNELS:
            return images, (int(shape[0]), int(shape[1]))
    raise DataError("the model has no image input (N, C, H, W) or (N, H, W, C): decode its outputs with --decode")


def _padded(images: list[Boxes]) -> dict[str, Any]:
    """Return the detections of images as arrays of equal length."""
    longest = max((len(boxes.scores) for boxes in images), default=0)
    corners = np.zeros((len(images), longest, 4))
    scores, classes = np.zeros((len(images), longest)), np.full((len(images), longest), -1)
    for place, boxes in enumerate(images):
        used = slice(len(boxes.scores))
        corners[place, used], scores[place, used], classes[place, used] = boxes.corners, boxes.scores, boxes.classes
    return {"boxes": corners, "scores": scores, "classes": classes}
