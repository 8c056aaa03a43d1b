"""Removes nodes that no output needs, and merges equal constants and equal computations (common subexpressions).

Supported: constants with equal type, shape and bytes; nodes of one scope with equal op, attributes and inputs.
Refused: outputs, and constants that the file lists as inputs; random ops, custom domains, nodes with bodies, and Q/DQ
nodes, because a pair belongs to its reader. All of them stay without a message.
Equations: equal operators on equal inputs have equal outputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
import onnx

from sbonnx.graph import Constant, Graph, Node
from sbonnx.graph.edit import sweep
from sbonnx.graph.query import all_nodes, bodies, scopes
from sbonnx.graph.storage.weights import MappedWeights, chunks
from sbonnx.ops import QDQ, RANDOM
from sbonnx.report import Fired, Refusal

from ..example_model import sample
from ..fixed_point import Sweep
from ..index import move_readers
from ..match import STANDARD


def _constants(graph: Graph) -> Iterable[Constant]:
    """Yield the constants that nodes read, without duplicates, in order."""
    seen: set[int] = set()
    for node in all_nodes(graph):
        for tensor in node.inputs:
            if isinstance(tensor, Constant) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _digest(tensor: Constant) -> bytes:
    """Hash the stored bytes piece by piece, so that a memory-mapped weight is never fully resident."""
    total = hashlib.blake2b(digest_size=16)
    for piece in chunks(tensor._values):
        total.update(piece)
    return total.digest()


def merge_initializers(graph: Graph) -> list[Fired | Refusal]:
    """Replace every constant by the first one with the same type, shape and bytes, in place.

    Outputs and constants that the file lists as inputs (overridable) are not merged.
    """
    apart = set(graph.info.overridable)
    apart.update(tensor.name for _, scope in scopes(graph) for tensor in scope.outputs)
    alike: dict[tuple[str, tuple[int, ...]], list[Constant]] = {}
    for tensor in _constants(graph):
        if tensor.name not in apart and tensor.dtype != object:
            kind = tensor._values.onnx_type if isinstance(tensor._values, MappedWeights) else tensor.dtype
            alike.setdefault((str(kind), tuple(tensor.shape)), []).append(tensor)
    fired: list[Fired | Refusal] = []
    for group in alike.values():
        first: dict[bytes, Constant] = {}
        for tensor in group if len(group) > 1 else ():
            kept = first.setdefault(_digest(tensor), tensor)
            if kept is not tensor:
                fired.append(Fired("merge_initializers", tensor.name))
                move_readers(tensor, kept)
    return fired


INITIALIZERS = Sweep(
    "merge_initializers",
    run=merge_initializers,
    source="equal type, shape and bytes",
    example=lambda: sample(
        "g (float[2,3] x) => (float[2,3] y) { a = Add(x, v) b = Relu(a) y = Mul(b, w) }",
        v=np.ones(3, np.float32),
        w=np.ones(3, np.float32),
    ),
    counter_example=lambda: sample(
        "g (float[2,3] x) => (float[2,3] y) { a = Add(x, v) b = Relu(a) y = Mul(b, w) }",
        v=np.array([0.0], np.float32),
        w=np.array([-0.0], np.float32),
    ),
)


def _frozen(value: Any) -> Any:
    """Convert an attribute to a hashable key; None if it cannot be compared."""
    if isinstance(value, Constant):
        if prod(value.shape) > 1024 or value.dtype == object:
            return None
        return str(value.dtype), tuple(value.shape), b"".join(bytes(piece) for piece in chunks(value._values))
    if isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(value, onnx.AttributeProto):
        return value.SerializeToString(deterministic=True)
    return type(value).__name__, value


def _key(node: Node) -> Any:
    """Return a key of a node's computation; None if the node must not be merged."""
    if node.domain not in STANDARD or node.op in RANDOM or node.op in QDQ or bodies(node) or not node.inputs:
        return None
    attributes = [(name, _frozen(value)) for name, value in sorted(node.attrs.items())]
    if any(value is None for _, value in attributes):
        return None
    present = tuple(bool(tensor.name) for tensor in node.outputs)
    return node.op, tuple(id(tensor) if tensor.name else 0 for tensor in node.inputs), tuple(attributes), present


def merge_nodes(graph: Graph) -> list[Fired | Refusal]:
    """Replace a node by the first node of the same scope with the same computation, in place.

    QuantizeLinear and DequantizeLinear are not merged, because a pair belongs to its reader. Nodes of outputs are kept.
    """
    fired: list[Fired | Refusal] = []
    for _, scope in list(scopes(graph)):
        outputs = {id(tensor) for tensor in scope.outputs}
        first: dict[Any, Node] = {}
        for node in scope.nodes:
            key = _key(node)
            if key is None:
                continue
            kept = first.setdefault(key, node)
            if kept is node or any(id(tensor) in outputs for tensor in node.outputs):
                continue
            fired.append(Fired("merge_nodes", node.name))
            for old, new in zip(node.outputs, kept.outputs, strict=True):
                move_readers(old, new)
    if fired:
        sweep(graph)
    return fired


NODES = Sweep(
    "merge_nodes",
    run=merge_nodes,
    source="the same op with the same attributes on the same tensors",
    example=lambda: sample("g (float[2,3] x) => (float[2,3] y) { a = Exp(x) b = Exp(x) c = Neg(b) y = Add(a, c) }"),
    counter_example=lambda: sample(
        "g (float[2,3] x) => (float[2,3] y)"
        "{ a = LeakyRelu<alpha=0.1>(x) b = LeakyRelu<alpha=0.2>(x) c = Neg(b) y = Add(a, c) }"
    ),
)


def remove_dead(graph: Graph) -> list[Fired | Refusal]:
    """Remove nodes that lead to no output, in every scope and in place. Unused inputs are kept."""
    before = list(all_nodes(graph))
    if not sweep(graph):
        return []
    alive = {id(node) for node in all_nodes(graph)}
    return [Fired("dead_code", node.name) for node in before if id(node) not in alive]


DEAD = Sweep(
    "dead_code",
    run=remove_dead,
    source="ONNX operators have no effect but their outputs",
    example=lambda: sample("g (float[2,3] x) => (float[2,3] y) { a = Exp(x) b = Neg(a) y = Relu(x) }"),
    counter_example=lambda: sample("g (float[2,3] x, float[2] unused) => (float[2,3] y) { a = Exp(x) y = Relu(a) }"),
)
