"""ACCURACY_LEVEL: auto: the rounding of level 4 as onnxruntime's kernel computes it, and the layers that avoid it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import sbonnx
from sbonnx.errors import RecipeError
from sbonnx.precision import kernel_levels
from sbonnx.precision.kernel_levels import rounded_rows
from sbonnx.spec import Array
from tests.support.models import run

WIDTH = 64
LARGE = 5
"""Channel that is inflated in front of the second product."""


def two_products(factor: float) -> onnx.ModelProto:
    """x @ a, its channel LARGE times `factor`, @ b with that row divided by it: the same function for each factor."""
    random = np.random.default_rng(3)
    a, b = (random.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32) for _ in range(2))
    gain = np.ones(WIDTH, np.float32)
    gain[LARGE] = factor
    stored = {"a": a, "b": b / gain[:, None], "gain": gain}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Mul", ["t", "gain"], ["g"]),
        helper.make_node("MatMul", ["g", "b"], ["y"], name="second"),
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", WIDTH]) for name in "xy"]
    tensors = [numpy_helper.from_array(values, name) for name, values in stored.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def rows(seed: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).normal(0, 1, (32, WIDTH)).astype(np.float32)}


def quantized(factor: float, level: object, data: object = None) -> tuple[Any, dict[str, int]]:
    """The report, and the level of each product in the file."""
    given = [rows(seed) for seed in range(8)] if data is None else data
    keys: dict[str, Any] = {"w_bit": 4, "block_size": 32, "accuracy_level": level, "min_weight_size": 0}
    report = sbonnx.quantize(two_products(factor), given or None, mode="weight_only", verify=False, **keys)
    assert report.quantized is not None
    products = [node for node in report.quantized.graph.node if node.op_type == "MatMulNBits"]
    found = {node.input[1].split("_")[0]: {a.name: a.i for a in node.attribute}["accuracy_level"] for node in products}
    return report, found


@pytest.mark.parametrize("factor", [1.0, 300.0])
def test_rounding_of_the_kernel(factor: float) -> None:
    """Level 4 gives what level 1 gives on inputs rounded here."""
    made = {level: quantized(factor, level)[0].quantized for level in (1, 4)}
    x = rows(99)["x"]
    x[:, LARGE] *= factor
    products = {}
    for level, model in made.items():
        node = next(node for node in model.graph.node if node.op_type == "MatMulNBits" and node.output[0] == "h")
        del model.graph.node[:]
        model.graph.node.append(node)
        model.graph.output[0].name = "h"
        products[level] = model
    exact, int8 = run(products[1], {"x": rounded_rows(x, 32)})["h"], run(products[4], {"x": x})["h"]
    np.testing.assert_allclose(int8, exact, rtol=0, atol=2e-5 * np.abs(exact).max())
    assert np.abs(int8 - run(products[1], {"x": x})["h"]).max() > 1e-3 * np.abs(exact).max()


def test_layers_with_a_large_channel_avoid_int8() -> None:
    plain, levels = quantized(1.0, "auto")
    assert levels == {"a": 4, "b": 4}
    assert not any("accuracy level" in note for note in plain.notes)
    report, levels = quantized(300.0, "auto")
    assert levels == {"a": 4, "b": 1}
    assert any("1 of 2 products" in note and "'second'" in note for note in report.notes)
    x = rows(99)
    wanted = run(two_products(300.0), x)["y"]
    errors = {
        level: np.square(run(quantized(300.0, level)[0].quantized, x)["y"] - wanted).mean() for level in ("auto", 4)
    }
    assert errors["auto"] < 0.5 * errors[4]


def test_threads_share_the_weight_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 14,336 x 4,096 in float32 takes 0.2 GB, and as much again for its error and while it is made."""
    weights_of: list[str] = []
    written = kernel_levels._written_weight

    def slow(piece: Any, *more: Any) -> Any:
        weights_of.append(piece.step.layer)
        time.sleep(0.05)
        return written(piece, *more)

    monkeypatch.setattr(kernel_levels, "_written_weight", slow)
    quantized(1.0, "auto", data=[rows(seed) for seed in range(4)])
    assert sorted(weights_of) == ["first", "second"]


def test_without_data_the_level_is_4() -> None:
    _, levels = quantized(300.0, "auto", data=())
    assert levels == {"a": 4, "b": 4}


def test_other_texts_are_refused() -> None:
    with pytest.raises(RecipeError, match="auto, or a level of MatMulNBits, 0 to 4"):
        quantized(1.0, "fast")
