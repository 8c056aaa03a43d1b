"""Inlining of local functions, within limits that are computed before.

Each call becomes a copy of its function, so a file of a kilobyte in which every function calls the next one twice
becomes millions of nodes. onnx's inliner has no limit, and crashes the process if a function calls itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from onnx import FunctionProto, ModelProto, NodeProto
from onnx.inliner import inline_local_functions

from sbonnx.errors import ModelError
from sbonnx.graph.protos import (
    MAX_BODIES,
    ONNX_ERRORS,
    body_protos,
    domain_of,
    node_protos,
    single_line,
    topological_order,
)

Key = tuple[str, str, str]
"""Domain ("" for the default), name and overload of a function."""

MAX_NODES: Final = 50_000
"""Maximum nodes of a model after inlining, or `MAX_COPIES` times those of the file if that is more."""

MAX_COPIES: Final = 10

MAX_BYTES: Final = 512 << 20
"""Maximum bytes of a model after inlining, without large tensors, which are not copied."""

MAX_CALLS: Final = 100
"""Maximum nesting of function calls."""


@dataclass
class InlinedSize:
    """Number and size of the nodes that inlining creates.

    Attributes:
        nodes, bytes: number of nodes, and their bytes.
        bodies: maximum nesting of subgraphs.
        calls: maximum nesting of function calls.
        copies: number of copies of each attribute of a function in its inlined nodes, by name.
    """

    nodes: int = 0
    bytes: int = 0
    bodies: int = 0
    calls: int = 0
    copies: Counter[str] = field(default_factory=Counter)


def key_of(node: NodeProto | FunctionProto) -> Key:
    """Return the key of a function, or of the function that a node may call."""
    name = node.op_type if isinstance(node, NodeProto) else node.name
    return domain_of(node), name, node.overload


def attribute_types(model: ModelProto) -> dict[Key, dict[str, int]]:
    """Return the types of the attributes that the nodes of each function take from the call, by their names there."""
    return {
        key_of(function): {
            attribute.ref_attr_name: attribute.type
            for node in node_protos(function)
            for attribute in node.attribute
            if attribute.ref_attr_name
        }
        for function in model.functions
    }


def inline(model: ModelProto, label: str) -> ModelProto:
    """Replace the calls of local functions by their nodes.

    A parameter without argument leaves an empty name. At the end of a node's inputs it is removed: onnxruntime 1.31
    crashes the process when it fuses an Add and a LayerNormalization whose bias is an empty name.

    Raises:
        ModelError: as in `require_bounded`, or onnx's inliner fails.
    """
    require_bounded(model)
    try:
        inlined = inline_local_functions(model, convert_version=True)
    except ONNX_ERRORS as error:
        raise ModelError(f"{label}: its functions cannot be inlined: {single_line(error)}") from None
    for node in node_protos(inlined.graph):
        while node.input and not node.input[-1]:
            node.input.pop()
    return inlined


def require_bounded(model: ModelProto) -> None:
    """Check that inlining terminates and the result has a manageable size.

    Raises:
        ModelError: a function calls itself, or the model would become too large or too deep.
    """
    functions = _callees_first(model)
    given = _cost(model.graph.node, {}).nodes + sum(_cost(function.node, {}).nodes for function in functions)
    largest = max(MAX_NODES, MAX_COPIES * given)
    costs: dict[Key, InlinedSize] = {}
    for function in functions:
        key = key_of(function)
        costs[key] = _cost(function.node, costs)
        costs[key].calls += 1
        _require_small(costs[key], largest, f"function '{_text(key)}'")
    _require_small(_cost(model.graph.node, costs), largest, "the model")


def _require_small(cost: InlinedSize, nodes: int, what: str) -> None:
    """Check the limits. Called after each function, so that the numbers themselves stay small."""
    for count, most, unit in (
        (cost.nodes, nodes, "nodes"),
        (cost.bytes, MAX_BYTES, "bytes"),
        (cost.calls, MAX_CALLS, "nested function calls"),
        (cost.bodies, MAX_BODIES, "nested graphs"),
    ):
        if count > most:
            raise ModelError(f"its functions cannot be inlined: {what} would have {count} {unit}; the limit is {most}")


def _cost(nodes: Iterable[NodeProto], costs: dict[Key, InlinedSize]) -> InlinedSize:
    total = InlinedSize()
    for node in nodes:
        called = costs.get(key_of(node))
        total.nodes += 1 if called is None else called.nodes
        total.bytes += sum(map(len, (*node.input, *node.output, node.name, node.op_type)))
        total.bytes += 0 if called is None else called.bytes
        if called is not None:
            total.calls = max(total.calls, called.calls)
            total.bodies = max(total.bodies, called.bodies)
        for attribute in node.attribute:
            copies = 1 if called is None else called.copies[attribute.name]
            total.bytes += copies * attribute.ByteSize()
            if attribute.ref_attr_name:
                total.copies[attribute.ref_attr_name] += copies
        for name, body in body_protos(node):
            inside = _cost(body.node, costs)
            copies = 1 if called is None else called.copies[name]
            total.nodes += copies * inside.nodes
            total.bytes += copies * inside.bytes
            total.calls = max(total.calls, inside.calls)
            total.bodies = max(total.bodies, inside.bodies + 1 + (0 if called is None else called.bodies))
            total.copies.update({attribute_name: copies * count for attribute_name, count in inside.copies.items()})
    return total


def _callees_first(model: ModelProto) -> list[FunctionProto]:
    """Return the functions, each after those that it calls.

    Raises:
        ModelError: a function calls itself, directly or through others.
    """
    functions = {key_of(function): function for function in model.functions}
    calls = {
        key: {key_of(node) for node in node_protos(function)} & functions.keys() for key, function in functions.items()
    }
    order = topological_order(
        functions,
        lambda key: sorted(calls[key]),
        lambda key: f"its functions are recursive: '{_text(key)}' calls itself",
    )
    return [functions[key] for key in order]


def _text(key: Key) -> str:
    return ".".join(part for part in key if part)
