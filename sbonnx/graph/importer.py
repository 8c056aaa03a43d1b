"""Construction of the graph from a checked, sorted skeleton, and conversion of sparse constants to dense ones."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from sbonnx.errors import ModelError
from sbonnx.graph.exporter import read_type
from sbonnx.graph.model import Body, Constant, Graph, ModelInfo, Node, Tensor, Variable
from sbonnx.graph.protos import copied, domain_of, graph_protos, node_protos
from sbonnx.graph.storage.model_file import Payload
from sbonnx.graph.storage.weights import MappedWeights, byte_size, numpy_dtype
from sbonnx.graph.validation import MAX_RANK
from sbonnx.spec import Array

LARGEST_DENSE: Final = 1 << 30
"""Sparse tensors that would need more bytes are refused."""

_PLAIN: Final[dict[int, Callable[[AttributeProto], Any]]] = {
    AttributeProto.FLOAT: lambda proto: proto.f,
    AttributeProto.INT: lambda proto: proto.i,
    AttributeProto.STRING: lambda proto: _text(proto.s),
    AttributeProto.FLOATS: lambda proto: list(proto.floats),
    AttributeProto.INTS: lambda proto: list(proto.ints),
    AttributeProto.STRINGS: lambda proto: [_text(one) for one in proto.strings],
}
"""Attributes with a Python value. Tensors and bodies are handled separately, all other types are kept as protos."""


def _text(raw: bytes) -> str | bytes:
    """Decode text; bytes that are not UTF-8 are returned unchanged."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def build(model: ModelProto, payloads: list[Payload], info: ModelInfo) -> Graph:
    """Build the graph of a model.

    Args:
        model: sorted, functions inlined, node names unique; large tensors are references to `payloads`.
        info: becomes the graph's; carriers are keyed by the final names.

    Raises:
        ModelError: a tensor's values do not fill its shape, or an attribute holds a list of graphs.
    """
    opset = next(entry.version for entry in model.opset_import if entry.domain == "")
    graph = Graph(name=model.graph.name, opset=opset, import_domains=list(model.opset_import), info=info)
    _GraphImporter(model, payloads, info, opset).fill(graph, model.graph, {}, "")
    return graph


