"""Matrix weights of a model: floats that linear operators and embeddings read, and which of them are left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import onnx
from onnx import TensorProto

from sbonnx.ops import EMBEDDING, KEEPS_VALUES, LINEAR, QDQ, RESHAPES

MOVES: Final = (RESHAPES | KEEPS_VALUES | {"Cast", "Concat", "Slice", "Split", "Transpose"}) - QDQ - {"Gather"}
FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
READERS: Final = frozenset(LINEAR) | {"Einsum", "LSTM", "GRU", "RNN", "MoE"}
TABLES: Final = ("cos", "sin", "inv_freq")
"""Parts of the names of tables of rotary positions, which are no weights."""


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def matrix_weights(model: onnx.ModelProto) -> dict[str, int]:
    """Return the number of values of each float weight with at least two axes that a linear operator or table has."""
    weights: dict[str, int] = {}
    for graph in _graphs(model.graph):
        sizes = {}
        for tensor in graph.initializer:
            if tensor.data_type in FLOATS and len(tensor.dims) > 1:
                sizes[tensor.name] = int(onnx.numpy_helper.to_array(tensor).size)
        origins = {name: {name} for name in sizes if not any(part in name for part in TABLES)}
        for node in graph.node:
            behind = [origin for name in node.input for origin in origins.get(name, ())]
            if node.op_type in MOVES:
                for name in node.output:
                    origins.setdefault(name, set()).update(behind)
            elif node.op_type in READERS:
                weights |= {origin: sizes[origin] for origin in behind}
            elif node.op_type in EMBEDDING and node.input[0] in origins and node.input[1] not in sizes:
                weights |= {origin: sizes[origin] for origin in origins[node.input[0]]}
    return weights


def weights_left(model: onnx.ModelProto, weights: Mapping[str, int]) -> list[str]:
    """Return the names of float weights that the other model still stores as floats and multiplies with."""
    return [name for name in matrix_weights(model) if name in weights]
