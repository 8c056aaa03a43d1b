"""Quantized consumers of float tensors: the codes that all readers of a tensor compute from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sbonnx.export.read import numbers_of
from sbonnx.graph import Body, Node, Tensor, query
from sbonnx.ops import QUANTIZE, RECTIFIERS
from sbonnx.spec import Array


@dataclass(frozen=True)
class Sink:
    """Quantized form of a float tensor, common to all its readers.

    Attributes:
        quantizers: the QuantizeLinear nodes, all with the same parameters.
        scale, zero: per-tensor scale and zero point.
    """

    quantizers: tuple[Node, ...]
    scale: Array
    zero: Array


@dataclass(frozen=True)
class Sinks:
    """Lookup of the quantized form of tensors in one scope."""

    body: Body

    def of(self, tensor: Tensor) -> Sink | str:
        """Return the quantized form of a tensor, or the reason why there is none.

        A Relu or Clip in between is skipped if the zero point has the same effect.
        """
        rectifiers: list[Node] = []
        while True:
            readers = query.readers(tensor)
            if any(output is tensor for output in self.body.outputs):
                return "its output leaves the graph in float"
            if len(readers) == 1 and readers[0][0].op in RECTIFIERS and readers[0][1] == 0:
                rectifiers.append(readers[0][0])
                tensor = readers[0][0].outputs[0]
                continue
            break
        sink = self._quantized(tensor, [node for node, _ in readers])
        if isinstance(sink, str):
            return sink if not rectifiers else f"behind its {rectifiers[-1].op}, {sink}"
        for node in rectifiers:
            if not changes_no_code(node, sink.scale, sink.zero):
                return f"the {node.op} behind it does what its zero point does not"
        return sink

    def _quantized(self, tensor: Tensor, readers: list[Node]) -> Sink | str:
        mine = {id(node) for node in self.body.nodes}
        other = next((node for node in readers if node.op not in QUANTIZE), None)
        if other is not None or not readers:
            return f"its output is read in float by '{other.name}'" if other is not None else "nothing reads its output"
        found: list[tuple[Array, Array]] = []
        for node in readers:
            numbers = numbers_of(node)
            if numbers is None or numbers[0].size != 1 or id(node) not in mine:
                return f"'{node.name}' has no single constant scale"
            if str(numbers[1].dtype) not in ("uint8", "int8"):
                return f"'{node.name}' makes {numbers[1].dtype} of it"
            found.append((numbers[0].reshape(()), numbers[1].reshape(())))
        scale, zero = found[0]
        if any(other != (scale, zero) or other[1].dtype != zero.dtype for other in found):
            return "its readers quantize it by different scales"
        return Sink(tuple(readers), scale, zero)


def changes_no_code(node: Node, scale: Array, zero: Array) -> bool:
    """Return whether a Relu or Clip before a QuantizeLinear has no effect on any code.

    Rounding is monotonic: saturation replaces a bound if the bound itself has the lowest (highest) code.
    """
    info = np.iinfo(zero.dtype)
    low, high = bounds_of(node)
    if low is None or high is None:
        return False

    def code(value: Any) -> float:
        return float(np.rint(np.float32(value) / scale.astype(np.float32)) + float(zero))

    return bool((np.isinf(low) or code(low) <= info.min) and (np.isinf(high) or code(high) >= info.max))


def bounds_of(node: Node) -> tuple[float | None, float | None]:
    """Return the bounds of a Relu or Clip, infinite if absent; None for one that is not constant."""
    if node.op == "Relu":
        return 0.0, np.inf
    found: list[float | None] = []
    for index, (name, default) in enumerate((("min", -np.inf), ("max", np.inf)), start=1):
        given = index < len(node.inputs) and not node.inputs[index].is_empty()
        value = query.constant(node.inputs[index]) if given else np.asarray(node.attrs.get(name, default))
        found.append(None if value is None else float(value.reshape(())))
    return found[0], found[1]
