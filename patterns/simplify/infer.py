"""Shapes: inference from inputs and operators only, ignoring shapes stored in the file, and queries.

A file may contain outdated shapes, for example from before its batch size was changed, and patterns must not rely on
these. Stored shapes of intermediate tensors are used only for outputs of custom-domain operators, which ONNX cannot
infer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from sbonnx.graph import Graph, Node, Tensor, Variable, shape_inference
from sbonnx.graph.exporter import read_type, skeleton
from sbonnx.graph.io import has_long_vector
from sbonnx.graph.protos import ONNX_ERRORS, graph_protos
from sbonnx.graph.query import all_nodes

from ..match import STANDARD

Inferred = tuple["np.dtype[Any] | None", "tuple[int | str | None, ...] | None"]
"""Element type and shape."""


def infer_shapes(graph: Graph) -> None:
    """Infer element types and shapes of node outputs in every scope, in place; graph outputs are unchanged.

    A shape that cannot be inferred keeps only its rank. If inference fails, nothing changes.
    """
    custom = {tensor.name for node in all_nodes(graph) if node.domain not in STANDARD for tensor in node.outputs}
    model = skeleton(graph).model
    for scope in graph_protos(model.graph):
        kept = [value for value in scope.value_info if value.name in custom]
        copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in kept]
        del scope.value_info[:]
        scope.value_info.extend(copies)
        for value in scope.output:
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
    try:
        inferred = shape_inference.infer_shapes(model)
        if not has_long_vector(inferred):
            inferred = shape_inference.infer_shapes(inferred, data_prop=True)
    except ONNX_ERRORS:
        return  # types of this model contradict each other: the checker reports this with a better message
    types: dict[str, Inferred] = {
        value.name: read_type(value.type)
        for scope in graph_protos(inferred.graph)
        for value in [*scope.value_info, *scope.output]
        if value.type.HasField("tensor_type")
    }
    fixed = {id(tensor) for tensor in graph.outputs}
    for node in all_nodes(graph):
        _take(node, types, fixed)


def _take(node: Node, found: dict[str, Inferred], fixed: set[int]) -> None:
    """Store what was inferred for the outputs of one node, in place."""
    for tensor in node.outputs:
        if id(tensor) in fixed or not isinstance(tensor, Variable) or tensor.type != "tensor_type":
            continue
        kind, shape = found.get(tensor.name, (None, None))
        tensor.dtype = kind if kind is not None else tensor.dtype
        if shape is not None:
            tensor.shape = shape
        elif tensor.shape is not None:
            tensor.shape = (None,) * len(tensor.shape)


def sizes(tensor: Tensor) -> tuple[int | None, ...] | None:
    """Return the dimensions, None for those that are not known numbers; None if the rank is unknown."""
    return None if tensor.shape is None else tuple(dim if isinstance(dim, int) else None for dim in tensor.shape)


def static(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions if all are known numbers, else None."""
    dims = sizes(tensor)
    return None if dims is None or None in dims else tuple(dim for dim in dims if dim is not None)


def integers(values: np.ndarray) -> list[int]:
    """Convert a small integer tensor to a flat list."""
    return [int(value) for value in values.reshape(-1)]
