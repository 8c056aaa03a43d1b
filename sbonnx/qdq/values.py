"""What Q and DQ nodes compute of constants, for every form that ONNX has: per tensor, per channel, in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.graph import Node, query
from sbonnx.ops import DEQUANTIZE
from sbonnx.spec import Array

DEFAULT_AXIS: Final = 1
"""Of Q and DQ, where no attribute says it."""


@dataclass(frozen=True)
class Numbers:
    """The constants of one Q or DQ node.

    Attributes:
        scale: as stored: shape (), (C,) or that of the data with one dimension divided; its type is the float type.
        zero: the zero point in the type of the codes, shape of `scale`; all zeros where the file has none.
        axis: the attribute, or 1; negative counts from the end.
        block: ``block_size``, or 0 (blocks can be told by the shape of the scale as well).
    """

    scale: Array
    zero: Array
    axis: int = DEFAULT_AXIS
    block: int = 0

    def spread(self, values: Array, shape: tuple[int, ...]) -> Array:
        """`values` of the scale's shape, so that they broadcast against data of `shape`.

        Raises:
            ValueError: they do not fit.
        """
        if values.size == 1:
            return values.reshape(())
        axis = self.axis % len(shape)
        if values.ndim == 1 and not (self.block and values.ndim == len(shape)):
            if values.size != shape[axis]:
                raise ValueError(f"{values.size} scales along axis {axis} of length {shape[axis]}")
            return values.reshape([-1 if at == axis else 1 for at in range(len(shape))])
        differ = [at for at, (one, other) in enumerate(zip(shape, values.shape, strict=True)) if one != other]
        if len(differ) > 1:
            raise ValueError(f"scales of shape {values.shape} for data of shape {shape}")
        at = differ[0] if differ else axis
        length = self.block or -(-shape[at] // values.shape[at])
        wide = np.repeat(values, length, axis=at)
        return np.take(wide, np.arange(shape[at]), axis=at)

    def dequantize(self, codes: Array, dtype: Any = None) -> Array:
        """``(codes - zero) * scale``, computed in float32, in `dtype` (the scale's where None)."""
        scale = self.spread(self.scale, codes.shape).astype(np.float32)
        if is_integer(codes.dtype):
            steps = codes.astype(np.int64) - self.spread(self.zero, codes.shape).astype(np.int64)
        else:
            steps = codes
        return np.asarray((steps.astype(np.float32) * scale).astype(self.scale.dtype if dtype is None else dtype))

    def dequantized(self, codes: Array, dtype: Any = None) -> Array | None:
        """`dequantize`, or None where the scales do not fit the codes: then the file is wrong, and lint says so."""
        try:
            return self.dequantize(codes, dtype)
        except ValueError:
            return None

    def quantize(self, x: Array) -> Array:
        """Integer codes of `x`: ``saturate(round_half_even(x / scale) + zero)``, in the zero point's type."""
        low, high = limits(self.zero.dtype)
        scale = self.spread(self.scale, x.shape).astype(np.float32)
        zero = self.spread(self.zero, x.shape).astype(np.float32)
        with np.errstate(all="ignore"):
            codes = np.rint(x.astype(np.float32) / scale) + zero
        return np.asarray(np.clip(np.nan_to_num(codes), low, high).astype(np.int64).astype(self.zero.dtype))

    def steps(self, codes: Array) -> Array:
        """``codes - zero``, int64, shape of `codes`."""
        return np.asarray(codes.astype(np.int64) - self.spread(self.zero, codes.shape).astype(np.int64))


def is_integer(kind: Any) -> bool:
    """Whether a type of codes is one of integers, not of small floats."""
    return str(np.dtype(kind)).lstrip("u").startswith("int")


def limits(kind: Any) -> tuple[int, int]:
    """Lowest and highest code of an integer type, int4 and uint4 included."""
    name = str(np.dtype(kind))
    bits = int("".join(letter for letter in name if letter.isdigit()))
    return (0, (1 << bits) - 1) if name.startswith("u") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def numbers(node: Node) -> Numbers | None:
    """The numbers of a Q or DQ node, None where they are not all constants."""
    scale = query.constant(node.inputs[1])
    has_zero = len(node.inputs) > 2 and not node.inputs[2].is_empty()
    zero = query.constant(node.inputs[2]) if has_zero else None
    if scale is None or (has_zero and zero is None):
        return None
    if zero is None:
        zero = np.zeros(scale.shape, _kind(node))
    axis = int(node.attrs.get("axis", DEFAULT_AXIS))
    return Numbers(scale, zero, axis, int(node.attrs.get("block_size", 0)))


def _kind(node: Node) -> Any:
    """The type of codes of a node without a zero point."""
    if node.op in DEQUANTIZE:
        kind = query.dtype(node.inputs[0])
        return np.uint8 if kind is None else kind
    named = int(node.attrs.get("output_dtype", 0))
    return onnx.helper.tensor_dtype_to_np_dtype(named) if named else np.uint8


def dequantized(node: Node, codes: Array) -> Array | None:
    """What a DequantizeLinear returns of constant codes; None where its numbers are computed or do not fit."""
    found = numbers(node)
    if found is None:
        return None
    named = int(node.attrs.get("output_dtype", 0))
    return found.dequantized(codes, onnx.helper.tensor_dtype_to_np_dtype(named) if named else None)
