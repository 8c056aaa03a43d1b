"""Conversion to a newer opset: onnx's version converter, and fixes for its errors.

Each fix names what the converter (onnx 1.23) does, and was checked by running both models in onnxruntime; the tests
repeat that. A fix can be removed when onnx's own adapter does the same.
"""

from __future__ import annotations

from collections.abc import Callable
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
    ValueInfoProto,
    numpy_helper,
    version_converter,
)

from sbonnx.errors import ModelError
from sbonnx.graph.convert.opset_rules import complaint
from sbonnx.graph.protos import ONNX_ERRORS, body_protos, describe, graph_protos, node_protos
from sbonnx.graph.storage.weights import numpy_dtype

After = Callable[[NodeProto, GraphProto], None]


@dataclass
class _View:
    """Known types of the tensors visible in a scope, and the values of small constants."""

    types: dict[str, onnx.TypeProto] = field(default_factory=dict)
    values: dict[str, TensorProto] = field(default_factory=dict)

    def rank(self, name: str) -> int | None:
        tensor = self.types[name].tensor_type if name in self.types else None
        return len(tensor.shape.dim) if tensor is not None and tensor.HasField("shape") else None

    def element(self, name: str) -> int:
        return self.types[name].tensor_type.elem_type if name in self.types else 0


def lift(model: ModelProto, opset: int, label: str) -> ModelProto:
    """Convert the model to at least this opset of the default domain; names, metadata and interface stay.

    Args:
        model: sorted, every node named, constants dense. Attributes with sparse tensors are removed from it.

    Raises:
        ModelError: an operator cannot be converted; it is named.
    """
    own = next(entry.version for entry in model.opset_import if not entry.domain)
    where = f"{label} cannot be lifted from opset {own} to {opset}"
    for step in (9, opset):  # the oldest forms of Upsample need two steps
        if own < step <= opset:
            model, own = _step(model, own, step, where), step
    return model


def _step(model: ModelProto, own: int, opset: int, where: str) -> ModelProto:
    aside = _set_aside(model)
    typed = _with_types(model)
    fixes = _plan_fixes(typed, own, opset, where)
    for node in node_protos(typed.graph):
        if not node.domain and own < REPLACED.get(node.op_type, 0) <= opset:
            node.domain = HIDDEN
    typed.opset_import.add(domain=HIDDEN, version=1)
    try:
        lifted: ModelProto = version_converter.convert_version(typed, opset)
    except ONNX_ERRORS as error:
        raise ModelError(f"{where}: {_reason(str(error))}. Export it with a newer opset") from None
    _put_back(model, lifted)
    kept = [entry for entry in lifted.opset_import if entry.domain != HIDDEN]
    del lifted.opset_import[:]
    lifted.opset_import.extend(kept)
    for scope in graph_protos(lifted.graph):
        for node in scope.node:
            node.attribute.extend(aside.get(node.name, ()))
            if node.domain == HIDDEN:
                node.ClearField("domain")
            for fix in fixes.get(node.name, ()):
                fix(node, scope)
            if not node.domain and complaint(node.op_type, opset):
                raise ModelError(f"{where}: {describe(node)} has no form in opset {opset}")
    return lifted


def _reason(message: str) -> str:
    """Extract the reason from a C++ assertion."""
    return " ".join(message.split("failed:")[-1].split()).rstrip(".")


def _set_aside(model: ModelProto) -> dict[str, list[AttributeProto]]:
    """In place. Remove attributes that hold sparse tensors, which the converter rejects; return them by node name."""
    aside: dict[str, list[AttributeProto]] = {}
    for node in node_protos(model.graph):
        sparse = [one for one in node.attribute if one.HasField("sparse_tensor") or one.sparse_tensors]
        if sparse:
            aside[node.name] = [_copy(one) for one in sparse]
            kept = [_copy(one) for one in node.attribute if one.name not in {other.name for other in sparse}]
            del node.attribute[:]
            node.attribute.extend(kept)
    return aside


def _copy(attribute: AttributeProto) -> AttributeProto:
    copied = AttributeProto()
    copied.CopyFrom(attribute)
    return copied


