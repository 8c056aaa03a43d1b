"""Inputs of detectors that take the size of the image, and what they get.

Such a model maps its boxes back to the image. It gets the size of its own input and factors of 1, so that its boxes are
in pixels of the input, as those of other detectors, also after letterbox and crop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

SizeValue = Literal["height", "width", "1"]

PADDLE_INPUTS: Final = frozenset({"im_shape", "scale_factor"})
"""Inputs of exports of PaddleDetection."""

_VALUES: Final[Mapping[str, tuple[SizeValue, ...]]] = {
    "orig_target_sizes": ("width", "height"),
    "im_shape": ("height", "width"),
    "scale_factor": ("1", "1"),
    "im_info": ("height", "width", "1"),
    "image_shape": ("height", "width"),
}
"""Values by name of the input.

Source: RT-DETR, D-FINE tools/export_onnx.py (orig_target_sizes); PaddleDetection (im_shape, scale_factor); Caffe and
OpenVINO Faster R-CNN (im_info); YOLOv3 of the ONNX model zoo (image_shape).
"""


def size_values(name: str) -> tuple[SizeValue, ...]:
    """Return the values of an input of this name, for each image; empty: it takes no size."""
    return _VALUES.get(name, ())
