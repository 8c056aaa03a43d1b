"""Reading of dequantized tensors, and the result of a conversion."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from sbonnx.graph import Constant, Node, Tensor, query
from sbonnx.ops import DEQUANTIZE
from sbonnx.report import Refusal
from sbonnx.spec import Array


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        done: number of created nodes by op type.
        refusals: nodes that keep their Q/DQ, with the reason.
    """

    done: Counter[str] = field(default_factory=Counter)
    refusals: tuple[Refusal, ...] = ()

    def text(self) -> str:
        """Format the counts: ``3 MatMulNBits, 1 QGemm``."""
        return ", ".join(f"{count} {op}" for op, count in self.done.items()) or "nothing"


@dataclass(frozen=True)
class Codes:
    """A float tensor dequantized from another tensor with constant parameters.

    Attributes:
        node: the DequantizeLinear.
        tensor: the integers it reads.
        scale: float, shape (), (C,) along `axis`, or that of the tensor with `axis` divided into blocks.
        zero: zero point, in the type of the integers and the shape of `scale`.
        axis: axis of a vector or blocks of scales, counted from the front; None for one scale.
        block: block size along `axis`, or None.
    """

    node: Node
    tensor: Tensor
    scale: Array
    zero: Array
    axis: int | None
    block: int | None

    @property
    def values(self) -> Array | None:
        """The integers if they are constant, else None."""
        return query.constant(self.tensor)


def dequantized(tensor: Tensor) -> Codes | None:
    """Return the codes of a float tensor; None unless a DequantizeLinear with constant parameters writes it."""
    node = query.producer(tensor)
    if node is None or node.op not in DEQUANTIZE:
        return None
    numbers = numbers_of(node)
    if numbers is None:
        return None
    scale, zero = numbers
    if scale.size == 1 and not node.attrs.get("block_size"):
        return Codes(node, node.inputs[0], scale.reshape(()), zero.reshape(()), None, None)
    rank = query.rank(node.inputs[0])
    axis = int(node.attrs.get("axis", 1))
    if axis < 0:
        if rank is None:
            return None
        axis += rank
    return Codes(node, node.inputs[0], scale, zero, axis, int(node.attrs.get("block_size", 0)) or None)


def numbers_of(node: Node) -> tuple[Array, Array] | None:
    """Return scale and zero point of a Q or DQ node if both are constant; an absent zero point becomes zeros."""
    scale = query.constant(node.inputs[1])
    given = len(node.inputs) > 2 and not node.inputs[2].is_empty()
    zero = query.constant(node.inputs[2]) if given else None
    if scale is None or (given and zero is None):
        return None
    if zero is None:
        kind = query.dtype(node.inputs[0]) if node.op in DEQUANTIZE else np.dtype(np.uint8)
        if kind is None:
            return None
        zero = np.zeros(scale.shape, kind)
    return scale, zero


def float_of(codes: Codes) -> Array | None:
    """Dequantize constant integers with one scale or one per channel, in the type of the scale."""
    values = codes.values
    if values is None or codes.block is not None:
        return None
    along = [-1 if i == codes.axis else 1 for i in range(values.ndim)] if codes.axis is not None else []
    scale, zero = (part.reshape(along) if along else part for part in (codes.scale, codes.zero))
    steps = values.astype(np.int64) - zero.astype(np.int64)
    return np.asarray((steps.astype(np.float32) * scale.astype(np.float32)).astype(codes.scale.dtype))


def is_weight(tensor: Tensor) -> bool:
    """Return whether a float tensor is a constant or dequantized from one."""
    if isinstance(tensor, Constant):
        return True
    codes = dequantized(tensor)
    return codes is not None and codes.values is not None
