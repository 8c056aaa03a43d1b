"""Weight layout of linear ops: matrices (groups, outputs, inputs), multiplied with rows of inputs (im2col)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbonnx.ops import EMBEDDING, LINEAR
from sbonnx.spec import Array, QParams


@dataclass(frozen=True)
class Layout:
    """View of a linear op's weight as ``groups`` matrices of (outputs, inputs).

    The output of the op is, group by group, ``rows @ matrix.T``, with the rows of `sbonnx.linear.im2col.Geometry` (for
    a convolution the unfolded windows).

    Attributes:
        op: "Conv", "ConvTranspose", "Gemm", "MatMul" or "Gather" (an embedding).
        shape: of the weight in the file.
        groups, outputs, inputs: G, O and K; ``G * O * K`` is the number of weights.
        split: shape to which the weight is reshaped first.
        order: axes permutation applied next; the result is reshaped to (G, O, K).
    """

    op: str
    shape: tuple[int, ...]
    groups: int
    outputs: int
    inputs: int
    split: tuple[int, ...]
    order: tuple[int, ...]

    def matrices(self, weight: Array) -> Array:
        """Return `weight`, or any array of its shape, as (G, O, K). May share memory with `weight`."""
        wide = weight.reshape(self.split).transpose(self.order)
        return np.asarray(wide.reshape(self.groups, self.outputs, self.inputs))

    def weight(self, matrices: Array) -> Array:
        """Inverse of `matrices`: convert (G, O, K) to the file layout."""
        wide = matrices.reshape([self.split[axis] for axis in self.order])
        return np.ascontiguousarray(wide.transpose(np.argsort(self.order)).reshape(self.shape))

    def spread(self, values: Array, qparams: QParams) -> Array:
        """Broadcast scales or zero points of `qparams` to all weights, (G, O, K), dtype as `values`; read only."""
        wide = qparams.along(values, self.shape)
        return self.matrices(np.broadcast_to(wide, self.shape))


def layout_of(op: str, attributes: Mapping[str, Any], shape: tuple[int, ...]) -> Layout | None:
    """Return the layout of a weight of `shape`, or None if the op is not a product of rows and a constant matrix.

    Args:
        op: operator type.
        attributes: of the node, as graphsurgeon stores them.
        shape: of the weight in the file.

    Source: ONNX Conv (weight M, C/group, *kernel), ConvTranspose (C, M/group, *kernel), Gemm, MatMul, Gather.
    """
    if 0 in shape:
        return None
    if op == "Conv" and len(shape) >= 3:
        groups = int(attributes.get("group", 1))
        split = (groups, shape[0] // groups, *shape[1:])
        return _layout(op, shape, split, tuple(range(len(split))))
    if op == "ConvTranspose" and len(shape) >= 3:
        groups = int(attributes.get("group", 1))
        split = (groups, shape[0] // groups, *shape[1:])
        return _layout(op, shape, split, (0, 2, 1, *range(3, len(split))))
    if op == "Gemm" and len(shape) == 2:
        split = (1, *shape)
        return _layout(op, shape, split, (0, 1, 2) if attributes.get("transB", 0) else (0, 2, 1))
    if op == "MatMul" and len(shape) >= 2:
        split = (math.prod(shape[:-2]), *shape[-2:])
        return _layout(op, shape, split, (0, 2, 1))
    if op in EMBEDDING and len(shape) >= 1 and int(attributes.get("axis", 0)) == 0:
        split = (shape[0], math.prod(shape[1:]), 1)
        return _layout(op, shape, split, (0, 1, 2))
    return None


def _layout(op: str, shape: tuple[int, ...], split: tuple[int, ...], order: tuple[int, ...]) -> Layout:
    groups, outputs = split[order[0]], split[order[1]]
    return Layout(op, shape, groups, outputs, math.prod(shape) // (groups * outputs), split, order)


KNOWN = frozenset(LINEAR) | EMBEDDING
"""Ops supported by `layout_of`."""
