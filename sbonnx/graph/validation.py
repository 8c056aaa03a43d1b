"""Validation of a parsed model before native code processes it, and of constants that crash kernels.

onnx's version converter, shape inference and inliner do not check their input: an attribute whose type differs from its
operator's schema crashes the process. Requirements on the whole file are checked here once, so that all later code may
rely on them:

- nodes have as many inputs and outputs as their schema or function allows, and all required ones;
- attributes are listed once, have a value of the type that the schema demands, and required ones exist;
- bodies of If, Loop and Scan have as many outputs as their node (and as many inputs);
- tensors and types have at most `MAX_RANK` dimensions, sizes of tensors are not negative and match their values.

Checks of names, order and operators: `protos.sort_protos` and `opset_convert`. Limits of functions: `local_functions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto
from onnx.numpy_helper import to_array

from sbonnx.errors import ModelError
from sbonnx.graph.local_functions import Key, attribute_types, key_of
from sbonnx.graph.model import Constant, Graph, Node, Tensor
from sbonnx.graph.protos import (
    body_protos,
    describe,
    domain_of,
    function_scopes,
    graph_protos,
    node_protos,
    tensor_protos,
)
from sbonnx.graph.query import all_nodes, constant, dtype
from sbonnx.graph.storage.weights import byte_size
from sbonnx.ops import QDQ

MAX_RANK: Final = 64
"""Maximum dimensions of a tensor: numpy's limit."""

MAX_ELEMENTS: Final = 1 << 62
"""Maximum elements of a tensor: countable in 64 bits."""

FLOAT_NAMES: Final = ("float16", "float32", "float64", "bfloat16")
"""Types of which arithmetic operators take one."""

FIELDS: Final[dict[int, str]] = {
    AttributeProto.FLOAT: "f",
    AttributeProto.INT: "i",
    AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
    AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings",
    AttributeProto.TENSORS: "tensors",
    AttributeProto.GRAPHS: "graphs",
    AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTOS: "type_protos",
}
"""The field of an attribute that holds its value, by type."""

VALUES: Final = frozenset(FIELDS.values())

MESSAGES: Final = frozenset({"t", "g", "sparse_tensor", "tp"})
"""Fields that must be present for an attribute to have a value: a missing number or text is 0 or empty."""

MAX_VERSION: Final = (1 << 31) - 1
"""Largest opset version that onnx's functions accept."""

LEAST: Final = {"group": 1, "blocksize": 1, "num_groups": 1, "batch_dims": 0}
"""Attributes with their lowest valid value, for all operators: kernels use them as divisors or counts."""

BODIES_WITHOUT_BATCH: Final = 9
"""First opset in which a Scan has no inputs other than those of its body."""

DIVISIONS: Final = frozenset({"Div", "Mod"})

OVERFLOW_BYTES: Final = 4
"""Size of integers from which dividing the lowest one by -1 is a hardware fault; smaller types wrap around."""


@dataclass(frozen=True)
class Signature:
    """Limits of an operator's schema.

    Attributes:
        attributes: type by name.
        required: names of the required attributes.
        inputs, outputs: minimum and maximum count.
        single_inputs, single_outputs: positions that cannot be omitted (an empty name).
    """

    attributes: dict[str, int]
    required: frozenset[str]
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    single_inputs: frozenset[int]
    single_outputs: frozenset[int]


@lru_cache(maxsize=4096)
def signature(op: str, version: int, domain: str) -> Signature | None:
    """Return the limits of an operator in an opset; None if onnx has no schema for it."""
    if not 0 < version <= MAX_VERSION:
        return None
    try:
        schema = onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    types = {name: str(attribute.type).rpartition(".")[2] for name, attribute in schema.attributes.items()}
    return Signature(
        attributes={name: int(AttributeProto.AttributeType.Value(kind)) for name, kind in types.items()},
        required=frozenset(name for name, attribute in schema.attributes.items() if attribute.required),
        inputs=(schema.min_input, schema.max_input),
        outputs=(schema.min_output, schema.max_output),
        single_inputs=frozenset(place for place, parameter in enumerate(schema.inputs) if parameter.option == single),
        single_outputs=frozenset(place for place, parameter in enumerate(schema.outputs) if parameter.option == single),
    )


