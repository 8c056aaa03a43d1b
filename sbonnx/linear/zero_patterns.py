"""Patterns of zero weights: N:M along input channels, or any positions (unstructured)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import numpy as np

from sbonnx.errors import RecipeError
from sbonnx.linear.layer import LinearLayer
from sbonnx.report.codes import Reason
from sbonnx.spec import Array

MOST_OF: Final = 64
"""Largest M of an N:M pattern."""


@final
@dataclass(frozen=True)
class GroupSparsity:
    """N:M sparsity: of each M consecutive input channels, at one kernel tap and output, at most N weights are not zero.

    Attributes:
        kept: N.
        size: M.

    Source: NVIDIA, "Accelerating Inference with Sparsity Using the NVIDIA Ampere Architecture and NVIDIA TensorRT":
    2:4 along the input channels of a convolution, the rows of a matrix.
    """

    kept: int
    size: int

    def __str__(self) -> str:
        return f"{self.kept}:{self.size}"

    @property
    def share(self) -> float:
        """Share of the weights that become zero."""
        return 1.0 - self.kept / self.size

    def misfit(self, layer: LinearLayer) -> Reason | None:
        """Return the reason why the weight of a layer cannot have this pattern, or None."""
        channels = layer.in_channels // layer.group
        if channels % self.size == 0:
            return None
        of = " of a group" if layer.group > 1 else ""
        return Reason("channels-not-multiple", f"its {channels} input channels{of} are not a multiple of {self.size}")

    def mask(self, scores: Array, layer: LinearLayer) -> Array:
        """Return the N weights of each group with the largest scores, bool (G, O, K); `scores`: matrices (G, O, K)."""
        groups = self.groups(scores, layer)
        last = np.argpartition(groups, self.size - self.kept - 1, axis=3)[:, :, :, : self.size - self.kept]
        mask = np.ones(groups.shape, bool)
        np.put_along_axis(mask, last, False, axis=3)
        return mask.reshape(scores.shape)

    def groups(self, matrices: Array, layer: LinearLayer) -> Array:
        """Return matrices (G, O, K) as (G, O, groups, M, taps)."""
        return matrices.reshape(*matrices.shape[:2], -1, self.size, math.prod(layer.kernel))

    def excess(self, matrices: Array, layer: LinearLayer) -> int:
        """Return how many groups of a weight (G, O, K) that fits have more than N values that are not zero."""
        return int(((self.groups(matrices, layer) != 0).sum(axis=3) > self.kept).sum())


@final
@dataclass(frozen=True)
class Unstructured:
    """Zeros in any positions of a layer's weight: ``int(values * share)`` of them.

    Attributes:
        share: share of the weights of a layer that become zero.
    """

    share: float

    def __str__(self) -> str:
        return f"{self.share:g} unstructured"

    def misfit(self, layer: LinearLayer) -> Reason | None:
        """Return None: every weight can have this pattern."""
        return None

    def mask(self, scores: Array, layer: LinearLayer) -> Array:
        """Return the weights of a layer with the largest scores, bool (G, O, K); `scores`: matrices (G, O, K)."""
        count = int(scores.size * self.share + 1e-9)
        mask = np.ones(scores.size, bool)
        if count:
            mask[np.argpartition(scores.reshape(-1), count - 1)[:count]] = False
        return mask.reshape(scores.shape)


SparsityPattern: TypeAlias = GroupSparsity | Unstructured


def sparsity_pattern(text: str) -> GroupSparsity:
    """Read an N:M pattern such as "2:4".

    Raises:
        RecipeError: it is not of this form, or not ``0 < N < M <= 64``.
    """
    match = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text.strip())
    kept, size = (int(number) for number in match.groups()) if match else (0, 0)
    if not 0 < kept < size <= MOST_OF:
        raise RecipeError(
            f"sparsity pattern '{text}' is not known: write N:M with 0 < N < M <= {MOST_OF}, such as 2:4, for at most "
            "N weights that are not zero among M input channels"
        )
    return GroupSparsity(kept, size)
