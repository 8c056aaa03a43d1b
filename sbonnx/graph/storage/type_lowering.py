"""Models with types that onnxruntime has no kernels for, as models that it runs.

onnxruntime 1.32 reads FP4 codes and E8M0 scales, and has no DequantizeLinear for them. Weights of these types are
constants: their values in float are what a runtime with such kernels computes with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

WITHOUT_KERNELS: Final = (TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E8M0)
"""Types that no kernel of onnxruntime computes on."""

MOST_BYTES: Final = (1 << 31) - 1
"""Largest message of protobuf."""


def without_small_floats(model: str | bytes) -> bytes | None:
    """Return a model with the dequantized values of constants of types without kernels.

    None if it has no such types, or if the values do not fit the 2 GiB of a message.

    Args:
        model: path, or serialized model.
    """
    proto = parsed(model)
    changed = sum([_lower(graph) for graph in _graphs(proto.graph)])
    return proto.SerializeToString() if changed and proto.ByteSize() < MOST_BYTES else None


def parsed(model: str | bytes) -> ModelProto:
    """Parse a model, a path or serialized."""
    return onnx.load_model_from_string(model) if isinstance(model, bytes) else onnx.load(model)


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    yield from _graphs(inner)


def _lower(graph: GraphProto) -> int:
    """Replace the DequantizeLinear of constants of types without kernels by their values; return their number."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes = {name: node for node in graph.node for name in node.output if node.op_type == "DequantizeLinear"}
    lowered: list[NodeProto] = []
    for node in nodes.values():
        types = {constants[name].data_type for name in node.input if name in constants}
        if types.isdisjoint(WITHOUT_KERNELS) or node.input[0] not in constants:
            continue
        values = _values(node, constants, nodes)
        if values is not None:
            graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
            lowered.append(node)
    for node in lowered:
        graph.node.remove(node)
    used = {name for node in graph.node for name in node.input}
    for name in {name for node in lowered for name in node.input if name in constants} - used:
        graph.initializer.remove(constants[name])
    return len(lowered)


def _values(node: NodeProto, constants: dict[str, TensorProto], nodes: dict[str, NodeProto]) -> Any:
    """Compute a DequantizeLinear without zero point whose scale is constant, or one of constants; else return None."""
    scale_name = node.input[1]
    if scale_name in constants:
        scale = numpy_helper.to_array(constants[scale_name])
    elif scale_name in nodes and all(name in constants for name in nodes[scale_name].input):
        scale = _values(nodes[scale_name], constants, nodes)
    else:
        return None
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    codes = numpy_helper.to_array(constants[node.input[0]])
    named = attributes.get("output_dtype", 0)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(named) if named else scale.dtype
    wide, block = scale.astype(np.float32), attributes.get("block_size", 0)
    if block:
        axis = attributes.get("axis", 1)
        wide = np.take(np.repeat(wide, block, axis=axis), np.arange(codes.shape[axis]), axis=axis)
    return (codes.astype(np.float32) * wide).astype(dtype)
