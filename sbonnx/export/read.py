"""What stands behind a DequantizeLinear, and the outcome of a conversion."""

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
    """What a conversion did.

    Attributes:
        done: how many nodes of each new op type stand now.
        refusals: what keeps its Q/DQ, and why.
    """

    done: Counter[str] = field(default_factory=Counter)
    refusals: tuple[Refusal, ...] = ()

    def text(self) -> str:
        """``3 MatMulNBits, 1 QGemm``."""
        return ", ".join(f"{count} {op}" for op, count in self.done.items()) or "nothing"


@dataclass(frozen=True)
class Codes:
    """A float tensor that is the dequantized form of another, by constant numbers.

    Attributes:
        node: the DequantizeLinear.
        tensor: the integers it reads.
        scale: float, shape (), (C,) along `axis`, or that of the tensor with `axis` cut into blocks.
        zero: zero point, the integers' type, shape of scale.
        axis: of a vector or blocks of scales, counted from the front; None for one scale.
        block: length of a block along `axis`, or None.
    """

    node: Node
    tensor: Tensor
    scale: Array
    zero: Array
    axis: int | None
    block: int | None

    @property
    def values(self) -> Array | None:
        """The integers, where they are constant."""
        return query.constant(self.tensor)


def dequantized(tensor: Tensor) -> Codes | None:
    """The integers behind a float tensor; None where no DequantizeLinear with constant numbers gives it."""
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
    """Scale and zero point of a Q or DQ node where both are constant; a zero point that is absent is written out."""
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
    """The float values of constant integers with one scale or a vector of them, in the type of the scale."""
    values = codes.values
    if values is None or codes.block is not None:
        return None
    along = [-1 if i == codes.axis else 1 for i in range(values.ndim)] if codes.axis is not None else []
    scale, zero = (part.reshape(along) if along else part for part in (codes.scale, codes.zero))
    steps = values.astype(np.int64) - zero.astype(np.int64)
    return np.asarray((steps.astype(np.float32) * scale.astype(np.float32)).astype(codes.scale.dtype))


def is_weight(tensor: Tensor) -> bool:
    """Whether a float tensor is a constant, or the dequantized form of one."""
    if isinstance(tensor, Constant):
        return True
    codes = dequantized(tensor)
    return codes is not None and codes.values is not None