def validate(model: ModelProto) -> None:
    """Check nodes, attributes, tensors and types of all graphs and functions. The module docstring lists the rules.

    Args:
        model: large tensors may be references to payloads; every domain is imported once.

    Raises:
        ModelError: the first error, with the node, tensor or value that has it.
    """
    functions = attribute_types(model)
    versions = {entry.domain: entry.version for entry in model.opset_import}
    for scope in graph_protos(model.graph):
        _check_scope(scope, versions, functions)
    for function in model.functions:
        own = {domain_of(entry): entry.version for entry in function.opset_import}
        for scope in function_scopes(function):
            _check_scope(scope, {**versions, **own}, functions)
    for tensor, where in tensor_protos(model):
        check_tensor(tensor, where)
    if any(node.op_type == "SplitToSequence" for node in node_protos(model.graph)):
        _check_splits(model)


def _check_splits(model: ModelProto) -> None:
    """Check that no SplitToSequence splits into parts of 0 elements: shape inference of onnx < 1.23 divides by it."""
    nodes = list(node_protos(model.graph))
    zeros = {
        candidate.name for scope in graph_protos(model.graph) for candidate in scope.initializer if _is_zero(candidate)
    }
    zeros.update(
        node.output[0]
        for node in nodes
        if node.op_type == "Constant"
        and any(candidate.HasField("t") and _is_zero(candidate.t) for candidate in node.attribute)
    )
    for node in nodes:
        if node.op_type == "SplitToSequence" and len(node.input) > 1 and node.input[1] in zeros:
            raise ModelError(f"{describe(node)} splits into parts of 0 elements")


def _is_zero(tensor: TensorProto) -> bool:
    scalar = not tensor.dims and tensor.data_type in (TensorProto.INT32, TensorProto.INT64)
    return scalar and not to_array(tensor)


def _check_scope(scope: GraphProto, versions: dict[str, int], functions: dict[Key, dict[str, int]]) -> None:
    for value in [*scope.input, *scope.output, *scope.value_info]:
        for tensor in _types(value.type):
            rank = len(tensor.shape.dim)
            if rank > MAX_RANK:
                raise ModelError(f"'{value.name}' has {rank} dimensions; sbonnx reads up to {MAX_RANK}")
            if tensor.elem_type:
                byte_size(tensor.elem_type, 1)  # checks the element type
    for node in scope.node:
        domain = domain_of(node)
        _check_attributes(node)
        called = functions.get(key_of(node))
        if called is not None:
            _check_types(node, called)
        elif domain in versions:
            operator = signature(node.op_type, versions[domain], domain)
            if operator is not None:
                _check_node(node, operator)
        if not domain and (
            node.op_type in ("If", "Loop") or (node.op_type == "Scan" and versions[""] >= BODIES_WITHOUT_BATCH)
        ):
            _check_bodies(node)


def _check_attributes(node: NodeProto) -> None:
    """Check that each attribute has one value, of its declared type."""
    seen: set[str] = set()
    for attribute in node.attribute:
        if attribute.name in seen:
            raise ModelError(f"{describe(node)} lists attribute '{attribute.name}' twice")
        seen.add(attribute.name)
        field = FIELDS.get(attribute.type)
        if field is None:
            raise ModelError(
                f"{describe(node)}: attribute '{attribute.name}' has no type that onnx {onnx.__version__} knows"
            )
        held = VALUES & {descriptor.name for descriptor, _ in attribute.ListFields()}
        if held - {field}:
            text = f"{_name(attribute.type)}, and holds a value in the field '{min(held - {field})}'"
            raise ModelError(f"{describe(node)}: attribute '{attribute.name}' has type {text}")
        if field in MESSAGES and not held and not attribute.ref_attr_name:
            raise ModelError(
                f"{describe(node)}: attribute '{attribute.name}' of type {_name(attribute.type)} has no value"
            )


def _name(kind: int) -> str:
    return str(AttributeProto.AttributeType.Name(kind))


def _check_node(node: NodeProto, known: Signature) -> None:
    """Check that a node has the inputs, outputs and attributes of its operator."""
    for kind, names, (least, most), single in (
        ("input", node.input, known.inputs, known.single_inputs),
        ("output", node.output, known.outputs, known.single_outputs),
    ):
        if not least <= len(names) <= most:
            want = str(least) if least == most else f"{least} or more" if most >= 1 << 30 else f"{least} to {most}"
            raise ModelError(f"{describe(node)} has {_counted(len(names), kind)}; the operator has {want}")
        lacks = next((place for place, name in enumerate(names) if not name and place in single), None)
        if lacks is not None:
            raise ModelError(f"{describe(node)}: {kind} {lacks} has no name, and the operator needs it")
    _check_types(node, known.attributes)
    _check_values(node)
    missing = known.required.difference(attribute.name for attribute in node.attribute)
    if missing:
        raise ModelError(f"{describe(node)} lacks attribute '{min(missing)}', which the operator needs")
    if node.op_type == "Constant" and len(node.attribute) != 1:
        where = f"the Constant node of '{node.output[0]}'"
        raise ModelError(f"{where} must have one value, not {len(node.attribute)}")


