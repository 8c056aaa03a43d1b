"""Constants that do not fit but can be replaced: masks, bounds, and small numbers that guard a division."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.graph import Graph, Node, Tensor, query
from sbonnx.ops import BOUNDS, CARRIES_MASK, ROOTS
from sbonnx.plan.magnitudes import FloatKind
from sbonnx.precision.constants import finite_peak, misfit, narrowed
from sbonnx.precision.ranges import Ranges
from sbonnx.precision.slots import is_float32
from sbonnx.spec import Array

MASK_SHARE: Final = 4.0
"""Divisor of the largest number for replaced masks (float16: -16376).

Its exp is 0 next to any score, two masks and the scores can be added without overflow, and no row of a softmax becomes
all infinite.
"""

NEAR: Final = 4.0
"""Values of a tensor within this factor of the mask constant are treated as mask values."""

GUARD_ERROR: Final = 0.25
"""Tolerated relative error of a division guard: if the guard matters at all, the quotient is noise."""

UNSEEN_CHANGE: Final = 2.0**11
"""A guard this many times smaller than the value it is added to has no effect in float16."""


@dataclass(frozen=True)
class Replacement:
    """Equivalent replacement of a constant at one input of a node.

    Attributes:
        node, index: the input.
        values: float32.
        why: one sentence for the notes.
    """

    node: Node
    index: int
    values: Array
    why: str


def bound(node: Node, index: int, values: Array, kind: FloatKind) -> Replacement | None:
    """Clamp a limit beyond the range of the type to its largest number, which has the same effect on all its values."""
    if node.op not in BOUNDS or (node.op == "Clip" and index == 0) or finite_peak(values) <= kind.largest:
        return None
    clamped = np.clip(values, -kind.largest, kind.largest)
    why = (
        f"'{node.name}' ({node.op}): its limit {finite_peak(values):.3g} is {kind.largest:.6g}, the largest {kind.name}"
    )
    return Replacement(node, index, clamped, why)


def is_guard(node: Node, index: int, values: Array, kind: FloatKind) -> bool:
    """Return whether a constant keeps a divisor from 0: a small positive number, added or used as a lower limit."""
    lower = node.op in ("Add", "Max") or (node.op == "Clip" and index == 1)
    return lower and values.size > 0 and bool((values > 0).all()) and float(values.max()) < kind.normal


def guard(node: Node, index: int, values: Array, ranges: Ranges) -> Replacement | None:
    """Return the guard itself if it is accurate enough after rounding, or a larger one if no observed value changes."""
    kind = ranges.kind
    near = narrowed(values, kind).astype(np.float32)
    if bool((np.abs(near - values) <= GUARD_ERROR * values).all()):
        return Replacement(node, index, values, "")
    others = [tensor for at, tensor in enumerate(node.inputs) if at != index and is_float32(tensor)]
    found = ranges.of(others[0]) if others else None
    room = UNSEEN_CHANGE if node.op == "Add" else 1.0
    if found is None or found.lo < 0 or found.zeros or found.nan or found.smallest < kind.normal * room:
        return None
    why = (
        f"'{node.name}' ({node.op}): {float(values.min()):.1g}, which is 0 in {kind.name}, is {kind.normal:.2g} now; "
        f"what it guards was never below {found.smallest:.2g}"
    )
    return Replacement(node, index, np.full_like(values, kind.normal), why)


def guarded(node: Node) -> Iterator[Tensor]:
    """Yield the tensors that depend on a guard that must not become 0: its sum, through roots, up to the division."""
    stack = [node.outputs[0]]
    while stack:
        tensor = stack.pop()
        yield tensor
        stack.extend(reader.outputs[0] for reader, index in query.readers(tensor) if reader.op in ROOTS and index == 0)


def mask(
    node: Node, index: int, values: Array, ranges: Ranges, graph: Graph
) -> tuple[Replacement, list[Tensor]] | None:
    """Return a mask that float16 can represent, and the tensors that contain it; None if the constant is not a mask.

    A mask is a constant with huge numbers that only reaches softmaxes, through sums, products and data movement. On
    this path calibration must have seen huge values only below 0, none larger than the constant, and none between the
    mask and the range of the type: their `exp` is 0 for any size.
    """
    kind = ranges.kind
    peak = finite_peak(values)
    if peak <= kind.largest or node.op not in CARRIES_MASK:
        return None
    way = _way(node, graph)
    if way is None:
        return None
    for tensor in way:
        found = ranges.of(tensor)
        limit = 2.0 ** int(np.log2(kind.largest / MASK_SHARE))
        if found is None or found.hi > limit or found.peak > peak * (1 + 2.0**-10):
            return None
        if found.between(limit, 2.0 ** np.floor(np.log2(peak / NEAR))):
            return None
    small = kind.largest / MASK_SHARE
    huge = np.isfinite(values) & (np.abs(values) > small)
    held = np.where(huge, np.sign(values) * np.float32(small), values).astype(np.float32)
    why = f"'{node.name}' ({node.op}): the mask {peak:.3g} is {small:.6g} in {kind.name}; a softmax reads it"
    return Replacement(node, index, held, why), way


def _way(node: Node, graph: Graph) -> list[Tensor] | None:
    """Return the tensors from `node` to the softmaxes; None if anything else reads one of them, or one is an output."""
    outputs = query.output_names(graph)
    found: dict[int, Tensor] = {}
    stack = [node]
    while stack:
        for tensor in stack.pop().outputs:
            readers = query.readers(tensor)
            if id(tensor) in found or not is_float32(tensor):
                continue
            if tensor.name in outputs or not readers:
                return None
            found[id(tensor)] = tensor
            for reader, _ in readers:
                if reader.op in CARRIES_MASK:
                    stack.append(reader)
                elif reader.op != "Softmax":
                    return None
    return list(found.values())


def replacement(
    node: Node, index: int, values: Array, ranges: Ranges, graph: Graph
) -> tuple[Replacement | None, list[Tensor]]:
    """Return the replacement of a constant that does not fit, or None, and tensors that need not fit then."""
    found = bound(node, index, values, ranges.kind)
    if found is not None:
        return found, []
    if is_guard(node, index, values, ranges.kind):
        return guard(node, index, values, ranges), []
    held = mask(node, index, values, ranges, graph)
    return (None, []) if held is None else held


__all__ = ["Replacement", "guarded", "is_guard", "misfit", "replacement"]
