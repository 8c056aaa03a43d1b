"""Models and edits for the tests of digests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from sbonnx.graph import Graph, load
from sbonnx.graph.digests import tensor_digests
from sbonnx.graph.query import tensors_by_name

IF = """
agraph (float[N,4] x, bool c) => (float[N,4] y) {
    p = Relu (x)
    y = If (c) <
        then_branch = a () => (float[N,4] t) { m = Mul (p, k1)  t = Sigmoid (m) },
        else_branch = b () => (float[N,4] e) { q = Mul (p, k2)  e = Tanh (q) }
    >
}"""

LOOP = """
agraph (float[4] x, int64 trips, bool go) => (float[4] y) {
    y = Loop (trips, go, x) <
        body = step (int64 i, bool c, float[4] s) => (bool c2, float[4] s2) {
            c2 = Identity (c)
            d = Mul (s, k)
            s2 = Add (d, x)
        }
    >
}"""


def of(proto: onnx.ModelProto) -> dict[str, str]:
    return tensor_digests(load(proto))


def changed(proto: onnx.ModelProto, edit: Callable[[Graph], object]) -> set[str]:
    """Names of the tensors whose digest an edit of the graph changes."""
    graph = load(proto)
    before = tensor_digests(graph)
    edit(graph)
    after = tensor_digests(graph)
    return {name for name in before.keys() & after.keys() if before[name] != after[name]}


def set_weight(name: str, value: Any) -> Callable[[Graph], object]:
    def edit(graph: Graph) -> None:
        tensors_by_name(graph)[name].values = np.asarray(value)

    return edit