def _check_values(node: NodeProto) -> None:
    """Check that numbers are not too small, and that strings of standard operators are text.

    Strings of a Constant or of other domains may be any bytes.
    """
    only_text = node.op_type != "Constant" and not domain_of(node)
    for attribute in node.attribute:
        least = LEAST.get(attribute.name)
        if (
            least is not None
            and attribute.type == AttributeProto.INT
            and attribute.i < least
            and not attribute.ref_attr_name
        ):
            raise ModelError(
                f"{describe(node)}: attribute '{attribute.name}' is {attribute.i}; it must be {least} or more"
            )
        for text in (attribute.s, *attribute.strings) if only_text else ():
            try:
                text.decode()
            except UnicodeDecodeError:
                raise ModelError(
                    f"{describe(node)}: attribute '{attribute.name}' is {text[:40]!r}, which is not text"
                ) from None


def _check_types(node: NodeProto, types: dict[str, int]) -> None:
    """Check that attributes have the types of the operator (or function); unknown attributes are not checked."""
    for attribute in node.attribute:
        want = types.get(attribute.name, attribute.type)
        if attribute.type != want:
            raise ModelError(
                f"{describe(node)}: attribute '{attribute.name}' is of type {_name(attribute.type)}, "
                f"the operator needs {_name(want)}: export the model again"
            )


def _counted(count: int, kind: str) -> str:
    return f"{count or 'no'} {kind}{'' if count == 1 else 's'}"


def _check_bodies(node: NodeProto) -> None:
    """Check that the bodies of a node have as many inputs and outputs as the node passes and takes."""
    for name, body in body_protos(node):
        inputs, outputs = len(body.input), len(body.output)
        if node.op_type == "If":
            want = (0, len(node.output))
        elif node.op_type == "Loop":  # iteration and condition come first
            want = (len(node.input), len(node.output) + 1)
        else:
            want = (len(node.input), len(node.output))
        if outputs != want[1]:
            text = f"{_counted(outputs, 'output')}, and its node needs {want[1]}"
        elif inputs != want[0]:
            text = f"{_counted(inputs, 'input')}, and its node gives {want[0] or 'none'}"
        else:
            continue
        raise ModelError(f"{describe(node)}: graph '{name}' has {text}")


def check_tensor(tensor: TensorProto, where: str) -> None:
    """Check that a tensor has a valid shape and as many values as it needs.

    Values that are external or in the fields of small types are compared when they are read.
    """
    dims = list(tensor.dims)
    if len(dims) > MAX_RANK:
        raise ModelError(f"tensor '{where}' has {len(dims)} dimensions; sbonnx reads up to {MAX_RANK}")
    if any(size < 0 for size in dims):
        raise ModelError(f"tensor '{where}' has the shape {dims}: sizes cannot be negative")
    elements = prod(dims)
    if elements > MAX_ELEMENTS:
        raise ModelError(f"tensor '{where}' of shape {dims} is larger than any memory")
    if tensor.data_type == TensorProto.STRING:
        if tensor.data_location == TensorProto.EXTERNAL or tensor.HasField("raw_data"):
            raise ModelError(f"tensor '{where}' is of type STRING, and holds bytes instead of strings")
        if len(tensor.string_data) != elements:
            text = f"{len(tensor.string_data)} strings for {elements} elements"
            raise ModelError(f"tensor '{where}' of shape {dims} has {text}")
    elif tensor.data_location == TensorProto.EXTERNAL or not tensor.HasField("raw_data"):
        byte_size(tensor.data_type, elements)  # checks the element type; values are compared when they are read
    else:
        want = byte_size(tensor.data_type, elements)
        if len(tensor.raw_data) != want:
            raise ModelError(
                f"tensor '{where}' of shape {dims} needs {want} bytes, and {len(tensor.raw_data)} are stored"
            )


def _types(proto: TypeProto) -> Iterator[TypeProto.Tensor | TypeProto.SparseTensor]:
    """Yield the tensor types inside a type."""
    stack = [proto]
    while stack:
        current = stack.pop()
        kind = current.WhichOneof("value")
        if kind == "tensor_type":
            yield current.tensor_type
        elif kind == "sparse_tensor_type":
            yield current.sparse_tensor_type
        elif kind == "sequence_type":
            stack.append(current.sequence_type.elem_type)
        elif kind == "optional_type":
            stack.append(current.optional_type.elem_type)
        elif kind == "map_type":
            stack.append(current.map_type.value_type)


