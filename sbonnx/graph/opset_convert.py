"""Opsets: checks against the installed onnx, and conversion to a newer one by onnx's version converter, with fixes.

Each fix names what the converter (onnx 1.23) does, and was checked by running both models in onnxruntime; the tests
repeat that. A fix can be removed when onnx's own adapter does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    numpy_helper,
    version_converter,
)

from sbonnx.errors import ModelError
from sbonnx.graph.protos import (
    ONNX_ERRORS,
    body_protos,
    copied,
    describe,
    domain_of,
    graph_protos,
    node_protos,
    replace_entries,
    single_line,
)
from sbonnx.graph.storage.weights import numpy_dtype
from sbonnx.ops import RUNTIME_OPS

NEWEST: Final = int(onnx.defs.onnx_opset_version())
"""Newest opset of the default domain that the installed onnx supports."""

REPLACED: Final = {"Upsample": 10, "Resize": 11, "Scatter": 11}
"""Operators converted by the fix alone: the adapters lose the names of their outputs."""

HIDDEN: Final = "sbonnx.hidden"
"""Domain that hides them from the converter."""

FixFunction = Callable[[NodeProto, GraphProto], None]
"""Fix of a converted node in its scope."""


def default_opset(model: ModelProto, label: str) -> int:
    """In place. Normalize "ai.onnx" to "" and return the version of the default domain.

    Raises:
        ModelError: there is none, two disagree, or the opset or IR version is not supported.
    """
    if model.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"{label} has IR version {model.ir_version}; onnx {onnx.__version__} reads 1 to {onnx.IR_VERSION}"
        )
    versions: dict[str, int] = {}
    for entry in model.opset_import:
        domain = domain_of(entry)
        if versions.setdefault(domain, entry.version) != entry.version:
            raise ModelError(f"{label} imports two versions of the domain '{domain or 'ai.onnx'}'")
    if "" not in versions:
        raise ModelError(f"{label} imports no version of ONNX's own operators: opset_import lacks the default domain")
    if not 1 <= versions[""] <= NEWEST:
        raise ModelError(f"{label} has opset {versions['']}; sbonnx with onnx {onnx.__version__} reads 1 to {NEWEST}")
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(domain, version) for domain, version in versions.items())
    return versions[""]


def require_known_ops(model: ModelProto, opset: int, label: str) -> None:
    """In place. Normalize the default domain of nodes to "".

    Raises:
        ModelError: the opset lacks an operator of the default domain, or a domain is not imported.
    """
    domains = {entry.domain for entry in model.opset_import}
    bad: dict[str, NodeProto] = {}
    for node in node_protos(model.graph):
        if not domain_of(node):
            node.ClearField("domain")
            if complaint(node.op_type, opset):
                bad.setdefault(node.op_type, node)
        elif node.domain not in domains:
            raise ModelError(f"{describe(node)}: the model does not import the domain '{node.domain}'")
    if bad:
        first = next(iter(bad.values()))
        others = f" (also {', '.join(sorted(set(bad) - {first.op_type}))})" if len(bad) > 1 else ""
        raise ModelError(f"{label}: {describe(first)}: {complaint(first.op_type, opset)}{others}")


def complaint(op: str, opset: int) -> str | None:
    """Return why an operator of the default domain cannot be used in this opset, or None."""
    if op in RUNTIME_OPS:
        return None
    try:
        schema = onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return f"opset {opset} of ONNX has no operator '{op}'"
    return (
        f"the operator '{op}' is deprecated in opset {opset}: export it with another opset"
        if schema.deprecated
        else None
    )


@dataclass
class _KnownTensors:
    """Types of the tensors visible in a scope, as far as known, and the values of small constants."""

    types: dict[str, onnx.TypeProto] = field(default_factory=dict)
    values: dict[str, TensorProto] = field(default_factory=dict)

    def rank(self, name: str) -> int | None:
        tensor = self.types[name].tensor_type if name in self.types else None
        return len(tensor.shape.dim) if tensor is not None and tensor.HasField("shape") else None

    def element(self, name: str) -> int:
        return self.types[name].tensor_type.elem_type if name in self.types else 0


def hide_runtime_ops(model: ModelProto) -> int:
    """Move operators that only the runtime knows to a domain that onnx does not check. In place; return their number.

    The model imports that domain afterwards, whether or not it has such operators.
    """
    count = 0
    model.opset_import.add(domain=HIDDEN, version=1)
    for node in node_protos(model.graph):
        if not domain_of(node) and node.op_type in RUNTIME_OPS:
            node.domain = HIDDEN
            count += 1
    return count


def convert_opset(model: ModelProto, opset: int, label: str) -> ModelProto:
    """Convert the model to this opset of the default domain; names, metadata and interface stay.

    Args:
        model: sorted, every node named, constants dense. Attributes with sparse tensors are removed from it.

    Raises:
        ModelError: an operator cannot be converted; it is named.
    """
    own = next(entry.version for entry in model.opset_import if not entry.domain)
    where = f"{label} cannot be converted from opset {own} to {opset}"
    for step in (9, opset) if own < opset else (opset,):  # old forms of Upsample need two steps
        if own < step <= opset or opset < own:
            model, own = _convert(model, own, step, where), step
    return model


def _convert(model: ModelProto, own: int, opset: int, where: str) -> ModelProto:
    sparse = _remove_sparse(model)
    try:
        typed = onnx.shape_inference.infer_shapes(model)
    except ONNX_ERRORS:  # types are optional: they allow more conversions
        typed = copied(model)
    fixes = _plan_fixes(typed, own, opset, where)
    for node in node_protos(typed.graph):
        if not node.domain and own < REPLACED.get(node.op_type, 0) <= opset:
            node.domain = HIDDEN
    hide_runtime_ops(typed)
    try:
        converted: ModelProto = version_converter.convert_version(typed, opset)
    except ONNX_ERRORS as error:
        reason = single_line(str(error).split("failed:")[-1]).rstrip(".")  # of a C++ assertion
        raise ModelError(
            f"{where}: {reason}. Export it with {'a newer' if own < opset else 'an older'} opset"
        ) from None
    _restore_fields(model, converted)
    replace_entries(converted.opset_import, [entry for entry in converted.opset_import if entry.domain != HIDDEN])
    for scope in graph_protos(converted.graph):
        for node in scope.node:
            node.attribute.extend(sparse.get(node.name, ()))
            if node.domain == HIDDEN:
                node.ClearField("domain")
            for fix in fixes.get(node.name, ()):
                fix(node, scope)
            if not node.domain and complaint(node.op_type, opset):
                raise ModelError(f"{where}: {describe(node)} has no form in opset {opset}")
    return converted


def _remove_sparse(model: ModelProto) -> dict[str, list[AttributeProto]]:
    """In place. Remove attributes that hold sparse tensors, which the converter rejects; return them by node name."""
    removed: dict[str, list[AttributeProto]] = {}
    for node in node_protos(model.graph):
        sparse = [
            copied(attribute)
            for attribute in node.attribute
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors
        ]
        if sparse:
            removed[node.name] = sparse
            _remove_attributes(node, {attribute.name for attribute in sparse})
    return removed


def _remove_attributes(node: NodeProto, names: Collection[str]) -> None:
    replace_entries(node.attribute, [attribute for attribute in node.attribute if attribute.name not in names])


def _restore_fields(before: ModelProto, after: ModelProto) -> None:
    """In place. Restore node names, doc strings, metadata and input and output types, which the converter drops."""
    named = {node.name: node for node in node_protos(before.graph)}
    for node in node_protos(after.graph):
        old = named.get(node.name)
        if old is not None:
            node.MergeFrom(NodeProto(doc_string=old.doc_string or None))
            replace_entries(node.metadata_props, old.metadata_props)
            replace_entries(node.device_configurations, old.device_configurations)
    interface = {value.name: value for value in [*before.graph.input, *before.graph.output]}
    for value in [*after.graph.input, *after.graph.output]:
        value.CopyFrom(interface[value.name])
    held = {tensor.name: tensor for scope in graph_protos(before.graph) for tensor in scope.initializer}
    for tensor in (tensor for scope in graph_protos(after.graph) for tensor in scope.initializer):
        if tensor.name in held:
            tensor.MergeFrom(TensorProto(doc_string=held[tensor.name].doc_string or None))
            tensor.metadata_props.extend(held[tensor.name].metadata_props)
    computed = {name for node in after.graph.node for name in node.output}
    values = {value.name: value for value in after.graph.value_info}
    values.update({value.name: value for value in before.graph.value_info if value.name in computed})
    replace_entries(after.graph.value_info, values.values())
    after.graph.MergeFrom(GraphProto(doc_string=before.graph.doc_string or None))
    for name in ("metadata_props", "quantization_annotation"):
        replace_entries(getattr(after.graph, name), getattr(before.graph, name))
    replace_entries(after.configuration, before.configuration)


def _plan_fixes(typed: ModelProto, own: int, opset: int, where: str) -> dict[str, list[FixFunction]]:
    """Return the fixes to apply to nodes, by name, after the conversion. Refuse errors that cannot be fixed."""
    read = {name for node in node_protos(typed.graph) for name in node.input}
    read.update(value.name for scope in graph_protos(typed.graph) for value in scope.output)
    fixes: dict[str, list[FixFunction]] = {}

    def visit(scope: GraphProto, outer: _KnownTensors) -> None:
        view = _known_tensors(scope, outer)
        for node in scope.node:
            for crossed, op, make in FIXES:
                if node.op_type == op and not node.domain and own < crossed <= opset:
                    fix = make(node, view, read, opset)
                    if isinstance(fix, str):
                        raise ModelError(f"{where}: {describe(node)}: {fix}. Export it with a newer opset")
                    fixes.setdefault(node.name, []).append(fix)
            for _, body in body_protos(node):
                visit(body, view)

    visit(typed.graph, _KnownTensors())
    return fixes


def _known_tensors(scope: GraphProto, outer: _KnownTensors) -> _KnownTensors:
    view = _KnownTensors(dict(outer.types), dict(outer.values))
    for value in [*scope.value_info, *scope.output, *scope.input]:
        view.types[value.name] = value.type
    for tensor in scope.initializer:
        view.types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        view.values[tensor.name] = tensor
    for node in scope.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            view.values[node.output[0]] = node.attribute[0].t
    return view


def _mode(node: NodeProto) -> str:
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == "mode"), "nearest")


def _set(node: NodeProto, name: str, value: int | str) -> None:
    _remove_attributes(node, {name})
    node.attribute.append(onnx.helper.make_attribute(name, value))


def _leave(node: NodeProto, scope: GraphProto) -> None:
    """Do nothing: no fix is needed."""


def _prelu(node: NodeProto, view: _KnownTensors, read: set[str], opset: int) -> FixFunction | str:
    """Before opset 7 a slope is per channel; the adapter leaves it, so that it becomes per column."""
    shape = view.types[node.input[1]].tensor_type.shape.dim if node.input[1] in view.types else []
    if all(dim.dim_value == 1 for dim in shape) and len(shape):
        return _leave
    return "before opset 7 the slope of PRelu runs over channels, since then over the last axis"


def _hardmax(node: NodeProto, view: _KnownTensors, read: set[str], opset: int) -> FixFunction | str:
    """Before opset 13 Hardmax works on the flattened (rows, columns); the adapter changes nothing."""
    axis, rank = (
        next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1),
        view.rank(node.input[0]),
    )
    if rank is None or axis % rank != rank - 1:
        return "before opset 13 Hardmax flattens its input, which differs here from its newer form"
    return lambda converted, scope: _set(converted, "axis", -1)


def _resize(node: NodeProto, view: _KnownTensors, read: set[str], opset: int) -> FixFunction | str:
    """Rounding of nearest was undefined before opset 11: onnxruntime rounds down to enlarge and up to shrink."""
    if _mode(node) != "nearest":
        return _as_resize("floor", opset)
    tensor = view.values.get(node.input[1])
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
        return "the rounding of the nearest Resize of opset 10 depends on its scales, which are not constant"
    scales = numpy_helper.to_array(tensor)
    if (scales >= 1).all():
        return _as_resize("floor", opset)
    if (scales <= 1).all():
        return _as_resize("ceil", opset)
    return "a nearest Resize of opset 10 that enlarges one axis and shrinks another has no newer form"


def _as_resize(rounding: str, opset: int) -> FixFunction:
    def fix(node: NodeProto, scope: GraphProto) -> None:
        x, scales = node.input
        node.op_type = "Resize"
        del node.input[:]
        # The region of interest is unused in this mode; before 13 it could not be left out.
        node.input.extend([x, "" if opset >= 13 else scales, scales])
        _set(node, "coordinate_transformation_mode", "asymmetric")
        if _mode(node) == "nearest":
            _set(node, "nearest_mode", rounding)

    return fix


def _rename_scatter(node: NodeProto, scope: GraphProto) -> None:
    node.op_type = "ScatterElements"


def _pad(node: NodeProto, view: _KnownTensors, read: set[str], opset: int) -> FixFunction | str:
    """The adapter creates a float32 value, whatever the input type, and leaves the attribute if the mode needs none."""
    retype = _retype(view.element(node.input[0]), first=2)

    def fix(converted: NodeProto, scope: GraphProto) -> None:
        retype(converted, scope)
        _remove_attributes(converted, {"value"})

    return fix


def _dropout(node: NodeProto, view: _KnownTensors, read: set[str], opset: int) -> FixFunction | str:
    """At inference the mask was all false in onnxruntime before opset 12, and is all true since."""
    if len(node.output) > 1 and node.output[1] in read:
        return f"its mask '{node.output[1]}' is used, and its meaning at inference changed in opset 12"
    return _leave


def _retype(element: int, *, first: int) -> FixFunction:
    """Return a fix that casts constant inputs from `first` on to the element type of the input."""

    def fix(node: NodeProto, scope: GraphProto) -> None:
        makers = {maker.output[0]: maker for maker in scope.node if maker.op_type == "Constant"}
        for name in node.input[first:]:
            if name not in makers or not element or makers[name].attribute[0].t.data_type == element:
                continue
            tensor = makers[name].attribute[0].t
            kind = numpy_dtype(element)
            if kind.kind not in "fiu":
                continue  # not a type of this operator: the runtime reports it
            limits = np.finfo(kind) if kind.kind == "f" else np.iinfo(kind)
            values = numpy_helper.to_array(tensor).astype(np.float64).clip(float(limits.min), float(limits.max))
            tensor.CopyFrom(numpy_helper.from_array(values.astype(kind)))

    return fix


FIXES: Final[tuple[tuple[int, str, Callable[[NodeProto, _KnownTensors, set[str], int], FixFunction | str]], ...]] = (
    (7, "PRelu", _prelu),
    # the adapter drops the batch axis, and changes the shapes of the model's inputs
    (9, "Scan", lambda *_: "the Scan of opset 8 has a batch axis, newer ones have none"),
    # asymmetric coordinates, rounded down; the adapter leaves Resize's new default, half_pixel
    (10, "Upsample", lambda node, view, read, opset: _as_resize("floor", opset)),
    (11, "Resize", _resize),
    # the adapter renames the output too
    (11, "Scatter", lambda *_: _rename_scatter),
    # the adapter creates float32 bounds, whatever the input type
    (11, "Clip", lambda node, view, read, opset: _retype(view.element(node.input[0]), first=1)),
    (11, "Pad", _pad),
    (12, "Dropout", _dropout),
    (13, "Hardmax", _hardmax),
)
"""(opset of the change, operator, function): it returns a fix to apply after the conversion, or why there is none."""
