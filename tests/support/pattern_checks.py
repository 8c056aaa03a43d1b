"""What must be true after any rewrite, and how two models are compared: by running both in onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from sbonnx.graph import Constant, Graph, to_proto
from sbonnx.graph.query import all_nodes, all_tensors, scopes
from tests.support.models import run

Feeds = dict[str, np.ndarray]


def random_feeds(model: onnx.ModelProto, *, dynamic: int = 2, seed: int = 0) -> Feeds:
    """Random values for every input; dimensions that are not numbers get the size `dynamic`."""
    rng = np.random.default_rng(seed)
    held = {tensor.name for tensor in model.graph.initializer}
    feeds: Feeds = {}
    for value in model.graph.input:
        if value.name in held:
            continue
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        dims = [dim.dim_value if dim.HasField("dim_value") else dynamic for dim in value.type.tensor_type.shape.dim]
        if kind.kind == "f":
            feeds[value.name] = np.asarray(rng.normal(size=dims), kind)
        else:
            feeds[value.name] = rng.integers(0, 2, size=dims).astype(kind)
    return feeds


def assert_same_outputs(
    before: onnx.ModelProto, after: onnx.ModelProto, feeds: Feeds, *, tolerance: float = 0.0, level: str = "off"
) -> None:
    """Equal in onnxruntime: bit for bit, or within `tolerance` of the largest value of each output."""
    wanted, found = run(before, feeds, level=level), run(after, feeds, level=level)
    assert list(wanted) == list(found)
    for name, want in wanted.items():
        assert_same(want, found[name], name, tolerance)


def assert_same(want: Any, got: Any, name: str, tolerance: float) -> None:
    if isinstance(want, list):  # a sequence
        assert len(want) == len(got), name
        for one, other in zip(want, got, strict=True):
            assert_same(one, other, name, tolerance)
        return
    if not isinstance(want, np.ndarray):
        assert want == got, name
        return
    assert want.dtype == got.dtype, name
    assert want.shape == got.shape, name
    if tolerance and want.dtype.kind == "f":
        largest = float(np.max(np.abs(want), initial=1.0))
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * largest, err_msg=name)
    else:
        np.testing.assert_array_equal(got, want, err_msg=name)


def interface(model: onnx.ModelProto) -> tuple[list[bytes], list[bytes]]:
    """Inputs and outputs, with types and dynamic axes, in order."""
    held = {tensor.name for tensor in model.graph.initializer}
    inputs = [value.SerializeToString() for value in model.graph.input if value.name not in held]
    return inputs, [value.SerializeToString() for value in model.graph.output]


def assert_sound(graph: Graph) -> onnx.ModelProto:
    """No dangling tensor, links true in both directions, names unique; the model passes the full check.

    Returns:
        The model.
    """
    nodes = list(all_nodes(graph))
    inside = {id(node) for node in nodes}
    names = [node.name for node in nodes]
    assert len(names) == len(set(names)), "two nodes have one name"
    tensors = list(all_tensors(graph))
    assert len(tensors) == len({tensor.name for tensor in tensors}), "two tensors have one name"
    given = {id(tensor) for _, scope in scopes(graph) for tensor in scope.inputs}
    for tensor in tensors:
        assert len(tensor.inputs) <= 1, f"'{tensor.name}' has two producers"
        if not isinstance(tensor, Constant) and id(tensor) not in given:
            assert tensor.inputs, f"'{tensor.name}' has no producer"
        assert all(id(node) in inside for node in [*tensor.inputs, *tensor.outputs]), f"'{tensor.name}': a dead node"
    for node in nodes:
        for tensor in node.inputs:
            if not tensor.is_empty():
                assert any(reader is node for reader in tensor.outputs), (
                    f"'{node.name}' is no reader of '{tensor.name}'"
                )
                uses = sum(reader is node for reader in tensor.outputs)
                assert uses == sum(read is tensor for read in node.inputs), f"uses of '{tensor.name}' miscounted"
        for tensor in node.outputs:
            assert tensor.is_empty() or tensor.inputs[0] is node, f"'{tensor.name}' has another producer"
    model = to_proto(graph)
    onnx.checker.check_model(model, full_check=True)
    return model