def _put_back(before: ModelProto, after: ModelProto) -> None:
    """In place. Restore node names, doc strings, metadata and input and output types, which the converter drops."""
    named = {node.name: node for node in node_protos(before.graph)}
    for node in node_protos(after.graph):
        old = named.get(node.name)
        if old is not None:
            node.MergeFrom(NodeProto(doc_string=old.doc_string or None))
            del node.metadata_props[:]
            node.metadata_props.extend(old.metadata_props)
            del node.device_configurations[:]
            node.device_configurations.extend(old.device_configurations)
    interface = {value.name: value for value in [*before.graph.input, *before.graph.output]}
    for value in [*after.graph.input, *after.graph.output]:
        value.CopyFrom(interface[value.name])
    held = {tensor.name: tensor for scope in graph_protos(before.graph) for tensor in scope.initializer}
    for tensor in (tensor for scope in graph_protos(after.graph) for tensor in scope.initializer):
        if tensor.name in held:
            tensor.MergeFrom(TensorProto(doc_string=held[tensor.name].doc_string or None))
            tensor.metadata_props.extend(held[tensor.name].metadata_props)
    _keep_values(before.graph, after.graph)
    after.graph.MergeFrom(GraphProto(doc_string=before.graph.doc_string or None))
    for name in ("metadata_props", "quantization_annotation"):
        del getattr(after.graph, name)[:]
        getattr(after.graph, name).extend(getattr(before.graph, name))
    del after.configuration[:]
    after.configuration.extend(before.configuration)


def _keep_values(before: GraphProto, after: GraphProto) -> None:
    """In place. Restore the value_info of the main graph for tensors that still exist."""
    made = {name for node in after.node for name in node.output}
    kept = {value.name: value for value in after.value_info}
    kept.update({value.name: value for value in before.value_info if value.name in made})
    copies = [ValueInfoProto.FromString(value.SerializeToString()) for value in kept.values()]
    del after.value_info[:]
    after.value_info.extend(copies)


def _with_types(model: ModelProto) -> ModelProto:
    """Return a copy with the types and shapes that can be inferred."""
    try:
        return onnx.shape_inference.infer_shapes(model)
    except ONNX_ERRORS:  # types are optional: they allow more conversions
        copied = ModelProto()
        copied.CopyFrom(model)
        return copied


def _plan_fixes(typed: ModelProto, own: int, opset: int, where: str) -> dict[str, list[After]]:
    """Return the fixes to apply to nodes, by name, after the conversion. Refuse errors that cannot be fixed."""
    read = {name for node in node_protos(typed.graph) for name in node.input}
    read.update(value.name for scope in graph_protos(typed.graph) for value in scope.output)
    fixes: dict[str, list[After]] = {}

    def visit(scope: GraphProto, outer: _View) -> None:
        view = _look(scope, outer)
        for node in scope.node:
            for crossed, op, make in FIXES:
                if node.op_type == op and not node.domain and own < crossed <= opset:
                    fix = make(node, view, read, opset)
                    if isinstance(fix, str):
                        raise ModelError(f"{where}: {describe(node)}: {fix}. Export it with a newer opset")
                    fixes.setdefault(node.name, []).append(fix)
            for _, body in body_protos(node):
                visit(body, view)

    visit(typed.graph, _View())
    return fixes


def _look(scope: GraphProto, outer: _View) -> _View:
    view = _View(dict(outer.types), dict(outer.values))
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
    return next((one.s.decode() for one in node.attribute if one.name == "mode"), "nearest")


def _set(node: NodeProto, name: str, value: int | str) -> None:
    kept = [_copy(one) for one in node.attribute if one.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])


def _leave(node: NodeProto, scope: GraphProto) -> None:
    """Do nothing: no fix is needed."""


def _prelu(node: NodeProto, view: _View, read: set[str], opset: int) -> After | str:
    """Before opset 7 a slope is per channel; the adapter leaves it, so that it becomes per column."""
    shape = view.types[node.input[1]].tensor_type.shape.dim if node.input[1] in view.types else []
    if all(dim.dim_value == 1 for dim in shape) and len(shape):
        return _leave
    return "before opset 7 the slope of PRelu runs over channels, from then on over the last axis"


