"""Models newer than the installed onnxruntime reads, in an opset and IR version that it reads.

A release of onnx comes months before the onnxruntime that reads its opset. Operators that the older opset lacks become
the nodes by which their schema defines them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import onnx
from onnx import FunctionProto, ModelProto, NodeProto, TypeProto

from sbonnx.errors import DeviceError
from sbonnx.graph.local_functions import inline
from sbonnx.graph.opset_convert import NEWEST, convert_opset
from sbonnx.graph.protos import (
    ONNX_ERRORS,
    copied,
    domain_of,
    graph_protos,
    ir_version_for,
    node_protos,
    replace_entries,
)
from sbonnx.graph.storage.type_lowering import MOST_BYTES, parsed
from sbonnx.system.runtime import loads, version

EXPANDED: Final = "sbonnx.expanded"
"""Domain of definitions until they are inlined."""

LAST_KERNELS: Final = {"Swish": 24}
"""Last opset in which onnxruntime (1.31) has a kernel for an operator; later it refuses the model."""


class RuntimeLimits(NamedTuple):
    """Newest opset of the default domain and IR version that a runtime reads."""

    opset: int
    ir_version: int


OLDEST_RUNTIME: Final = RuntimeLimits(23, 11)
"""Of the oldest onnxruntime that is supported, 1.23."""


@cache
def runtime_limits() -> RuntimeLimits | None:
    """Return what the installed onnxruntime reads, found by loading models; None without onnxruntime."""
    opset, ir_version = OLDEST_RUNTIME
    try:
        return RuntimeLimits(
            next((newer for newer in range(NEWEST, opset, -1) if _loads(newer, ir_version)), opset),
            next((newer for newer in range(onnx.IR_VERSION, ir_version, -1) if _loads(opset, newer)), ir_version),
        )
    except DeviceError:
        return None


def _loads(opset: int, ir_version: int) -> bool:
    header = f'<ir_version: {ir_version}, opset_import: ["" : {opset}]>'
    model = onnx.parser.parse_model(f"{header} one (float[1] x) => (float[1] y) {{ y = Neg(x) }}")
    return loads(model.SerializeToString())


def lower(model: ModelProto, label: str) -> tuple[ModelProto, str]:
    """Return the model in an opset and IR version that onnxruntime reads, and what was changed ("": nothing).

    Args:
        model: sorted, every node named. It is not changed, but for its IR version.

    Raises:
        ModelError: an operator has neither a form in the older opset nor a definition; it is named.
    """
    own = RuntimeLimits(next(entry.version for entry in model.opset_import if not domain_of(entry)), model.ir_version)
    if own.opset <= OLDEST_RUNTIME.opset and own.ir_version <= OLDEST_RUNTIME.ir_version:
        return model, ""
    limits = runtime_limits()
    if limits is None:
        return model, ""
    opset = min(own.opset, limits.opset)
    model, replaced = _expand(model, own.opset, opset, label)
    if own.opset > opset:
        model = convert_opset(model, opset, label)
    model.ir_version = max(min(own.ir_version, limits.ir_version), ir_version_for(model.opset_import))
    changes = [
        f"{what} lowered from {before} to {after}"
        for what, before, after in zip(RuntimeLimits._fields, own, (opset, model.ir_version), strict=True)
        if after < before
    ]
    changes += [f"{op} replaced by the nodes that define it" for op in sorted(replaced)]
    runtime = ".".join(map(str, version()))
    return (
        model,
        f"{', '.join(changes).replace('ir_version', 'IR version')}, for onnxruntime {runtime}" if changes else "",
    )


def readable(model: str | bytes) -> bytes | None:
    """Return a model that onnxruntime reads; None if it does so already, or with 2 GiB or more.

    Args:
        model: path, or serialized model.

    Raises:
        ModelError: as `lower`.
    """
    proto, changes = lower(parsed(model), model if isinstance(model, str) else "the model")
    return proto.SerializeToString() if changes and proto.ByteSize() < MOST_BYTES else None


def _expand(model: ModelProto, own: int, opset: int, label: str) -> tuple[ModelProto, set[str]]:
    """Replace operators that this opset lacks, or onnxruntime in this opset, by their definitions."""
    replaced: set[str] = set()
    while any(_is_missing(node, own, opset) for node in node_protos(model.graph)):
        model = _typed(model)  # for the definitions
        types = _types(model)
        nodes = [node for node in node_protos(model.graph) if _is_missing(node, own, opset)]
        replaced = replaced or {node.op_type for node in nodes}
        for number, node in enumerate(nodes):
            model.functions.append(_definition(node, own, types, f"{node.op_type}_{number}"))
        domains = list(model.opset_import)
        model.opset_import.add(domain=EXPANDED, version=1)
        model = inline(model, label)
        replace_entries(model.opset_import, domains)
    return model, replaced


def _is_missing(node: NodeProto, own: int, opset: int) -> bool:
    """Whether a node of the default domain has no kernel in this opset, and a definition."""
    if domain_of(node) or not onnx.defs.has(node.op_type, max_inclusive_version=own):
        return False
    schema: Any = onnx.defs.get_schema(node.op_type, own)
    late = not onnx.defs.has(node.op_type, max_inclusive_version=opset) or LAST_KERNELS.get(node.op_type, opset) < opset
    return late and bool(schema.has_function or schema.has_context_dependent_function)


def _definition(node: NodeProto, opset: int, types: Mapping[str, TypeProto], name: str) -> FunctionProto:
    """In place. Turn a node into a call of a local function, its definition by the standard; return that function."""
    schema: Any = onnx.defs.get_schema(node.op_type, opset)
    if schema.has_function:
        function: FunctionProto = copied(schema.function_body)
    else:
        inputs = [types.get(value, TypeProto()).SerializeToString() for value in node.input]
        function = FunctionProto.FromString(schema.get_context_dependent_function(node.SerializeToString(), inputs))
    given = {attribute.name for attribute in node.attribute}
    defaults = [schema.attributes[one].default_value for one in function.attribute if one not in given]
    node.attribute.extend(default for default in defaults if default.name)
    # The operators of these definitions gained only types in opsets 25 to 28: the inliner need not convert them, which
    # it cannot do in bodies.
    replace_entries(function.opset_import, [onnx.helper.make_opsetid("", opset)])
    function.domain = node.domain = EXPANDED
    function.name = node.op_type = name
    return function


def _typed(model: ModelProto) -> ModelProto:
    """Return a copy with types inferred as far as possible."""
    try:
        return onnx.shape_inference.infer_shapes(model)
    except ONNX_ERRORS:
        return copied(model)


def _types(model: ModelProto) -> dict[str, TypeProto]:
    """Return the known types of the tensors of all scopes."""
    scopes = list(graph_protos(model.graph))
    types = {value.name: value.type for scope in scopes for value in (*scope.input, *scope.output, *scope.value_info)}
    for tensor in (tensor for scope in scopes for tensor in scope.initializer):
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return types
