"""Removal of no-op nodes with input "x", and shape helpers of the patterns that use it."""

from __future__ import annotations

from math import prod

import numpy as np

from sbonnx.graph import Tensor

from ..edit import Edit
from ..match import Match

ALL = 2**31 - 1
"""A Slice with this end or a larger one has no upper limit: exporters write INT32_MAX or INT64_MAX."""


def drop(match: Match, edit: Edit) -> None:
    """Replace the root's first output by "x"."""
    edit.replace(match.root.outputs[0], match["x"])


def why_not_drop(match: Match) -> str | None:
    """Return why "x" cannot replace the root's first output, or None."""
    return match.why_not_replace(match.root.outputs[0], match["x"])


def rank(tensor: Tensor) -> int | None:
    """Return the number of dimensions, None if unknown."""
    return None if tensor.shape is None else len(tensor.shape)


def sizes(tensor: Tensor) -> tuple[int | None, ...] | None:
    """Return the dimensions, None for those that are not known numbers; None if the rank is unknown."""
    return None if tensor.shape is None else tuple(dim if isinstance(dim, int) else None for dim in tensor.shape)


def static(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions if all are known numbers, else None."""
    known = sizes(tensor)
    return None if known is None or None in known else tuple(dim for dim in known if dim is not None)


def elements(tensor: Tensor) -> int | None:
    """Return the number of elements, None if unknown."""
    known = static(tensor)
    return None if known is None else prod(known)


def integers(values: np.ndarray) -> list[int]:
    """Convert a small integer tensor to a flat list."""
    return [int(value) for value in values.reshape(-1)]