def _scan(node: NodeProto, view: _View, read: set[str], opset: int) -> After | str:
    """Scan of opset 8 has a batch axis; the adapter drops it and changes the shapes of the model's inputs."""
    return "the Scan of opset 8 has a batch axis that newer ones have not"


def _hardmax(node: NodeProto, view: _View, read: set[str], opset: int) -> After | str:
    """Before opset 13 Hardmax works on the flattened (rows, columns); the adapter changes nothing."""
    axis, rank = next((one.i for one in node.attribute if one.name == "axis"), 1), view.rank(node.input[0])
    if rank is None or axis % rank != rank - 1:
        return "before opset 13 Hardmax flattens its input, and here that is not the same as its newer form"
    return lambda lifted, scope: _set(lifted, "axis", -1)


def _upsample(node: NodeProto, view: _View, read: set[str], opset: int) -> After | str:
    """Upsample uses asymmetric coordinates, rounded down; the adapter leaves Resize's new default, half_pixel."""
    return _as_resize("floor", opset)


def _resize(node: NodeProto, view: _View, read: set[str], opset: int) -> After | str:
    """Fix as `_upsample`. Rounding of nearest was undefined before 11: onnxruntime uses floor up and ceil down."""
    if _mode(node) != "nearest":
        return _as_resize("floor", opset)
    tensor = view.values.get(node.input[1])
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
        return "which rounding the nearest Resize of opset 10 has depends on its scales, and they are not constant"
    scales = numpy_helper.to_array(tensor)
    if (scales >= 1).all():
        return _as_resize("floor", opset)
    if (scales <= 1).all():
        return _as_resize("ceil", opset)
    return "a nearest Resize of opset 10 that enlarges one axis and shrinks another has no newer form"


def _as_resize(rounding: str, opset: int) -> After:
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


def _scatter(node: NodeProto, view: _View, read: set[str], opset: int) -> After | str:
    """ScatterElements is Scatter renamed; the adapter renames its output as well."""

    def fix(node: NodeProto, scope: GraphProto) -> None:
        node.op_type = "ScatterElements"

    return fix


def _clip(node: NodeProto, view: _View, read: set[str], opset: int) -> After | str:
    """The adapter creates float32 bounds, whatever the input type."""
    return _retype(view.element(node.input[0]), first=1)


def _pad(node: NodeProto, view: _View, read: set[str], opset: int) -> After | str:
    """The adapter creates a float32 value, whatever the input type, and leaves the attribute if the mode needs none."""
    retype = _retype(view.element(node.input[0]), first=2)

    def fix(lifted: NodeProto, scope: GraphProto) -> None:
        retype(lifted, scope)
        kept = [_copy(one) for one in lifted.attribute if one.name != "value"]
        del lifted.attribute[:]
        lifted.attribute.extend(kept)

    return fix


def _dropout(node: NodeProto, view: _View, read: set[str], opset: int) -> After | str:
    """At inference the mask was all false in onnxruntime before opset 12, and is all true since."""
    if len(node.output) > 1 and node.output[1] in read:
        return f"its mask '{node.output[1]}' is used, and its meaning at inference changed in opset 12"
    return _leave


def _retype(element: int, *, first: int) -> After:
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


FIXES: Final[tuple[tuple[int, str, Callable[[NodeProto, _View, set[str], int], After | str]], ...]] = (
    (7, "PRelu", _prelu),
    (9, "Scan", _scan),
    (10, "Upsample", _upsample),
    (11, "Resize", _resize),
    (11, "Scatter", _scatter),
    (11, "Clip", _clip),
    (11, "Pad", _pad),
    (12, "Dropout", _dropout),
    (13, "Hardmax", _hardmax),
)
"""(opset of the change, operator, function): it returns a fix to apply after the conversion, or why there is none."""

REPLACED: Final = {"Upsample": 10, "Resize": 11, "Scatter": 11}
"""Operators converted by the fix alone: the adapters lose the names of their outputs."""

HIDDEN: Final = "sbonnx.lift"
"""Domain that hides them from the converter."""
