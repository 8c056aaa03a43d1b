"""Conversion of sparse constants to dense ones.

ONNX defines a sparse initializer as a tensor like any other. But onnx's shape inference and most operators of
onnxruntime treat it as another type, and onnx's version converter rejects it.
"""

from __future__ import annotations

from math import prod
from typing import Final

import numpy as np
from onnx import ModelProto, SparseTensorProto, TensorProto, helper, numpy_helper

from sbonnx.errors import ModelError
from sbonnx.graph.convert.validate import MAX_RANK
from sbonnx.graph.protos import graph_protos
from sbonnx.graph.query import Array
from sbonnx.graph.storage.weights import byte_size, numpy_dtype

LARGEST: Final = 1 << 30
"""Sparse tensors that would need more bytes are refused."""


def make_dense(model: ModelProto) -> int:
    """In place. Convert sparse initializers and sparse_value Constants to dense ones; return their number.

    Raises:
        ModelError: the dense form is too large, or the indices do not fit the shape.
    """
    count = 0
    for scope in graph_protos(model.graph):
        for sparse in scope.sparse_initializer:
            name = sparse.values.name
            scope.initializer.append(numpy_helper.from_array(dense(sparse, name), name))
            count += 1
        del scope.sparse_initializer[:]
        for node in scope.node:
            if node.op_type == "Constant" and not node.domain:
                for attribute in node.attribute:
                    if attribute.name == "sparse_value":
                        values = dense(attribute.sparse_tensor, node.output[0])
                        attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(values)))
                        count += 1
    return count


def dense(proto: SparseTensorProto, where: str) -> Array:
    """Return the dense values. Indices are linear (NNZ,) or one row for each element (NNZ, rank)."""
    shape = tuple(proto.dims)
    if any(part.data_location == TensorProto.EXTERNAL for part in (proto.values, proto.indices)):
        raise ModelError(f"sparse tensor '{where}' is large or external: save the model with a dense one")
    if any(size < 0 for size in shape) or len(shape) > MAX_RANK:
        raise ModelError(f"sparse tensor '{where}' has the shape {list(shape)}, which no tensor can have")
    if byte_size(proto.values.data_type, prod(shape)) > LARGEST:
        raise ModelError(f"sparse tensor '{where}' of shape {list(shape)} is larger than 1 GiB when dense")
    try:
        values: Array = np.zeros(shape, numpy_dtype(proto.values.data_type))
        indices = numpy_helper.to_array(proto.indices)
        linear = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)
        values.reshape(-1)[linear] = numpy_helper.to_array(proto.values).reshape(-1)
    except (ValueError, TypeError, IndexError) as error:
        raise ModelError(f"sparse tensor '{where}' of shape {list(shape)} cannot be read: {error}") from None
    return values