class _GraphImporter:
    """Converter of all scopes; names are unique over all of them."""

    def __init__(self, model: ModelProto, payloads: list[Payload], info: ModelInfo, opset: int) -> None:
        self.payloads = payloads
        self.info = info
        self.opset = opset
        self.taken: set[str] = set()
        self.originals = {name for node in node_protos(model.graph) for name in node.output}
        self.node_names = {node.name for node in node_protos(model.graph)}
        for scope in graph_protos(model.graph):
            self.originals.update(value.name for value in scope.input)
            self.originals.update(tensor.name for tensor in scope.initializer)

    def unique(self, name: str) -> str:
        """Return the name itself the first time, later a name that is not in the model."""
        if name not in self.taken:
            self.taken.add(name)
            return name
        count = 1
        while f"{name}_{count}" in self.taken or f"{name}_{count}" in self.originals:
            count += 1
        self.taken.add(f"{name}_{count}")
        return f"{name}_{count}"

    def fill(self, graph: Body, proto: GraphProto, outer: dict[str, Tensor], path: str) -> None:
        """In place. Add nodes, inputs and outputs of one scope.

        Args:
            outer: tensors of the enclosing graphs by their names in the file.
        """
        types = {value.name: value for value in [*proto.value_info, *proto.output, *proto.input]}
        local: dict[str, Tensor] = {}

        def define(name: str) -> Tensor:
            local[name] = self.variable(name, types.get(name))
            return local[name]

        graph.inputs = [define(value.name) for value in proto.input]
        overridable = frozenset(() if path else self.info.overridable)
        for tensor in proto.initializer:
            local[tensor.name] = held = self.initializer(tensor)
            if tensor.name in overridable:
                self.info.defaults[tensor.name] = held._values
        for node in proto.node:
            if _is_constant(node):
                name = node.output[0]
                local[name] = Constant(self.unique(name), self.constant_value(node))
            else:
                for name in filter(None, node.output):
                    define(name)
        visible = {**outer, **local} if outer else local
        graph.nodes = [self.node(node, visible, local, path) for node in proto.node if not _is_constant(node)]
        graph.outputs = [self.output(graph, value, local, visible) for value in proto.output]
        carrier = GraphProto(doc_string=proto.doc_string or None, metadata_props=proto.metadata_props)
        carrier.quantization_annotation.extend(proto.quantization_annotation)
        if carrier.ByteSize():
            self.info.graphs[path] = carrier

    def variable(self, name: str, value: ValueInfoProto | None) -> Variable:
        final = self.unique(name)
        tensor = Variable(final)
        if value is None or not value.HasField("type"):
            return tensor
        kind = value.type.WhichOneof("value") or "tensor_type"
        tensor.type = kind
        if kind == "tensor_type":
            tensor.dtype, tensor.shape = read_type(value.type)
        if kind != "tensor_type" or _has_more(value):
            self.info.values[final] = copied(value)
            self.info.values[final].name = final
        return tensor

    def initializer(self, proto: TensorProto) -> Constant:
        final = self.unique(proto.name)
        carrier = TensorProto(doc_string=proto.doc_string or None, metadata_props=proto.metadata_props)
        if carrier.ByteSize():
            self.info.tensors[final] = carrier
        return Constant(final, self.values(proto, proto.name))

    def values(self, proto: TensorProto, where: str) -> Array | MappedWeights:
        """Return the values of a tensor, mapped if they are large."""
        if proto.data_location == TensorProto.EXTERNAL:
            payload = self.payloads[int(proto.external_data[0].value)]
            dims = tuple(proto.dims)
            want = byte_size(proto.data_type, prod(dims))
            if payload.length != want:
                raise ModelError(
                    f"tensor '{where}' of shape {list(dims)} needs {want} bytes, and {payload.length} are stored"
                )
            return MappedWeights(payload.source, payload.offset, proto.data_type, dims)
        if proto.data_type == TensorProto.STRING:
            texts = np.empty(len(proto.string_data), dtype=object)
            texts[:] = [_text(content) for content in proto.string_data]
            return texts.reshape(tuple(proto.dims))
        numpy_dtype(proto.data_type)
        try:
            values: Array = numpy_helper.to_array(proto)
        except (ValueError, TypeError) as error:
            raise ModelError(f"tensor '{where}' of shape {list(proto.dims)} cannot be read: {error}") from None
        if not values.flags.owndata:
            values = values.copy()
        values.setflags(write=False)
        return values

    def constant_value(self, node: NodeProto) -> Array | MappedWeights:
        """Return the value of a Constant node, in any of its forms."""
        where, attribute = node.output[0], node.attribute[0]
        if attribute.name == "value":
            return self.values(attribute.t, where)
        if attribute.name in ("value_int", "value_ints"):
            plain: Array = np.array(_PLAIN[attribute.type](attribute), np.int64)
        elif attribute.name in ("value_float", "value_floats"):
            plain = np.array(_PLAIN[attribute.type](attribute), np.float32)
        elif attribute.name == "value_string":
            plain = np.empty((), object)
            plain[()] = _text(attribute.s)
        elif attribute.name == "value_strings":
            plain = np.empty(len(attribute.strings), object)
            plain[:] = [_text(content) for content in attribute.strings]
        else:
            raise ModelError(
                f"the Constant node of '{where}' has no value: attribute '{attribute.name}' is not a form of it"
            )
        plain.setflags(write=False)
        return plain

    def node(self, proto: NodeProto, visible: dict[str, Tensor], local: dict[str, Tensor], path: str) -> Node:
        where = f"{path}/{proto.name}" if path else proto.name
        attrs = {
            entry.name: self.attribute(entry, proto, visible, f"{where}/{entry.name}") for entry in proto.attribute
        }
        inputs = [visible[name] if name else Variable.empty() for name in proto.input]
        outputs = [local[name] if name else Variable.empty() for name in proto.output]
        carrier = NodeProto(doc_string=proto.doc_string or None, metadata_props=proto.metadata_props)
        carrier.device_configurations.extend(proto.device_configurations)
        if carrier.ByteSize():
            self.info.nodes[proto.name] = carrier
        return Node(proto.op_type, proto.name, attrs, inputs, outputs, domain=domain_of(proto) or None)

    def attribute(self, proto: AttributeProto, node: NodeProto, visible: dict[str, Tensor], path: str) -> Any:
        if proto.type in _PLAIN:
            return _PLAIN[proto.type](proto)
        if proto.type == AttributeProto.TENSOR:
            return Constant(proto.t.name, self.values(proto.t, f"{node.name}.{proto.name}"))
        if proto.type == AttributeProto.GRAPH:
            body = Body(name=proto.g.name, opset=self.opset)
            self.fill(body, proto.g, visible, path)
            return body
        if proto.type == AttributeProto.GRAPHS:
            raise ModelError(
                f"node '{node.name}' ({node.op_type}) holds a list of graphs in '{proto.name}': not supported"
            )
        return copied(proto)

    def output(
        self, graph: Body, value: ValueInfoProto, local: dict[str, Tensor], visible: dict[str, Tensor]
    ) -> Tensor:
        """Return the output; an outer tensor that a body returns is copied, so that outputs of bodies are their own."""
        if value.name in local:
            return local[value.name]
        outer = visible[value.name]
        copied = Variable(self.unique(f"{outer.name}_copy"), outer.dtype, outer.shape)
        name = f"{copied.name}/Identity"
        while name in self.node_names:
            name += "_"
        self.node_names.add(name)
        graph.nodes.append(Node("Identity", name, {}, [outer], [copied]))
        return copied


def _is_constant(node: NodeProto) -> bool:
    return node.op_type == "Constant" and not domain_of(node)


def _has_more(value: ValueInfoProto) -> bool:
    """Whether a value has more than element type and dimensions."""
    dims = value.type.tensor_type.shape.dim
    return bool(
        value.doc_string or value.metadata_props or value.type.denotation or any(dim.denotation for dim in dims)
    )


def make_dense(model: ModelProto) -> int:
    """In place. Convert sparse initializers and sparse_value Constants to dense ones; return their number.

    ONNX defines a sparse initializer as a tensor like any other. But onnx's shape inference and most operators of
    onnxruntime treat it as another type, and onnx's version converter rejects it.

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
        raise ModelError(f"sparse tensor '{where}' has the shape {list(shape)}, which is not valid")
    if byte_size(proto.values.data_type, prod(shape)) > LARGEST_DENSE:
        raise ModelError(f"sparse tensor '{where}' of shape {list(shape)} is larger than 1 GiB when dense")
    try:
        values: Array = np.zeros(shape, numpy_dtype(proto.values.data_type))
        indices = numpy_helper.to_array(proto.indices)
        linear = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)
        values.reshape(-1)[linear] = numpy_helper.to_array(proto.values).reshape(-1)
    except (ValueError, TypeError, IndexError) as error:
        raise ModelError(f"sparse tensor '{where}' of shape {list(shape)} cannot be read: {error}") from None
    return values
