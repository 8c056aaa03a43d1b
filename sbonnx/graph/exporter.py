"""Conversion of the graph to protos: a skeleton model and the large weights that it refers to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from sbonnx.errors import ModelError
from sbonnx.graph.model import Body, Constant, Graph, ModelInfo, Node, Tensor, Variable
from sbonnx.graph.protos import copied, ir_version_for, replace_entries, tensor_protos
from sbonnx.graph.query import Array, all_nodes, bodies, constant, ordered, readers, stored_values
from sbonnx.graph.storage import packed_json, protobuf_payloads
from sbonnx.graph.storage.weights import INLINE_BYTES, MappedWeights, chunks, numpy_dtype, onnx_dtype, stored_bytes
from sbonnx.ops import RUNTIME_OPS

METADATA_IR = 10
"""First IR version in which nodes, tensors and values have metadata_props."""

NODES_KEY = "sbonnx.nodes"
"""Key in the metadata of a model of sbonnx's own metadata of nodes, packed, for files of older IR versions.

Raising the IR version for them would make a file that older runtimes refuse.
"""

OWN = "sbonnx."
"""Prefix of the keys of sbonnx's own metadata."""


@dataclass
class Skeleton:
    """Model whose large tensors are numbered references.

    Attributes:
        model: without large weights; `names[i]` is the tensor that refers to payload i.
        payloads: the values, mapped or in memory.
    """

    model: ModelProto
    payloads: list[Array | MappedWeights] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def sizes(self) -> list[int]:
        """Return the number of bytes of each payload in a file."""
        return [stored_bytes(values) for values in self.payloads]

    def chunks(self, number: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes of one payload, in pieces."""
        return chunks(self.payloads[number])

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the model with its weights inside, in pieces; the same graph gives the same bytes."""
        for piece in protobuf_payloads.attach(self.model.SerializeToString(deterministic=True), self.sizes()):
            if piece.payload is None:
                yield piece.content
            else:
                yield from self.chunks(piece.payload)

    def located(self, place: Callable[[int, int], dict[str, str]]) -> bytes:
        """Serialize the model with every reference replaced by the result of `place(number, bytes)`.

        It returns the entries of external_data, or nothing for values to be stored in the model.
        """
        model = copied(self.model)
        sizes = self.sizes()
        for tensor, _ in tensor_protos(model):
            if tensor.data_location == TensorProto.EXTERNAL:
                number = int(tensor.external_data[0].value)
                del tensor.external_data[:]
                entries = place(number, sizes[number])
                if not entries:
                    tensor.ClearField("data_location")
                    tensor.raw_data = b"".join(self.chunks(number))
                for key, value in entries.items():
                    tensor.external_data.add(key=key, value=value)
        return bytes(model.SerializeToString(deterministic=True))


def skeleton(
    graph: Graph, *, info: bool = True, inline: int = INLINE_BYTES, hoist: bool = False, inferred: bool = True
) -> Skeleton:
    """Convert the graph to a model without its large weights.

    Args:
        info: write the data of `graph.info` (metadata, doc strings, value types); False: structure and values only.
        inline: tensors of up to this many bytes are stored in the model.
        hoist: write large constants of bodies in the main graph, where their readers see them too.
        inferred: write the types of all tensors; False: without those that a reader infers.

    Raises:
        ModelError: a graph input has no known type, or an attribute no form in ONNX.
    """
    imports = _imports(graph)
    wants = ir_version_for(imports) if graph.opset > graph.info.original_opset else 0
    version = max(graph.info.ir_version, wants)
    source = graph.info if info else ModelInfo(values=graph.info.values)
    writer = _GraphExporter(source, inline, has_node_metadata=version >= METADATA_IR, inferred=inferred)
    writer.place_constants(graph, hoist=hoist)
    model = copied(graph.info.model) if info else ModelProto()
    model.graph.CopyFrom(writer.graph(graph, ""))
    if info:
        for key, value in graph.info.metadata.items():
            model.metadata_props.add(key=key, value=value)
        if writer.node_metadata:
            text = json.dumps(writer.node_metadata, separators=(",", ":"), sort_keys=True)
            model.metadata_props.add(key=NODES_KEY, value=packed_json.pack(text))
    model.opset_import.extend(imports)
    model.ir_version = max(version, METADATA_IR if writer.wrote_metadata else 0)
    return Skeleton(model, writer.payloads, writer.names)


def _imports(graph: Graph) -> list[onnx.OperatorSetIdProto]:
    """Return the opset imports: `graph.opset` for the default domain, version 1 for domains of new nodes."""
    versions = {entry.domain: entry.version for entry in graph.import_domains or ()}
    versions[""] = graph.opset
    for node in all_nodes(graph):
        versions.setdefault(node.domain or "", 1)
    return [onnx.helper.make_opsetid(domain, version) for domain, version in versions.items() if domain != "ai.onnx"]


class _GraphExporter:
    """Converter of all scopes, which share payloads."""

    def __init__(self, info: ModelInfo, inline: int, *, has_node_metadata: bool, inferred: bool) -> None:
        self.info = info
        self.inferred = inferred
        self.inline = inline
        self.has_node_metadata = has_node_metadata
        self.node_metadata: dict[str, dict[str, str]] = {}
        self.payloads: list[Array | MappedWeights] = []
        self.names: list[str] = []
        self.wrote_metadata = False
        self.homes: dict[int, list[Constant]] = {}

    def place_constants(self, graph: Graph, *, hoist: bool) -> None:
        """Assign each constant to the innermost graph that encloses all its readers (or see `hoist`)."""
        home: dict[int, tuple[Constant, tuple[Body, ...]]] = {}

        def visit(scope: Body, path: tuple[Body, ...]) -> None:
            path = (*path, scope)
            for tensor in [*(read for node in scope.nodes for read in node.inputs), *scope.outputs]:
                if isinstance(tensor, Constant):
                    before = home.get(id(tensor), (tensor, path))[1]
                    shared = [outer for outer, inner_scope in zip(before, path, strict=False) if outer is inner_scope]
                    home[id(tensor)] = (tensor, tuple(shared))
            for node in scope.nodes:
                for _, body in bodies(node):
                    visit(body, path)

        visit(graph, ())
        for tensor, path in home.values():
            inner = graph if hoist and self.is_large(tensor) else path[-1]
            self.homes.setdefault(id(inner), []).append(tensor)

    def is_large(self, tensor: Constant) -> bool:
        """Whether the values are stored outside the model."""
        stored = tensor._values
        return stored.dtype != object and stored_bytes(stored) > self.inline

    def is_default(self, tensor: Constant) -> bool:
        """Whether a constant is the default of an input, and nothing was computed from it since it was loaded."""
        uses = self.info.default_uses.get(tensor.name)
        return uses == len(readers(tensor)) and tensor._values is self.info.defaults.get(tensor.name)

    def graph(self, scope: Body, path: str) -> GraphProto:
        """Convert one scope; `path` is "" for the main graph, else "node/attribute[/node/attribute]"."""
        proto = copied(self.info.graphs.get(path) or GraphProto())
        proto.name = scope.name
        proto.node.extend(self.node(node, path) for node in ordered(scope.nodes))
        for tensor in self.homes.get(id(scope), ()):
            self.tensor(tensor, proto.initializer.add())
        defaults = [] if path else [tensor for tensor in self.homes.get(id(scope), ()) if self.is_default(tensor)]
        for name in () if path else (name for name, uses in self.info.default_uses.items() if not uses):
            defaults.append(Constant(name, self.info.defaults[name]))
            self.tensor(defaults[-1], proto.initializer.add())
        interface = {tensor.name for tensor in [*scope.inputs, *scope.outputs]}
        proto.input.extend(self.value(tensor, must_have_type=path == "") for tensor in (*scope.inputs, *defaults))
        proto.output.extend(self.value(tensor) for tensor in scope.outputs)
        for node in scope.nodes:
            for tensor in node.outputs:
                if tensor.name and tensor.name not in interface and self.states_type(node, tensor):
                    proto.value_info.append(self.value(tensor))
        # quantization annotations of removed tensors would make the file invalid
        here = {tensor.name for tensor in proto.initializer} | {name for node in proto.node for name in node.output}
        here.update(value.name for value in proto.input)
        kept = [
            annotation
            for annotation in proto.quantization_annotation
            if annotation.tensor_name in here
            and all(part.value in here for part in annotation.quant_parameter_tensor_names)
        ]
        if len(kept) != len(proto.quantization_annotation):
            replace_entries(proto.quantization_annotation, kept)
        return proto

    def states_type(self, node: Node, tensor: Tensor) -> bool:
        """Return whether to write the type of an output of a node; see `inferred` of `skeleton`.

        onnx infers the outputs of its own operators; those of others have their types in the file.
        """
        if tensor.name in self.info.values:
            return True
        infers = not node.domain and node.op not in RUNTIME_OPS
        return tensor.dtype is not None and (self.inferred or not infers or tensor.name in self.info.declared)

    def node(self, node: Node, path: str) -> NodeProto:
        proto = NodeProto(op_type=node.op, name=node.name)
        proto.input.extend(tensor.name for tensor in node.inputs)
        proto.output.extend(tensor.name for tensor in node.outputs)
        if node.domain:
            proto.domain = node.domain
        where = f"{path}/{node.name}" if path else node.name
        for name, value in node.attrs.items():
            proto.attribute.append(self.attribute(node, name, value, where))
        carrier = self.info.nodes.get(node.name)
        if carrier is not None:
            proto.MergeFrom(carrier)
            if not self.has_node_metadata:
                self._move_own_metadata(proto)
            self.wrote_metadata |= bool(proto.metadata_props)
        return proto

    def _move_own_metadata(self, proto: NodeProto) -> None:
        """Move sbonnx's own entries from the metadata of a node to `node_metadata`."""
        own = {entry.key: entry.value for entry in proto.metadata_props if entry.key.startswith(OWN)}
        if own:
            self.node_metadata[proto.name] = own
            kept = [entry for entry in proto.metadata_props if entry.key not in own]
            replace_entries(proto.metadata_props, kept)

    def attribute(self, node: Node, name: str, value: Any, where: str) -> AttributeProto:
        if isinstance(value, AttributeProto):  # a type without a Python value
            return value
        proto = AttributeProto(name=name)
        if isinstance(value, Body):
            proto.type = AttributeProto.GRAPH
            proto.g.CopyFrom(self.graph(value, f"{where}/{name}"))
        elif isinstance(value, Constant) or (isinstance(value, np.ndarray) and value.ndim):
            proto.type = AttributeProto.TENSOR
            self.tensor(value if isinstance(value, Constant) else Constant("", value), proto.t, refer=False)
        elif isinstance(value, (list, tuple)) and not value:
            proto.type = _list_type(node, name)
        else:
            plain = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
            try:
                if not isinstance(plain, (int, float, str, bytes, list, tuple)):
                    raise TypeError("ONNX has no attribute of this type")
                proto = onnx.helper.make_attribute(name, plain)
            except (TypeError, ValueError) as error:
                kind = type(value).__name__
                raise ModelError(f"attribute '{name}' of node '{node.name}' is a {kind}: {error}") from None
        return proto

    def tensor(self, tensor: Constant, proto: TensorProto, *, refer: bool = True) -> None:
        """Fill in an initializer, large values as references, or an attribute (runtimes need its values inline)."""
        stored = tensor._values
        proto.name = tensor.name
        proto.dims.extend(int(size) for size in stored.shape)
        kind = stored.onnx_type if isinstance(stored, MappedWeights) else onnx_dtype(stored.dtype)
        proto.data_type = kind
        carrier = self.info.tensors.get(tensor.name)
        if carrier is not None:
            proto.MergeFrom(carrier)
            self.wrote_metadata |= bool(carrier.metadata_props)
        if kind == TensorProto.STRING:
            values = constant(tensor)
            assert values is not None
            proto.string_data.extend(item if isinstance(item, bytes) else str(item).encode() for item in values.flat)
            return
        values = stored_values(tensor)
        if not refer or stored_bytes(values) <= self.inline:
            proto.raw_data = b"".join(chunks(values))
            return
        proto.data_location = TensorProto.EXTERNAL
        proto.external_data.add(key=protobuf_payloads.REFERENCE, value=str(len(self.payloads)))
        self.payloads.append(values)
        self.names.append(tensor.name)

    def value(self, tensor: Tensor, *, must_have_type: bool = False) -> ValueInfoProto:
        """Return type and shape. The declaration of the file is kept as long as it agrees with the tensor."""
        carrier = self.info.values.get(tensor.name)
        proto = ValueInfoProto(name=tensor.name)
        if carrier is not None:
            self.wrote_metadata |= bool(carrier.metadata_props)
            if _has_type_of(carrier, tensor):
                return carrier
            proto.MergeFrom(
                ValueInfoProto(doc_string=carrier.doc_string or None, metadata_props=carrier.metadata_props)
            )
        if tensor.dtype is not None:
            shape = None if tensor.shape is None else list(tensor.shape)
            proto.type.CopyFrom(onnx.helper.make_tensor_type_proto(onnx_dtype(tensor.dtype), shape))
        elif must_have_type:
            raise ModelError(f"graph input '{tensor.name}' has no known element type: it cannot be fed")
        return proto


def _has_type_of(carrier: ValueInfoProto, tensor: Tensor) -> bool:
    """Whether a value's type in the file equals that of the tensor; types that are not tensors never change."""
    if isinstance(tensor, Variable) and tensor.type != "tensor_type":
        return True
    kind, shape = read_type(carrier.type)
    own = None if tensor.shape is None else tuple(tensor.shape)
    dtype = None if tensor.dtype is None else numpy_dtype(onnx_dtype(tensor.dtype))
    return kind == dtype and shape == own


def read_type(proto: onnx.TypeProto) -> tuple[np.dtype[Any] | None, tuple[int | str | None, ...] | None]:
    """Return element type and dimensions of a tensor type, None if undefined."""
    tensor = proto.tensor_type
    kind = numpy_dtype(tensor.elem_type) if tensor.elem_type else None
    if not tensor.HasField("shape"):
        return kind, None
    # most sizes are above 0, which only a stored value is
    return kind, tuple(
        dim.dim_value or (0 if dim.HasField("dim_value") else dim.dim_param or None) for dim in tensor.shape.dim
    )


def _list_type(node: Node, name: str) -> AttributeProto.AttributeType:
    """Return the type of an empty list attribute, by the operator's schema, because the value has none."""
    lists = {
        onnx.defs.OpSchema.AttrType.FLOATS: AttributeProto.FLOATS,
        onnx.defs.OpSchema.AttrType.STRINGS: AttributeProto.STRINGS,
    }
    try:
        declared = onnx.defs.get_schema(node.op, domain=node.domain or "").attributes.get(name)
    except onnx.defs.SchemaError:
        declared = None
    return lists.get(declared.type, AttributeProto.INTS) if declared is not None else AttributeProto.INTS