def free_sizes(values: Sequence[ValueInfoProto]) -> int:
    """In place. Clear negative sizes, which old exporters write for dynamic ones; return the number of values."""
    changed = 0
    for value in values:
        dims = [dim for tensor in _types(value.type) for dim in tensor.shape.dim if dim.dim_value < 0]
        for dim in dims:
            dim.ClearField("dim_value")
        changed += bool(dims)
    return changed


@lru_cache(maxsize=4096)
def type_parameters(op: str, version: int) -> tuple[tuple[str, ...], bool]:
    """Return the type parameters of an operator's inputs, and whether the last one is repeated (variadic inputs).

    An input of a fixed type has an empty name; the tuple is empty if onnx has no such operator.
    """
    try:
        schema = onnx.defs.get_schema(op, version)
    except onnx.defs.SchemaError:
        return (), False
    named = {constraint.type_param_str for constraint in schema.type_constraints}
    names = tuple(
        parameter.type_str if parameter.type_str in named and parameter.is_homogeneous else ""
        for parameter in schema.inputs
    )
    return names, bool(names) and schema.inputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic


@lru_cache(maxsize=64)
def _is_float(kind: np.dtype[Any]) -> bool:
    return str(kind).startswith(FLOAT_NAMES)


def require_one_float_type(graph: Graph) -> None:
    """Check that no node has inputs of two float types where its operator allows one.

    Types of scales are left to lint, which names and repairs them.

    Raises:
        ModelError: a node does.
    """
    for node in all_nodes(graph):
        if node.domain not in (None, "", "ai.onnx") or node.op in QDQ:
            continue
        names, repeated = type_parameters(node.op, graph.opset)
        seen: dict[str, Tensor] = {}
        for position, tensor in enumerate(node.inputs):
            name = names[position] if position < len(names) else names[-1] if repeated else ""
            kind = dtype(tensor) if name else None
            if kind is None or not _is_float(kind):
                continue
            other = seen.setdefault(name, tensor)
            if dtype(other) != kind:
                raise ModelError(
                    f"node '{node.name}' ({node.op}) takes '{other.name}' of {dtype(other)} and '{tensor.name}' of "
                    f"{kind}, which must have one type: insert a Cast, or export the model in one float type"
                )


def require_no_traps(graph: Graph) -> None:
    """Check that no node crashes the process because of its constants.

    Raises:
        ModelError: a node does.
    """
    for node in all_nodes(graph):
        why = trap(node)
        if why is not None:
            raise ModelError(f"node '{node.name}' ({node.op}) {why}: onnxruntime would end the process there")


def trap(node: Node) -> str | None:
    """Return why the kernel of a node crashes the process, as far as constants and shapes show; else None."""
    if node.domain not in (None, "", "ai.onnx"):
        return None
    if node.op in DIVISIONS and len(node.inputs) == 2:
        return _division(node)
    if node.op == "SplitToSequence" and len(node.inputs) > 1:
        size = constant(node.inputs[1])
        return "splits into parts of 0 elements" if size is not None and size.ndim == 0 and size == 0 else None
    if node.op == "InstanceNormalization" and 0 in (node.inputs[0].shape or ())[2:]:
        return "normalizes over no elements"
    return None


def may_trap(node: Node) -> bool:
    """Whether a node that reads computed tensors can crash the process for some of their values."""
    if node.op not in DIVISIONS or len(node.inputs) != 2:
        return False
    kind = dtype(node.inputs[0])
    if kind is None or kind.kind not in "iu":
        return False
    if all(isinstance(tensor, Constant) for tensor in node.inputs):
        return False  # `trap` decides
    divisor = constant(node.inputs[1])
    return divisor is None or bool((divisor == 0).any()) or (divisor.dtype.kind == "i" and bool((divisor == -1).any()))


def _division(node: Node) -> str | None:
    """Return why an integer division by a constant crashes, or None."""
    dividend, divisor = (constant(tensor) for tensor in node.inputs)
    if divisor is None or divisor.dtype.kind not in "iu" or 0 in (node.inputs[0].shape or ()):
        return None
    if (divisor == 0).any():
        return f"divides integers by a constant that holds 0 ('{node.inputs[1].name}')"
    if (
        dividend is None
        or dividend.dtype.kind != "i"
        or dividend.dtype.itemsize < OVERFLOW_BYTES
        or node.attrs.get("fmod")
    ):
        return None
    lowest = np.iinfo(dividend.dtype).min
    at_lowest, by_minus_one = dividend == lowest, divisor == -1
    if not at_lowest.any() or not by_minus_one.any():
        return None
    try:
        overflows = (at_lowest & by_minus_one).any()
    except ValueError:  # shapes that do not broadcast: never computed
        return None
    return f"divides {lowest} by -1, which overflows" if overflows else None
