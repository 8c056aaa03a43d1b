"""Node data of Model Explorer against what its own package writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from sbonnx.viewing import view

GOLDEN = Path(__file__).with_name("model_explorer.json")
"""A file of `GraphNodeData`, and the node ids that the ONNX adapter gives to `model(quantized=True)`.

The value is 10 lg(|x|² / |x - x̂|²) for x = (0.97, -0.52) at scale 0.1, because the weight is the identity.
"""

X = np.array([[0.97, -0.52]], np.float32)


def model(*, quantized: bool) -> onnx.ModelProto:
    """MatMul with the identity, exact in int8, then Tanh."""
    codes = np.array([[2, 0], [0, 2]], np.int8)
    constants: dict[str, np.ndarray] = {"w": codes.astype(np.float32) / 2}
    nodes = []
    if quantized:
        constants = {
            "w_q": codes,
            "w_s": np.float32(0.5),
            "w_z": np.int8(0),
            "x_s": np.float32(0.1),
            "x_z": np.uint8(128),
        }
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "x_s", "x_z"], ["x_q"], name="x_quantize"),
            helper.make_node("DequantizeLinear", ["x_q", "x_s", "x_z"], ["x_d"], name="x_dequantize"),
            helper.make_node("DequantizeLinear", ["w_q", "w_s", "w_z"], ["w"], name="w_dequantize"),
        ]
    nodes += [
        helper.make_node("MatMul", ["x_d" if quantized else "x", "w"], ["p"], name="block/proj"),
        helper.make_node("Tanh", ["p"], ["y"], name="block/act"),
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 2]) for name in "xy"]
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def exported(tmp_path: Path) -> Any:
    """Function that exports the quantized model, with losses or without."""
    files = {name: tmp_path / f"{name}.onnx" for name in ("float", "quantized")}
    for name, path in files.items():
        onnx.save(model(quantized=name == "quantized"), path)

    def export(*, losses: bool) -> dict[str, Any]:
        output = tmp_path / f"{losses}.json"
        pair, data = ((files["float"], files["quantized"]), {"x": X}) if losses else ((files["quantized"],), None)
        view(*pair, data=data, export="model-explorer", output=output, open=False)
        return dict(json.loads(output.read_text()))

    return export


def test_losses_are_node_data(exported: Any) -> None:
    assert exported(losses=True) == json.loads(GOLDEN.read_text())["measured"]


def test_types_and_reasons_are_node_data(exported: Any) -> None:
    """Keys are node ids of the adapter; values of `NodeDataResult` are numbers, or texts that are counted."""
    golden, written = json.loads(GOLDEN.read_text()), exported(losses=False)
    assert written.keys() == {"results"} and set(written["results"]) <= set(golden["node_ids"])
    assert all(sorted(value) == golden["value_keys"] for value in written["results"].values())
    assert {name: row["value"] for name, row in written["results"].items()} == {
        "block/proj": "uint8 sym × int8",
        "block/act": "float: no-rule-for-operator",
    }
