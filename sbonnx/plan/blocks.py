"""The types that the recipe asks for, and weights in blocks: which values along the summed axis share a scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from sbonnx.backends import Backend
from sbonnx.graph import Node
from sbonnx.ops import MATRIX_PRODUCTS
from sbonnx.recipe import Settings
from sbonnx.spec import QuantSpec


def spec_of(backend: Backend, side: Literal["w", "a"], settings: Settings, axis: int | None) -> QuantSpec:
    """The type that the recipe asks for, as the backend spells it."""
    return replace(backend.spec(side, settings.bits, settings.symmetric, axis), kind=settings.dtype)


def weight_spec(backend: Backend, node: Node, index: int, axis: int | None, settings: Settings) -> QuantSpec:
    """The type of the weight at input `index`: in blocks where the recipe or its width ask for them."""
    spec = spec_of(backend, "w", settings, axis if settings.per_channel else None)
    taken = backend.int4_blocks if backend.alone(spec) else ()
    return in_blocks(node, index, spec, settings.block_size, taken)


def summed_axis(node: Node, index: int) -> int | None:
    """The axis of input `index` that a matrix product sums over, counted from the front; None of other ops.

    MatMul: the last but one of its right factor, the last of its left one (a vector has one only). Gemm: by transA
    and transB.
    """
    rank = len(node.inputs[index].shape)
    if node.op not in MATRIX_PRODUCTS or index > 1 or rank == 0:
        return None
    if node.op == "Gemm":
        flipped = bool(node.attrs.get("transB" if index else "transA", 0))
        return int(flipped == bool(index))
    return max(rank - 2, 0) if index else rank - 1


def block_for(length: int, wanted: int | None, taken: Sequence[int]) -> int | None:
    """The size of the blocks of an axis: what is asked for, else the largest that the runtime takes and divides it.

    Args:
        length: of the summed axis.
        wanted: what the recipe says, or None.
        taken: sizes that the runtime takes; empty where it needs no blocks.

    Returns:
        None where nothing was asked for and no size fits, or none is needed.
    """
    if wanted is not None or not taken:
        return wanted
    return next((size for size in sorted(taken, reverse=True) if length % size == 0), max(taken))


def in_blocks(node: Node, index: int, spec: QuantSpec, wanted: int | None, taken: Sequence[int] = ()) -> QuantSpec:
    """`spec` with a scale a block along the summed axis of the weight at input `index`; `spec` itself where none fits.

    Args:
        wanted, taken: see `block_for`.
    """
    axis = summed_axis(node, index)
    if axis is None:
        return spec
    size = block_for(node.inputs[index].shape[axis], wanted, taken)
    return spec if size is None else replace(spec, axis=axis, block_size=size)
