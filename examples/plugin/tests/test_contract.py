"""The plug-ins keep the contracts of sbonnx."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from sbonnx import testing


def test_observer() -> None:
    testing.check_observer("trimmed")


def test_rounding() -> None:
    testing.check_rounding("half_up")


def test_backend() -> None:
    testing.check_backend("convolver")


def named(name: str) -> onnx.ModelProto:
    """Return a model of one node with this name."""
    values = [helper.make_tensor_value_info(value, TensorProto.FLOAT, [1, 4]) for value in ("x", "y")]
    node = helper.make_node("Relu", ["x"], ["y"], name=name)
    return helper.make_model(helper.make_graph([node], "g", values[:1], values[1:]))


def test_lint_rule() -> None:
    testing.check_lint_rule("X1", "onnxruntime", bad=named("n" * 101), clean=named("n"))
