"""Builder for the conversion of integer operators: creates Q/DQ nodes around float operators, without duplicates."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit, query
from sbonnx.report import Fired, Refusal
from sbonnx.spec import Array

WHAT: Final = "write with Q/DQ"
"""Name of the step in refusals."""


class Unfolder:
    """State of one conversion: names, created pairs, converted operators and refusals."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = edit.Names(graph)
        self.fired: list[Fired] = []
        self.refusals: list[Refusal] = []
        self._made: dict[tuple[int, ...], Tensor] = {}
        self._products: dict[tuple[int, ...], Tensor] = {}

    # --- building blocks ----------------------------------------------------------------------------------------------

    def dequantize(
        self, body: Body, codes: Tensor, scale: Tensor, zero: Tensor | None, axis: int | None, block: int = 0
    ) -> Tensor:
        """Add a DequantizeLinear, or reuse one with the same codes and parameters, and return its output."""
        key = (id(body), id(codes), id(scale), -1 if zero is None else id(zero))
        if key not in self._made:
            inputs = [codes, self.scalar(scale), *([] if zero is None else [self.scalar(zero)])]
            out = self.variable(f"{codes.name}_DequantizeLinear_Output", query.dtype(scale), query.shape(codes))
            attrs = self._axis(scale, axis, query.rank(codes)) | ({"block_size": block} if block else {})
            name = self.names.fresh(f"{codes.name}_DequantizeLinear")
            body.nodes.append(Node("DequantizeLinear", name, attrs, inputs, [out]))
            self._made[key] = out
        return self._made[key]

    def quantize(self, body: Body, node: Node, floats: Tensor, scale: Tensor, zero: Tensor | None) -> None:
        """Add a QuantizeLinear that computes the first output of `node` from floats."""
        inputs = [floats, self.scalar(scale), *([] if zero is None else [self.scalar(zero)])]
        made = Node("QuantizeLinear", self.names.fresh(f"{node.name}_QuantizeLinear"), {}, inputs, [])
        body.nodes.append(made)
        self.take_output(node, made)

    def take_output(self, node: Node, made: Node) -> None:
        """Move the first output of `node` to `made`."""
        output = node.outputs[0]
        edit.replace_output(node, 0, self.variable(f"{output.name}/gone", None, None))
        made.outputs.append(output)

    def variable(self, wish: str, dtype: Any, shape: Any) -> Variable:
        """Create a tensor with a unique name."""
        return Variable(self.names.fresh(wish), dtype, None if shape is None else list(shape))

    def scalar(self, tensor: Tensor) -> Tensor:
        """Return a constant of one value as a scalar: Q and DQ treat a vector of length 1 as one channel."""
        value = query.constant(tensor)
        if value is None or value.ndim == 0 or value.size != 1:
            return tensor
        key = (id(tensor),)
        if key not in self._products:
            self._products[key] = edit.add_constant(self.graph, f"{tensor.name}_scalar", value.reshape(()), self.names)
        return self._products[key]

    def product(self, one: Tensor, other: Tensor) -> Tensor | None:
        """Return the product of two constant scales, or None if one is computed."""
        key = (id(one), id(other))
        left, right = query.constant(one), query.constant(other)
        if left is None or right is None:
            return None
        if key not in self._products:
            values = np.asarray(_flat(left) * _flat(right), left.dtype)
            self._products[key] = edit.add_constant(self.graph, f"{one.name}_{other.name}", values, self.names)
        return self._products[key]

    @staticmethod
    def _axis(scale: Tensor, axis: int | None, rank: int | None) -> dict[str, int]:
        shape = query.shape(scale)
        if not shape or axis is None or all(dim == 1 for dim in shape):
            return {}
        return {"axis": axis if axis >= 0 or rank is None else axis + rank}


def _flat(values: Array) -> Array:
    return values.reshape(()) if values.size == 1 else values.reshape(-1)


def optional(node: Node, index: int) -> Tensor | None:
    """Return an input, or None if it is absent."""
    if index >= len(node.inputs) or node.inputs[index].is_empty():
        return None
    found: Tensor = node.inputs[index]
    return found
