"""Conversion between model files and graphs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import ModelProto

from sbonnx.errors import ModelError
from sbonnx.graph.constant_edits import from_metadata
from sbonnx.graph.digests import array_digests
from sbonnx.graph.exporter import NODES_KEY, read_type, skeleton
from sbonnx.graph.importer import build, make_dense
from sbonnx.graph.local_functions import inline
from sbonnx.graph.model import Graph, ModelInfo, Node, set_node_metadata
from sbonnx.graph.opset_convert import NEWEST, convert_opset, default_opset, require_known_ops
from sbonnx.graph.opset_lowering import lower
from sbonnx.graph.protos import (
    ONNX_ERRORS,
    copied,
    graph_protos,
    ir_version_for,
    node_protos,
    replace_entries,
    single_line,
    sort_protos,
)
from sbonnx.graph.query import all_nodes, readers, tensors_by_name
from sbonnx.graph.shape_inference import infer_shapes
from sbonnx.graph.storage import packed_json
from sbonnx.graph.storage.model_file import ModelSource, label_of, open_model
from sbonnx.graph.storage.output_files import EXTERNAL_BYTES, write_model
from sbonnx.graph.storage.weights import MappedWeights
from sbonnx.graph.validation import free_sizes, require_no_traps, require_one_float_type, validate
from sbonnx.ops import LINEAR, QDQ, RECURRENT
from sbonnx.report.codes import Note
from sbonnx.spec import Array

SESSION_BYTES = 64 << 10
"""Weights from this size on are passed to a session separately from the model."""

OPSET_REASONS = {
    13: "rewrites, and Q/DQ with a scale for each channel, need it",
    19: "scales in half precision and fp8 need it",
    21: "Q/DQ of 4 or 16 bits or in blocks need it",
}
"""Reasons for a newer opset than that of the file."""

IR_WITH_DEFAULTS = 4
"""First IR version in which an initializer need not be an input."""

MOST_NAMED = 5
"""Initializers that a note names."""

LONGEST_VECTOR = 1 << 16
"""Shape arithmetic uses vectors of a few elements; if the model has a longer one, values are not propagated."""


def load(source: ModelSource, *, opset: int = 13) -> Graph:
    """Load a model as a graph. Its weights stay on disk.

    Functions are inlined, nodes sorted, the opset converted to at least `opset`, shapes inferred, Constant nodes turned
    into constants, nodes without a unique name named; `graph.info.notes` lists the changes.

    Raises:
        ModelError: the file cannot be read, or the model is not valid ONNX or not supported; names the file.
    """
    label = label_of(source)
    try:
        return _load(source, opset)
    except ModelError as error:
        message = single_line(str(error) if label in str(error) else f"{label}: {error}")
        if message == str(error):
            raise
        raise ModelError(message) from error  # names in broken files can contain line feeds


def _load(source: ModelSource, opset: int) -> Graph:
    opened = open_model(source)
    model = opened.model
    info = ModelInfo(opened.path, tuple(opened.files), tuple(opened.sources), model.ir_version)
    own_ir = model.ir_version
    own = info.original_opset = default_opset(model, opened.label)
    if not 1 <= opset <= NEWEST:
        raise ModelError(f"opset {opset} was requested; onnx {onnx.__version__} supports 1 to {NEWEST}")
    # runtimes accept a graph without a name, and negative sizes
    if not model.graph.name:
        model.graph.name = "graph"
        info.notes.append(Note("graph-named", "the graph had no name: named 'graph'"))
    freed = sum(free_sizes([*scope.input, *scope.output, *scope.value_info]) for scope in graph_protos(model.graph))
    freed += sum(free_sizes(function.value_info) for function in model.functions)
    info.declared = frozenset(value.name for scope in graph_protos(model.graph) for value in scope.value_info)
    if freed:
        info.notes.append(Note("sizes-dynamic", f"{freed} tensors had sizes below 0: read as dynamic"))
    listed = _remove_initializer_inputs(model, info)
    validate(model)
    if model.functions:
        count = len(model.functions)
        model = inline(model, opened.label)
        validate(model)  # a call can omit inputs that the nodes of its function need
        info.notes.append(Note("functions-inlined", f"{count} local function{'s' if count > 1 else ''} inlined"))
    require_known_ops(model, own, opened.label)
    sparse = make_dense(model)
    if sparse:
        info.notes.append(Note("sparse-constants", f"{sparse} sparse constants converted to dense ones"))
    if sort_protos(model.graph):
        info.notes.append(Note("nodes-sorted", "nodes were not in topological order: sorted"))
    _name_nodes(model, info)
    try:
        model, lowered = lower(model, opened.label)
    except ModelError:  # a session will say so; not everything that is done with a model needs one
        lowered = ""
    if lowered:
        info.ir_version = model.ir_version
        info.notes.append(Note("opset-lowered", lowered))
        _tidy(model)
    if own < opset:
        model = _convert_opset(model, opset, opened.label, info)
    info.metadata = {entry.key: entry.value for entry in model.metadata_props}
    info.edits = from_metadata(info.metadata)
    if model.training_info:
        info.notes.append(Note("training-dropped", "training information dropped: the graph is changed for inference"))
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        if model.HasField(name):
            setattr(info.model, name, getattr(model, name))
    info.model.configuration.extend(model.configuration)
    model = _infer(model, info)
    pairs = sum(node.op_type in QDQ for node in node_protos(model.graph))
    if pairs:
        info.notes.append(
            Note("already-has-pairs", f"the model has {pairs} QuantizeLinear and DequantizeLinear nodes already")
        )
    graph = build(model, opened.payloads, info)
    _read_node_metadata(graph)
    if listed:
        _note_listed(graph, listed, defaults=own_ir >= IR_WITH_DEFAULTS)
    require_no_traps(graph)
    require_one_float_type(graph)
    return graph


def _read_node_metadata(graph: Graph) -> None:
    """In place. Give nodes the metadata that the exporter wrote into that of the model.

    Raises:
        ModelError: it is damaged.
    """
    text = graph.info.metadata.pop(NODES_KEY, "")
    if not text:
        return
    try:
        rows = [(name, key, value) for name, some in packed_json.unpack(text).items() for key, value in some.items()]
    except (AttributeError, ValueError) as error:
        raise ModelError(
            f"the metadata '{NODES_KEY}' cannot be read ({error}): remove it or write the file again"
        ) from error
    names = {node.name for node in all_nodes(graph)}
    for name, key, value in rows:
        if name in names:
            set_node_metadata(graph, name, key, str(value))


def _remove_initializer_inputs(model: ModelProto, info: ModelInfo) -> tuple[str, ...]:
    """In place. Remove initializers from the inputs: they are constants. Return those of all scopes.

    Before IR version 4 every initializer had to be an input, and onnx's tools fail otherwise: the version is raised.
    """
    removed: list[str] = []
    for scope in graph_protos(model.graph):
        held = {tensor.name for tensor in scope.initializer}
        held.update(sparse.values.name for sparse in scope.sparse_initializer)
        if not held:
            continue
        model.ir_version = max(model.ir_version, 4)
        listed = tuple(value.name for value in scope.input if value.name in held)
        if not listed:
            continue
        if scope is model.graph:
            info.overridable = listed
        removed += listed
        replace_entries(scope.input, [value for value in scope.input if value.name not in held])
    info.ir_version = model.ir_version
    return tuple(removed)


def _note_listed(graph: Graph, listed: Sequence[str], *, defaults: bool) -> None:
    """In place. Note what becomes of initializers that were listed among the inputs.

    Exporters listed all weights, first because they had to, then by habit: runtimes do not optimize what a caller may
    replace. A list without weights of layers is meant: its initializers are defaults of inputs.

    Args:
        defaults: whether the IR version has defaults of inputs.
    """
    tensors = tensors_by_name(graph)
    uses = {name: readers(tensors[name]) if name in tensors else [] for name in graph.info.overridable}
    names = ", ".join(f"'{name}'" for name in listed[:MOST_NAMED])
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    if defaults and not any(_is_weight(node, index) for users in uses.values() for node, index in users):
        graph.info.default_uses = {name: len(users) for name, users in uses.items()}
        why = "their values are used, and those from which nothing else is computed stay inputs with a default"
    else:
        why = "they are constants now, which a caller cannot replace"
    graph.info.notes.append(
        Note("initializers-listed", f"{len(listed)} initializers were listed among the inputs: {why} ({names}{more})")
    )


def _is_weight(node: Node, index: int) -> bool:
    """Return whether an input is a weight or bias of a layer, or a parameter of a batch norm."""
    return index > 0 and (node.op in LINEAR or node.op in RECURRENT or node.op == "BatchNormalization")


def _name_nodes(model: ModelProto, info: ModelInfo) -> None:
    """In place. Give every node of every scope a unique name; the first node with a name keeps it."""
    nodes = list(node_protos(model.graph))
    originals = {node.name for node in nodes}
    taken: set[str] = set()
    counts: dict[str, int] = {}
    unnamed = renamed = 0
    for node in nodes:
        if node.name and node.name not in taken:
            taken.add(node.name)
            continue
        unnamed += not node.name
        renamed += bool(node.name)
        stem, count = node.name or node.op_type, counts.get(node.name or node.op_type, 0)
        name = ""
        while not name or name in originals or name in taken:
            name, count = f"{stem}_{count}" if not node.name or count else f"{stem}_1", count + 1
        counts[stem] = count
        taken.add(name)
        node.name = name
    if unnamed:
        info.notes.append(Note("nodes-named", f"{unnamed} nodes had no name: named after their operator"))
    if renamed:
        info.notes.append(Note("nodes-renamed", f"{renamed} nodes had the name of another: numbered"))


def _convert_opset(model: ModelProto, opset: int, label: str, info: ModelInfo) -> ModelProto:
    converted = convert_opset(model, opset, label)
    before = model.ir_version
    converted.ir_version = info.ir_version = max(before, ir_version_for(converted.opset_import))
    raised = f", and IR version {before} raised to {info.ir_version}" if info.ir_version > before else ""
    why = f": {OPSET_REASONS[opset]}" if opset in OPSET_REASONS else ""
    info.notes.append(Note("opset-converted", f"opset converted from {info.original_opset} to {opset}{raised}{why}"))
    _tidy(converted)
    return converted


def _tidy(model: ModelProto) -> None:
    """In place. Sort nodes that were converted, and name new ones without a note."""
    sort_protos(model.graph)
    _name_nodes(model, ModelInfo())


def _infer(model: ModelProto, info: ModelInfo) -> ModelProto:
    """Infer types and shapes of intermediate tensors; inputs and outputs keep their declarations.

    If the file contradicts itself, they are inferred as far as possible.
    """
    try:
        try:
            inferred = infer_shapes(model, strict_mode=True)
        except ONNX_ERRORS:  # the message does not say if an output contradicts its operators
            _correct_outputs(model, info)
            inferred = infer_shapes(model)
        if not has_long_vector(inferred):
            inferred = infer_shapes(inferred, data_prop=True)
    except ONNX_ERRORS as error:
        info.notes.append(Note("shapes-not-inferred", f"shapes could not be inferred: {single_line(error)}"))
        return model
    for scope, before in zip(graph_protos(inferred.graph), graph_protos(model.graph), strict=True):
        for now, was in zip(scope.output, before.output, strict=True):
            kind = was.type.WhichOneof("value")
            if kind is not None and (kind != "tensor_type" or was.type.tensor_type.HasField("shape")):
                now.CopyFrom(was)
    return inferred


def _correct_outputs(model: ModelProto, info: ModelInfo) -> None:
    """In place. Make sizes of outputs dynamic if they contradict the operators. Runtimes only warn about them.

    Either side may be wrong: an exporter's declaration, or onnx's inference (1.23: STFT with a constant frame length).
    """
    undeclared = copied(model)
    for value in undeclared.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    outputs = infer_shapes(undeclared).graph.output
    for output, value in zip(model.graph.output, outputs, strict=True):
        (_, declared), (_, inferred) = read_type(output.type), read_type(value.type)
        if declared is None or inferred is None:
            continue
        sizes = None
        if len(declared) == len(inferred):
            pairs = zip(declared, inferred, strict=True)
            sizes = [None if isinstance(a, int) and isinstance(b, int) and a != b else a for a, b in pairs]
            if sizes == list(declared):
                continue
        output.type.CopyFrom(onnx.helper.make_tensor_type_proto(output.type.tensor_type.elem_type, sizes))
        info.notes.append(
            Note(
                "output-sizes-dynamic",
                f"output '{output.name}' is declared as {list(declared)}, and its operators give {list(inferred)}: "
                "the sizes that differ become dynamic",
            )
        )


def has_long_vector(model: ModelProto) -> bool:
    """Whether data propagation (onnx 1.23) would use a hundred bytes for each element of a long constant vector."""
    for scope in graph_protos(model.graph):
        if any(len(tensor.dims) == 1 and tensor.dims[0] > LONGEST_VECTOR for tensor in scope.initializer):
            return True
        for values in (scope.input, scope.value_info, scope.output):
            dims = (value.type.tensor_type.shape.dim for value in values)
            if any(len(sizes) == 1 and sizes[0].dim_value > LONGEST_VECTOR for sizes in dims):
                return True
    return False


def to_proto(graph: Graph) -> ModelProto:
    """Convert the graph to a model that contains all its weights.

    Raises:
        ModelError: it would be larger than protobuf's limit of 2 GiB, or as in `exporter.skeleton`.
    """
    try:
        model: ModelProto = ModelProto.FromString(b"".join(skeleton(graph).pieces()))
        return model
    except DecodeError:
        raise ModelError("the model is larger than protobuf's limit of 2 GiB: save it to a file instead") from None


def at_opset(graph: Graph, opset: int) -> Graph:
    """Return a copy of the graph converted to at least `opset`, which knows the files that the graph came from.

    Raises:
        ModelError: onnx cannot convert it.
    """
    converted = load(to_proto(graph), opset=opset)
    for name in ("path", "files", "declared"):
        setattr(converted.info, name, getattr(graph.info, name))
    return converted


def serialize(graph: Graph) -> tuple[bytes, dict[str, Array]]:
    """Serialize the graph for a session: the model's bytes, and its large weights by name.

    The large weights are external data in the bytes; pass them by name to `SessionOptions.add_external_initializers`.
    They are mapped arrays: nothing is read before the session reads it (values that are not aligned in their file are
    copied). Types that numpy does not have itself (bfloat16, int4, ...) are stored in the model, because onnxruntime
    cannot use such arrays.

    Raises:
        ModelError: the part stored in the model is larger than protobuf's limit of 2 GiB.
    """
    parts = skeleton(graph, inline=SESSION_BYTES, hoist=True)
    external = {number for number, values in enumerate(parts.payloads) if values.dtype.isbuiltin == 1}

    def place(number: int, size: int) -> dict[str, str]:
        name = parts.names[number]
        return {"location": name, "offset": "0", "length": str(size)} if number in external else {}

    try:
        content = parts.located(place)
    except (ValueError, EncodeError):
        raise ModelError("weights that must be stored in the model are larger than protobuf's limit of 2 GiB") from None
    return content, {parts.names[number]: _aligned(parts.payloads[number]) for number in sorted(external)}


def _aligned(values: Array | MappedWeights) -> Array:
    loaded: Array = values.load() if isinstance(values, MappedWeights) else values
    return np.require(loaded, requirements=["C", "A"])


def digest(graph: Graph) -> str:
    """Compute the sha256 of structure and weights; storage of the weights and metadata of the file do not count."""
    parts = skeleton(graph, info=False, inline=0)
    for scope in graph_protos(parts.model.graph):  # inferred types are not part of the structure
        del scope.value_info[:]
        if scope is not parts.model.graph:
            for value in [*scope.input, *scope.output]:
                value.ClearField("type")
    total = hashlib.sha256(parts.model.SerializeToString(deterministic=True))
    for values in array_digests(parts.payloads):
        total.update(values)
    return total.hexdigest()


def save(
    graph: Graph, path: str | os.PathLike[str], *, force: bool = False, external_over: int = EXTERNAL_BYTES
) -> None:
    """Write the graph to a file atomically, with the weights streamed from their source.

    Types of inner tensors are written where the file that was loaded states them, and of operators that are not ONNX's.

    Args:
        force: replace an existing file (never the one that was read).
        external_over: if the weights have more bytes, they are written to `<name>.data` next to the model.

    Raises:
        OutputError: as in `output_files.write_model`.
        ModelError: a file that was read has changed since, or as in `exporter.skeleton`.
    """
    for source in graph.info.sources:
        source.require_unchanged()
    write_model(
        skeleton(graph, inferred=False), Path(path), inputs=graph.info.files, force=force, external_over=external_over
    )
