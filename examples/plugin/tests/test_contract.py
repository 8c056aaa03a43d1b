"""The plug-ins keep the contracts of sbonnx."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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


def test_metric() -> None:
    rng = np.random.default_rng(0)
    right = [({"scores": np.eye(3)[labels]}, {"label": labels}) for labels in rng.integers(0, 3, (4, 8))]
    right[0][0]["scores"][:2] = 0.0
    wrong = [({"scores": np.zeros((8, 3))}, labels) for _, labels in right]
    testing.check_metric("balanced", right, wrong)


def test_reader(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("a,b,c,d,label\n1,2,3,4,0\n-1,0.5,2,1e3,1\n")
    testing.check_reader(table, named("n"))
