"""Dynamic quantization: activation scales computed at run time, with DynamicQuantizeLinear and MatMulInteger."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
from onnx import TensorProto

from sbonnx.export.conversion import Converted, Product, is_weight, product
from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit, query
from sbonnx.report import Reason, Refusal

STEP: Final = "compute scales as the model runs"


def convert(graph: Graph) -> Converted:
    """Turn every product of a float activation and a quantized weight into an integer product. In place.

        xq, xs, xz = DynamicQuantizeLinear(x)                      once per tensor, for all its readers
        y = Cast(MatMulInteger(xq, wq, xz, wz)) * (xs * ws) [+ bias]

    onnxruntime's optimizer fuses these into one kernel, DynamicQuantizeMatMul, or MatMulIntegerToFloat if several
    products read the same quantized tensor. It uses the whole uint8 range: scale = (max(x, 0) - min(x, 0)) / 255.

    Source: ONNX DynamicQuantizeLinear, MatMulInteger.
    """
    writer = _DynamicWriter(graph)
    refusals: list[Refusal] = []
    for scope, body in list(query.scopes(graph)):
        for node in list(body.nodes):
            candidate = product(node)
            if isinstance(candidate, Product):
                candidate = _obstacle(candidate) or candidate
            if isinstance(candidate, Reason):
                refusals.append(Refusal(STEP, node.name, candidate))
            elif candidate is not None:
                writer.write(candidate, scope, body)
    edit.sweep(graph)
    edit.sort(graph)
    return Converted(writer.done, tuple(refusals))


def _obstacle(found: Product) -> Reason | None:
    """Return the reason why MatMulInteger cannot compute a product, or None."""
    codes = found.codes
    if query.dtype(found.data) != np.dtype(np.float32):
        return Reason(
            "input-not-float32",
            f"DynamicQuantizeLinear takes float32, '{found.data.name}' is {query.dtype(found.data)}",
        )
    if is_weight(found.data):
        return Reason("both-inputs-constant", "both its inputs are constants")
    if codes.block is not None:
        return Reason("scales-in-blocks", "MatMulInteger takes one scale per column, not blocks")
    if codes.axis == found.sum_axis:
        return Reason("scales-along-another-axis", "the scales of its weight run along the summed axis")
    if codes.zero.dtype not in (np.dtype(np.int8), np.dtype(np.uint8)):
        return Reason("type-of-codes", f"MatMulInteger takes 8 bits, its weight has {codes.zero.dtype}")
    return None


class _DynamicWriter:
    """State of one conversion, with a cache of the quantized form of each tensor."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = edit.Names(graph)
        self.quantized: dict[tuple[str, int], list[Tensor]] = {}
        self.done: Counter[str] = Counter()

    def write(self, found: Product, scope: str, body: Body) -> None:
        """Replace one MatMul or Gemm. In place; its output keeps its name."""
        node, (integers, scale, zero) = found.node, found.matrix()
        xq, xs, xz = self._quantize(found.data, scope, body)
        weight: Tensor = found.codes.tensor
        if found.turned:
            weight = edit.add_constant(body, f"{weight.name}_turned", np.ascontiguousarray(integers), self.names)
        inputs = [xq, weight, xz]
        if zero.any():
            inputs.append(edit.add_constant(body, f"{node.name}_zero_point", zero, self.names))
        summed = self._add(body, "MatMulInteger", inputs, node, np.int32)
        cast = self._add(body, "Cast", [summed], node, np.float32, to=TensorProto.FLOAT)
        weight_scale = edit.add_constant(body, f"{node.name}_weight_scale", scale, self.names)
        both = self._add(body, "Mul", [xs, weight_scale], node, np.float32, stem="scale")
        terms = [] if found.addend is None else [found.addend]
        if found.bias is not None:
            terms.append(edit.add_constant(body, f"{node.name}_bias", found.bias.astype(np.float32), self.names))
        output = node.outputs[0]
        edit.replace_output(node, 0, Variable(self.names.fresh(f"{node.name}_float"), np.float32))
        last = [cast, both]
        op = "Mul"
        for term in terms:
            last, op = [self._add(body, op, last, node, np.float32), term], "Add"
        edit.add_node(body, op, last, names=self.names, stem=f"{node.name}_{op}", outputs=[output])
        self.done["MatMulInteger"] += 1

    def _quantize(self, tensor: Tensor, scope: str, body: Body) -> list[Tensor]:
        """Return uint8 codes, scale and zero point of a float tensor, shared by all readers of a scope."""
        key = (scope, id(tensor))
        if key not in self.quantized:
            shape = tensor.shape
            outputs: list[Tensor] = [
                Variable(self.names.fresh(f"{tensor.name}_quantized"), np.uint8, shape),
                Variable(self.names.fresh(f"{tensor.name}_scale"), np.float32, []),
                Variable(self.names.fresh(f"{tensor.name}_zero_point"), np.uint8, []),
            ]
            edit.add_node(
                body,
                "DynamicQuantizeLinear",
                [tensor],
                names=self.names,
                stem=f"{tensor.name}_DynamicQuantizeLinear",
                outputs=outputs,
            )
            self.quantized[key] = outputs
            self.done["DynamicQuantizeLinear"] += 1
        return self.quantized[key]

    def _add(
        self, body: Body, op: str, inputs: list[Tensor], node: Node, kind: type, stem: str = "", **attrs: int
    ) -> Tensor:
        name = f"{node.name}_{stem or op}"
        added = edit.add_node(body, op, inputs, names=self.names, stem=name, attrs=attrs)
        added.outputs[0].dtype = np.dtype(kind)
        output: Tensor = added.outputs[0]
        return output
