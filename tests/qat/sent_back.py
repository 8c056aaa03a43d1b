"""Files that went through torch, held against those that did not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from sbonnx.spec import Array


def scopes(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the bodies inside it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from scopes(attribute.g)


def constants(path: Path) -> dict[str, Array]:
    """Initializers of all scopes by name; where calibration gave one another value, without the suffix of that."""
    return {
        one.name.replace("_corrected", ""): onnx.numpy_helper.to_array(one)
        for graph in scopes(onnx.load(str(path)).graph)
        for one in graph.initializer
    }


def nodes(path: Path) -> list[tuple[str, str, list[str]]]:
    """Op, name and outputs of all nodes."""
    return [
        (node.op_type, node.name, list(node.output))
        for graph in scopes(onnx.load(str(path)).graph)
        for node in graph.node
    ]


def assert_same_file(expected: Path, found: Path) -> None:
    """The same constants bit for bit, codes among them, in a graph of the same nodes."""
    wanted, made = constants(expected), constants(found)
    assert made.keys() == wanted.keys()
    for name, value in wanted.items():
        assert made[name].dtype == value.dtype, name
        np.testing.assert_array_equal(made[name], value, err_msg=name)
    assert nodes(found) == nodes(expected)
