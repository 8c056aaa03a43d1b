"""Models with If, nested and reading from outside, for the tests of calibration."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import numpy_helper

from sbonnx.spec import Array
from tests.support.models import model

NESTED = """
agraph (float[N,4] x, bool a, bool b) => (float[N,4] y) {
    r = Relu (x)
    m = MatMul (r, w0)
    y = If (a) <
        then_branch = outer () => (float[N,4] t) {
            p = MatMul (m, w1)
            p1 = Tanh (p)
            q = If (b) <
                then_branch = inner () => (float[N,4] u) {
                    v = Add (p1, r)
                    u = MatMul (v, w2)
                },
                else_branch = other () => (float[N,4] u2) { u2 = MatMul (p1, w3) }
            >
            t = Neg (q)
        },
        else_branch = skip () => (float[N,4] e) {
            k = Sigmoid (m)
            e = MatMul (k, w4)
        }
    >
}"""


def nested() -> onnx.ModelProto:
    """Five MatMuls: one outside, one in the outer branch, two in the branches inside it, one in the other branch."""
    shape = (4, 4)
    proto = model(NESTED, w0=shape, w1=shape, w2=shape, w3=shape, w4=shape)
    for number, node in enumerate(all_nodes(proto.graph)):
        node.name = f"n{number}_{node.op_type}"
    return proto


def all_nodes(graph: Any) -> list[Any]:
    """Nodes of a graph proto and its bodies."""
    found = []
    for node in graph.node:
        found.append(node)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found.extend(all_nodes(attribute.g))
    return found


def weights(proto: onnx.ModelProto) -> dict[str, Array]:
    """Initializers of the main graph by name."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
