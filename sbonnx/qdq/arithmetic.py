"""Arithmetic of Q and DQ nodes on constants, in every form of ONNX: per-tensor, per-channel, block-wise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.graph import Node, Tensor, query
from sbonnx.ops import DEQUANTIZE
from sbonnx.spec import Array

DEFAULT_AXIS: Final = 1
"""Default axis of Q and DQ."""


@dataclass(frozen=True)
class QDQParams:
    """Constant parameters of one Q or DQ node.

    Attributes:
        scale: as stored: shape (), (C,) or that of the data with one dimension divided; its type is the float type.
        zero: zero point in the type of the codes, in the shape of `scale`; zeros if the file has none.
        axis: the attribute, or 1; negative values count from the end.
        block: ``block_size``, or 0 (the shape of the scale can also imply blocks).
    """

    scale: Array
    zero: Array
    axis: int = DEFAULT_AXIS
    block: int = 0

    def spread(self, values: Array, shape: tuple[int, ...]) -> Array:
        """Reshape or repeat `values` of the scale's shape so that they broadcast against data of `shape`.

        Raises:
            ValueError: the shapes do not match.
        """
        if values.size == 1:
            return values.reshape(())
        axis = self.axis % len(shape)
        if values.ndim == 1 and not (self.block and values.ndim == len(shape)):
            if values.size != shape[axis]:
                raise ValueError(f"{values.size} scales along axis {axis} of length {shape[axis]}")
            return values.reshape([-1 if at == axis else 1 for at in range(len(shape))])
        differ = [
            at for at, (size, scale_size) in enumerate(zip(shape, values.shape, strict=True)) if size != scale_size
        ]
        if len(differ) > 1:
            raise ValueError(f"scales of shape {values.shape} for data of shape {shape}")
        at = differ[0] if differ else axis
        length = self.block or -(-shape[at] // values.shape[at])
        wide = np.repeat(values, length, axis=at)
        return np.take(wide, np.arange(shape[at]), axis=at)

    def dequantize(self, codes: Array, dtype: Any = None) -> Array:
        """Compute ``(codes - zero) * scale`` in float32 and return it as `dtype` (None: the scale's type)."""
        scale = self.spread(self.scale, codes.shape).astype(np.float32)
        if is_integer(codes.dtype):
            steps = codes.astype(np.int64) - self.spread(self.zero, codes.shape).astype(np.int64)
        else:
            steps = codes
        return np.asarray((steps.astype(np.float32) * scale).astype(self.scale.dtype if dtype is None else dtype))

    def dequantized(self, codes: Array, dtype: Any = None) -> Array | None:
        """Return `dequantize`, or None if the scales do not match the codes (an invalid file, which lint reports)."""
        try:
            return self.dequantize(codes, dtype)
        except ValueError:
            return None

    def quantize(self, x: Array) -> Array:
        """Compute the codes of `x`: ``saturate(round_half_even(x / scale) + zero)``, in the zero point's type."""
        low, high = limits(self.zero.dtype)
        scale = self.spread(self.scale, x.shape).astype(np.float32)
        zero = self.spread(self.zero, x.shape).astype(np.float32)
        with np.errstate(all="ignore"):
            codes = np.rint(x.astype(np.float32) / scale) + zero
        return np.asarray(np.clip(np.nan_to_num(codes), low, high).astype(np.int64).astype(self.zero.dtype))

    def steps(self, codes: Array) -> Array:
        """Compute ``codes - zero`` as int64, in the shape of `codes`."""
        return np.asarray(codes.astype(np.int64) - self.spread(self.zero, codes.shape).astype(np.int64))


def is_integer(kind: Any) -> bool:
    """Return whether a quantized type is an integer type, not a small float."""
    return str(np.dtype(kind)).lstrip("u").startswith("int")


def limits(kind: Any) -> tuple[int, int]:
    """Return the lowest and highest value of an integer type, including int4 and uint4."""
    name = str(np.dtype(kind))
    bits = int("".join(letter for letter in name if letter.isdigit()))
    return (0, (1 << bits) - 1) if name.startswith("u") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def numbers(node: Node) -> QDQParams | None:
    """Return the parameters of a Q or DQ node, or None if they are not all constants."""
    scale = _constant_scale(node.inputs[1])
    given = query.optional_input(node, 2)
    zero = query.constant(given)
    if scale is None or (given is not None and zero is None):
        return None
    if zero is None:
        kind: Any = None
        if node.op in DEQUANTIZE:
            kind = query.dtype(node.inputs[0])
        elif named := int(node.attrs.get("output_dtype", 0)):
            kind = onnx.helper.tensor_dtype_to_np_dtype(named)
        zero = np.zeros(scale.shape, np.uint8 if kind is None else kind)
    axis = int(node.attrs.get("axis", DEFAULT_AXIS))
    return QDQParams(scale, zero, axis, int(node.attrs.get("block_size", 0)))


def _constant_scale(tensor: Tensor) -> Array | None:
    """Return a scale that is a constant, or a DequantizeLinear of one (NVFP4); else None."""
    scale, producer = query.constant(tensor), query.producer(tensor)
    if scale is not None or producer is None or producer.op not in DEQUANTIZE:
        return scale
    codes = query.constant(producer.inputs[0])
    return None if codes is None else dequantized(producer, codes)


def dequantized(node: Node, codes: Array) -> Array | None:
    """Dequantize constant codes with a DequantizeLinear's parameters; None if those are computed or do not match."""
    parameters = numbers(node)
    if parameters is None:
        return None
    named = int(node.attrs.get("output_dtype", 0))
    return parameters.dequantized(codes, onnx.helper.tensor_dtype_to_np_dtype(named) if named else None)
