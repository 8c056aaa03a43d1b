"""Simplify a model and prove at once that nothing else changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from sbonnx.graph import Graph, Node, load
from sbonnx.graph.query import constant
from sbonnx.patterns import SIMPLIFY, Applied, apply
from tests.support.models import model
from tests.support.pattern_checks import assert_same_outputs, assert_sound, interface, random_feeds

INT64 = np.int64


def ints(*values: int) -> np.ndarray:
    return np.array(values, INT64)


def simplified(before: onnx.ModelProto | str, *, opset: int = 17, **constants: Any) -> tuple[Graph, Applied]:
    """Simplify; outputs must stay equal in onnxruntime for three batch sizes, the interface and the rules kept."""
    if isinstance(before, str):
        before = model(before, opset=opset, **constants)
    graph = load(before)
    applied = apply(graph, SIMPLIFY)
    after = assert_sound(graph)
    assert interface(after) == interface(before)
    for size in (2, 1, 3):
        assert_same_outputs(before, after, random_feeds(before, dynamic=size))
    return graph, applied


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def target(reshape: Node) -> list[int]:
    """The constant target of a Reshape."""
    value = constant(reshape.inputs[1])
    assert value is not None
    return [int(size) for size in value]
