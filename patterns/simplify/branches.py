"""Inlines the taken branch of an If whose condition is a constant.

Supported: an If of any scope with both branches and a constant condition, also inside branches of another one.
Refused: nothing; an If with a computed condition stays without a message.
Equations: If(true, then, else) = then, If(false, then, else) = else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from sbonnx.graph import Body, Graph, Node, Variable
from sbonnx.graph.edit import Names
from sbonnx.graph.query import bodies, constant, scopes
from sbonnx.report import Fired, Refusal

from ..example_model import sample
from ..fixed_point import Sweep
from ..index import forget, move_readers
from ..match import STANDARD

NAME = "inline_if"


def inline_constant_ifs(graph: Graph) -> list[Fired | Refusal]:
    """Inline every If with a constant condition, in all scopes and in place."""
    constant_ifs = [
        (scope, node)
        for _, scope in scopes(graph)
        for node in scope.nodes
        if node.op == "If"
        and node.domain in STANDARD
        and node.inputs
        and constant(node.inputs[0]) is not None
        and {"then_branch", "else_branch"} <= set(node.attrs)
    ]
    if not constant_ifs:
        return []
    names = Names(graph)
    replaced: dict[int, list[Node]] = {}
    for _, node in constant_ifs:  # outer ones first: nodes of a branch not taken have no inputs afterwards
        if node.inputs:
            replaced[id(node)] = _inline(node, names)
    for _, scope in list(scopes(graph)):
        _splice(scope, replaced)
    return [Fired(NAME, node.name) for _, node in constant_ifs if id(node) in replaced]


def _inline(node: Node, names: Names) -> list[Node]:
    """Unlink an If and connect its outputs to the nodes of the taken branch; return these, in order."""
    condition: Any = constant(node.inputs[0])
    taken: Body = node.attrs["then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"]
    nodes = list(taken.nodes)
    given: set[int] = set()
    for inner, outer in zip(taken.outputs, list(node.outputs), strict=True):
        list.clear(outer.inputs)
        if outer.is_empty():
            continue
        maker = inner.inputs[0] if isinstance(inner, Variable) and inner.inputs else None
        if maker is None or id(inner) in given:
            nodes.append(Node("Identity", names.fresh(f"{node.name}/Identity"), {}, [inner], [outer]))
            continue
        given.add(id(inner))
        move_readers(inner, outer)
        for place, tensor in enumerate(maker.outputs):
            if tensor is inner:
                list.__setitem__(maker.outputs, place, outer)
                list.append(outer.inputs, maker)
        list.clear(inner.inputs)
        for later, tensor in enumerate(taken.outputs):  # an output listed twice: the second one copies the first
            if tensor is inner:
                taken.outputs[later] = outer
                given.add(id(outer))
    list.clear(node.outputs)
    _unlink(node, spared=taken)
    return nodes


def _unlink(node: Node, *, spared: Body | None = None) -> None:
    """Remove a node, and the nodes in its bodies, from the readers of its inputs."""
    for tensor in node.inputs:
        forget(tensor.outputs, node)
    list.clear(node.inputs)
    for _, body in bodies(node):
        if body is not spared:
            for inner in body.nodes:
                _unlink(inner)


def _splice(scope: Body, replaced: dict[int, list[Node]]) -> None:
    """Insert the nodes of the branches at the positions of the Ifs; a branch may contain another such If."""
    if not any(id(node) in replaced for node in scope.nodes):
        return
    result: list[Node] = []
    stack = list(reversed(scope.nodes))
    while stack:
        node = stack.pop()
        if id(node) in replaced:
            stack.extend(reversed(replaced[id(node)]))
        else:
            result.append(node)
    scope.nodes = result


TEXT = """g (float[2,3] x, bool c) => (float[2,3] y) {
    a = Relu(x)
    b = If (%s) <
        then_branch = t () => (float[2,3] bt) { n = Neg(a) bt = Sigmoid(n) },
        else_branch = e () => (float[2,3] be) { be = Abs(a) }
    >
    y = Exp(b)
}"""


INLINE_IF = Sweep(
    NAME,
    run=inline_constant_ifs,
    source="the other branch never runs",
    example=lambda: _sample("always"),
    counter_example=lambda: _sample("c"),
)


def _sample(condition: str) -> onnx.ModelProto:
    return sample(TEXT % condition, always=np.array(True))
