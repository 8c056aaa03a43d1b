"""Inputs of detectors besides the image: sizes, scale factors and masks, filled from the size of the model's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from sbonnx.calib.data.validate import InputSpec
from sbonnx.metrics.image_sizes import size_values
from sbonnx.report.codes import Note
from sbonnx.spec import Array

PIXEL_MASK: Final = "pixel_mask"
"""Input (N, H, W) of DETR in transformers: 1 where the image is."""


def size_inputs(inputs: Sequence[InputSpec]) -> list[InputSpec]:
    """Return the inputs that are filled: those whose name and shape both say so, besides another one."""
    filled = [spec for spec in inputs if _takes_sizes(spec) or _is_pixel_mask(spec)]
    return filled if len(filled) < len(inputs) else []


def _takes_sizes(spec: InputSpec) -> bool:
    """Return whether an input is (N, values of its name)."""
    count = len(size_values(spec.name))
    if not count or spec.dtype is None or spec.dtype.kind not in "fiu" or spec.shape is None or len(spec.shape) != 2:
        return False
    return not isinstance(spec.shape[1], int) or spec.shape[1] == count


def _is_pixel_mask(spec: InputSpec) -> bool:
    kinds = spec.name == PIXEL_MASK and spec.dtype is not None and spec.dtype.kind in "iub"
    return kinds and spec.shape is not None and len(spec.shape) == 3


def size_array(spec: InputSpec, images: int, size: tuple[int, int]) -> Array:
    """Return the values of an input of `size_inputs`.

    Args:
        images: number of images of the feed.
        size: height and width of the image input.
    """
    if spec.name == PIXEL_MASK:
        sides = (
            [dim if isinstance(dim, int) and dim > 0 else side for dim, side in zip(spec.shape[1:], size, strict=True)]
            if spec.shape
            else size
        )
        return np.ones((images, *sides), spec.dtype)
    values = {"height": size[0], "width": size[1], "1": 1}
    return np.array([[values[name] for name in size_values(spec.name)]] * images, spec.dtype)


def size_notes(inputs: Sequence[InputSpec]) -> list[Note]:
    """Return a note that says what is filled; none without such inputs."""
    if not inputs:
        return []
    filled = ", ".join(
        f"'{spec.name}' with ones"
        if spec.name == PIXEL_MASK
        else f"'{spec.name}' with {', '.join(size_values(spec.name))}"
        for spec in inputs
    )
    return [
        Note(
            "input-filled",
            f"filled besides the image: {filled} of the model's input, so that boxes are in its pixels; for other "
            "values give a Python file, data.py:f",
        )
    ]
