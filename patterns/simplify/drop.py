"""How a node whose output is its input "x" is taken out, and the look of tensors that such patterns share."""

from __future__ import annotations

from math import prod

import numpy as np

from sbonnx.graph import Tensor

from ..edit import Edit
from ..match import Match

ALL = 2**31 - 1
"""A Slice that ends here or later takes everything: exporters write INT32_MAX or INT64_MAX."""


def drop(match: Match, edit: Edit) -> None:
    """Let "x" stand for the root's first output."""
    edit.replace(match.root.outputs[0], match["x"])


def why_not_drop(match: Match) -> str | None:
    """The reason why "x" cannot stand for the root's first output, or None."""
    return match.why_not_replace(match.root.outputs[0], match["x"])


def rank(tensor: Tensor) -> int | None:
    """Number of dimensions, None when not known."""
    return None if tensor.shape is None else len(tensor.shape)


def sizes(tensor: Tensor) -> tuple[int | None, ...] | None:
    """The dimensions as far as they are known numbers; None when the rank is not known."""
    return None if tensor.shape is None else tuple(dim if isinstance(dim, int) else None for dim in tensor.shape)


def static(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions when all are known numbers, else None."""
    known = sizes(tensor)
    return None if known is None or None in known else tuple(dim for dim in known if dim is not None)


def elements(tensor: Tensor) -> int | None:
    """Number of elements, None when not known."""
    known = static(tensor)
    return None if known is None else prod(known)


def integers(values: np.ndarray) -> list[int]:
    """A small integer tensor as a flat list."""
    return [int(value) for value in values.reshape(-1)]
