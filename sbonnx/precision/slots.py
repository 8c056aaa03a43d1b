"""Inputs and outputs of a node that follow the float type of the graph, according to its ONNX schema."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx

from sbonnx.graph import Node, Tensor, query
from sbonnx.graph.storage.weights import onnx_dtype
from sbonnx.ops import CONTROL_FLOW, STANDARD_DOMAINS
from sbonnx.plan.magnitudes import FloatKind

FLOAT32 = np.dtype(np.float32)


def is_float32(tensor: Tensor) -> bool:
    """Return whether a tensor is float32, the type that is converted."""
    return bool(tensor.name) and query.dtype(tensor) == FLOAT32


@dataclass(frozen=True)
class Slots:
    """Positions of the float32 inputs and outputs of a node that are converted with it; others keep their type."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    @property
    def indifferent(self) -> bool:
        """Whether the node reads one float tensor in either type and has no float output: Shape, ArgMax, IsNaN."""
        return not self.outputs and len(self.inputs) == 1


@cache
def _schema(op: str, opset: int) -> Any:
    return onnx.defs.get_schema(op, opset, "") if onnx.defs.has(op, "") else None


def slots_of(node: Node, opset: int, kind: FloatKind) -> Slots | str:
    """Return the slots of a node, or the reason why it stays float32.

    A type parameter of the schema ties inputs and outputs together; each that has a float32 tensor must allow the
    narrower type. Formal parameters of the fixed type tensor(float) (the scales of Resize) stay float32. An output type
    that is tied to no input is set by an attribute: supported for Cast and ConstantOfShape only.
    """
    if node.op in CONTROL_FLOW:
        return Slots()
    if (node.domain or "") not in STANDARD_DOMAINS:
        return f"{node.domain}.{node.op} is no operator of ONNX: its types are not known"
    schema = _schema(node.op, opset)
    allowed = {one.type_param_str: one.allowed_type_strs for one in schema.type_constraints}
    wanted = f"tensor({onnx.TensorProto.DataType.Name(onnx_dtype(kind.dtype)).lower()})"
    found: list[set[int]] = [set(), set()]
    bound: set[str] = set()
    for side, tensors, formals in ((0, node.inputs, schema.inputs), (1, node.outputs, schema.outputs)):
        for index, tensor in enumerate(tensors):
            if not tensor.name:
                continue
            formal = formals[min(index, len(formals) - 1)]
            parameter = formal.type_str
            if parameter in allowed and query.dtype(tensor) is None:
                return f"the type of '{tensor.name}' is not known"
            if not is_float32(tensor) or parameter not in allowed:
                continue
            if wanted not in allowed[parameter]:
                return f"{node.op} has no {kind.name} in opset {opset}"
            if side == 0:
                bound.add(parameter)
            elif parameter not in bound and not _typed_by_attribute(node):
                return f"the type of what {node.op} gives is an attribute of it"
            found[side].add(index)
    return Slots(frozenset(found[0]), frozenset(found[1]))


def _typed_by_attribute(node: Node) -> bool:
    """Return whether `write` can change the attribute that sets the output type."""
    return node.op == "Cast" or (node.op == "ConstantOfShape" and "value" in node.attrs)
