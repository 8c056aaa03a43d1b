"""Minimum and maximum computed by nodes added to a model, so that a few numbers leave the device instead of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sbonnx.calib.engine.sample_runner import Key, Wish
from sbonnx.graph import Graph, Tensor, Variable
from sbonnx.graph.edit import Names, add_constant, add_node
from sbonnx.graph.query import dtype, rank
from sbonnx.graph.storage.weights import onnx_dtype
from sbonnx.spec import Array

EXTREMES: Final = "sbonnx/extremes"
SIZES: Final = "sbonnx/sizes"
"""Added outputs.

`EXTREMES`: float32 (M,), for each key its minima, its maxima, and a check that is 0 or NaN. `SIZES`: int64 (2 K,), for
each key the number of elements of its tensor and the number of its minima.
"""

FLOATS: Final = tuple(np.dtype(kind) for kind in ("float16", "float32", "float64"))

AXES_ARE_INPUTS: Final = 18
"""Opset since which ReduceMin and ReduceMax take their axes as an input."""


@dataclass(frozen=True)
class Extremes:
    """Minimum and maximum of a tensor, reduced on the device.

    Attributes:
        elements: number of its values.
        lo, hi: float32: per channel, per sample (slice of the leading axis), or (1,).
        finite: it holds no NaN and no Inf; else lo and hi are undefined.
    """

    elements: int
    lo: Array
    hi: Array
    finite: bool


def reducible(tensor: Tensor, axis: int | None, wish: Wish) -> bool:
    """Return whether added nodes can compute the statistics: no histogram, and a known rank if one is needed."""
    if wish.detail != "range" or dtype(tensor) not in FLOATS:
        return False
    dims = rank(tensor)
    if axis is None:
        return dims is not None or not wish.track
    return dims is not None and axis < dims and not wish.track


def add_extremes(piece: Graph, keys: Sequence[tuple[Key, Wish]], tensors: dict[str, Tensor]) -> None:
    """Append the nodes in place. The outputs that `read_extremes` reads follow those of `piece`.

    Args:
        keys: `reducible` ones.
        tensors: of the main graph of `piece`, by name.
    """
    adder = _Adder(piece)
    extremes: list[Tensor] = []
    sizes: list[Tensor] = []
    for (name, axis), wish in keys:
        x = tensors[name]
        rows, axes = x, None
        if axis is not None:
            axes = [i for i in range(rank(x) or 0) if i != axis]
        elif wish.track and rank(x):
            rows, axes = adder.add("Flatten", x, axis=1), [1]
        lo, hi = (adder.row(adder.reduce(op, rows, axes)) for op in ("ReduceMin", "ReduceMax"))
        # min and max do not propagate NaN on every device; 0 x is NaN for NaN and Inf, and sums propagate that
        zeros = adder.add("Mul", x, adder.constant(np.zeros((), dtype(x))))
        check = adder.row(adder.add("ReduceSum", zeros, keepdims=0))
        extremes += [adder.float32(value) for value in (lo, hi, check)]
        sizes += [adder.row(adder.add("Size", value)) for value in (x, lo)]
    for name, kind, parts in ((EXTREMES, np.float32, extremes), (SIZES, np.int64, sizes)):
        out = Variable(name, np.dtype(kind), [None])
        add_node(piece, "Concat", parts, names=adder.names, stem=name, attrs={"axis": 0}, outputs=[out])
        piece.outputs.append(out)


def read_extremes(count: int, extremes: Array, sizes: Array) -> Iterator[Extremes]:
    """Parse the added outputs for each of `count` keys."""
    at = 0
    for elements, length in sizes.reshape(count, 2).tolist():
        lo, hi = extremes[at : at + length], extremes[at + length : at + 2 * length]
        at += 2 * length + 1
        fine = not elements or bool(extremes[at - 1] == 0 and np.isfinite(lo).all() and np.isfinite(hi).all())
        yield Extremes(elements, lo, hi, fine)


class _Adder:
    def __init__(self, piece: Graph) -> None:
        self.names = Names(piece)
        self._piece = piece
        self._inputs = piece.opset >= AXES_ARE_INPUTS
        self._flat = self.constant(np.array([-1], np.int64))

    def add(self, op: str, *inputs: Tensor, **attrs: Any) -> Tensor:
        """Append a node and return its output."""
        node = add_node(self._piece, op, inputs, names=self.names, stem=f"sbonnx/{op}", attrs=attrs)
        return node.outputs[0]

    def constant(self, values: Array) -> Tensor:
        """Append a constant."""
        return add_constant(self._piece, "sbonnx/number", values, self.names)

    def reduce(self, op: str, x: Tensor, axes: list[int] | None) -> Tensor:
        """Append `op` over axes (None: all) without keepdims."""
        if axes is None:
            return self.add(op, x, keepdims=0)
        if not axes:
            return x
        if self._inputs:
            return self.add(op, x, self.constant(np.array(axes, np.int64)), keepdims=0)
        return self.add(op, x, axes=axes, keepdims=0)

    def row(self, x: Tensor) -> Tensor:
        """Flatten `x` to one axis."""
        return self.add("Reshape", x, self._flat)

    def float32(self, x: Tensor) -> Tensor:
        """Cast `x` to float32: a double beyond its range becomes Inf, as in a sketch."""
        return self.add("Cast", x, to=onnx_dtype(np.float32))
