"""Emulation of a bfloat16 graph in float32, for runtimes without bfloat16 kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from sbonnx import graph as graphs
from sbonnx.graph import Constant, Graph, Node, Tensor, Variable, edit, query
from sbonnx.graph.storage.weights import onnx_dtype
from sbonnx.precision.slots import FLOAT32

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

TYPES_OF_OUTPUTS = ("to", "output_dtype", "dtype")
"""Attributes that contain the type of an output."""


def emulated(graph: Graph) -> Graph:
    """Return a float32 copy in which every bfloat16 tensor is rounded to bfloat16 when it is computed.

    onnxruntime's CPU provider supports little more than Cast for bfloat16, so each tensor passes a Cast to bfloat16 and
    one back. Ops compute in float32 and the result is rounded once, as in kernels that accumulate in float32. Inputs
    and outputs of the copy are float32.
    """
    made = graphs.copy(graph)
    names = edit.Names(made)
    halves = [tensor for tensor in query.all_tensors(made) if query.dtype(tensor) == BFLOAT16]
    rounded = {id(tensor) for tensor in halves}
    for tensor in halves:
        if isinstance(tensor, Constant):
            value = query.constant(tensor)
            tensor.values = np.asarray(value).astype(np.float32)
        else:
            tensor.dtype = FLOAT32
    for _, body in list(query.scopes(made)):
        order: list[Node] = []
        for tensor in body.inputs:
            if id(tensor) in rounded:
                inner = Variable(names.fresh(f"{tensor.name}_rounded"), FLOAT32, tensor.shape)
                for reader, index in query.readers(tensor):
                    edit.replace_input(reader, index, inner)
                order.extend(_rounding(tensor, inner, names))
        for node in list(body.nodes):
            _plain(node)
            order.append(node)
            for index, tensor in enumerate(node.outputs):
                if id(tensor) in rounded:
                    exact = Variable(names.fresh(f"{tensor.name}_exact"), FLOAT32, tensor.shape)
                    edit.replace_output(node, index, exact)
                    order.extend(_rounding(exact, tensor, names))
        body.nodes[:] = order
    edit.sort(made)
    return made


def _rounding(source: Tensor, result: Tensor, names: edit.Names) -> list[Node]:
    """Create Casts to bfloat16 and back."""
    half = Variable(names.fresh(f"{result.name}_bf16"), BFLOAT16, source.shape)
    steps: list[tuple[Tensor, Tensor, Any]] = [(source, half, BFLOAT16), (half, result, FLOAT32)]
    return [
        Node("Cast", names.fresh(f"{after.name}/Cast"), {"to": onnx_dtype(kind)}, [before], [after])
        for before, after, kind in steps
    ]


def _plain(node: Node) -> None:
    """Replace bfloat16 by float32 in attributes, in place."""
    for name in TYPES_OF_OUTPUTS:
        if node.attrs.get(name) == onnx_dtype(BFLOAT16):
            node.attrs[name] = onnx_dtype(FLOAT32)
    value = query.attribute(node, "value")
    if isinstance(value, np.ndarray) and value.dtype == BFLOAT16:
        node.attrs["value"] = Constant(f"{node.name}_value", value.astype(np.float32))
