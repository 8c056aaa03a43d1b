"""Fusions meet models that are not valid: they decline with the reason, and what runs the model refuses it later."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sbonnx.graph import load
from sbonnx.patterns import FUSE, apply


def invalid(nodes: list[onnx.NodeProto], shape: list[int], *, opset: int = 17, **weights: object) -> onnx.ModelProto:
    """A model that no checker has seen."""
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        held,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


W = np.ones((5, 4), np.float32)
KERNEL = np.ones((2, 3, 3, 3), np.float32)
MODELS = {
    "gemm bias that fits no column": invalid(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"], alpha=0.5)], [3, 5], w=W, b=np.ones(7, np.float32)
    ),
    "gemm weight of rank 1": invalid(
        [helper.make_node("Gemm", ["x", "w"], ["y"], alpha=0.5)], [3, 5], w=np.ones(5, np.float32)
    ),
    "pads of the wrong length": invalid(
        [helper.make_node("Pad", ["x", "p"], ["t"]), helper.make_node("Conv", ["t", "w"], ["y"])],
        [1, 3, 8, 8],
        p=np.array([0, 0, 1]),
        w=KERNEL,
    ),
    "window with pads of the wrong length": invalid(
        [helper.make_node("Pad", ["x", "p"], ["t"]), helper.make_node("Conv", ["t", "w"], ["y"], pads=[1, 1, 1])],
        [1, 3, 8, 8],
        p=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        w=KERNEL,
    ),
    "kernel of the wrong length": invalid(
        [helper.make_node("Pad", ["x", "p"], ["t"]), helper.make_node("AveragePool", ["t"], ["y"], kernel_shape=[2])],
        [1, 3, 8, 8],
        p=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    ),
    "value of a Pad that is not one number": invalid(
        [helper.make_node("Pad", ["x", "p", "v"], ["t"]), helper.make_node("Conv", ["t", "w"], ["y"])],
        [1, 3, 8, 8],
        p=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        v=np.zeros(2, np.float32),
        w=KERNEL,
    ),
    "axes of a Pad outside its rank": invalid(
        [helper.make_node("Pad", ["x", "p", "", "a"], ["t"]), helper.make_node("Conv", ["t", "w"], ["y"])],
        [1, 3, 8, 8],
        opset=18,
        p=np.array([1, 1, 1, 1]),
        a=np.array([2, 9]),
        w=KERNEL,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_fusions_decline(name: str) -> None:
    done = apply(load(MODELS[name]), FUSE)
    assert not done.fired
    assert done.refusals, "the reason is recorded"
