"""Quantization types of the recipe as the backend spells them, and block-wise weights along the reduction axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from sbonnx.backends import Backend
from sbonnx.graph import Node
from sbonnx.linear.layer import channel_axes
from sbonnx.ops import MATRIX_PRODUCTS
from sbonnx.recipe import TensorSettings
from sbonnx.spec import QuantSpec


def spec_of(backend: Backend, side: Literal["w", "a"], settings: TensorSettings, axis: int | None) -> QuantSpec:
    """Return the type that the recipe asks for, as the backend spells it."""
    return replace(backend.spec(side, settings.bits, settings.symmetric, axis), kind=settings.dtype)


def weight_spec(backend: Backend, node: Node, index: int, axis: int | None, settings: TensorSettings) -> QuantSpec:
    """Return the type of the weight at input `index`, block-wise if the recipe or the bit width requires it."""
    spec = spec_of(backend, "w", settings, axis if settings.per_channel else None)
    taken = backend.int4_blocks if backend.alone(spec) else ()
    return in_blocks(node, index, spec, settings.block_size, taken)


def block_for(length: int, wanted: int | None, taken: Sequence[int]) -> int | None:
    """Return the block size of an axis: the requested one, else the largest supported size that divides the axis.

    Args:
        length: size of the reduction axis.
        wanted: block size from the recipe, or None.
        taken: block sizes that the runtime supports; empty if it needs no blocks.

    Returns:
        The block size, or None if none was requested and the runtime needs no blocks. If no supported size divides
        `length`, the largest supported size.
    """
    if wanted is not None or not taken:
        return wanted
    return next((size for size in sorted(taken, reverse=True) if length % size == 0), max(taken))


def in_blocks(node: Node, index: int, spec: QuantSpec, wanted: int | None, taken: Sequence[int] = ()) -> QuantSpec:
    """Return `spec` with one scale per block along the reduction axis of the weight; `spec` unchanged if there is none.

    Args:
        wanted, taken: see `block_for`.
    """
    shape = node.inputs[index].shape
    _, axis = channel_axes(node.op, node.attrs, len(shape), index)
    if axis is None or node.op not in MATRIX_PRODUCTS:
        return spec
    size = block_for(shape[axis], wanted, taken)
    return spec if size is None else replace(spec, axis=axis, block_size=size)
