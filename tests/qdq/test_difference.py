"""Differences of quantized models, against changes that the test makes in the file with onnx alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import sbonnx
from sbonnx.assets import digits
from sbonnx.cli import main


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diff") / "a.onnx"
    sbonnx.quantize(digits().model, digits().calib, output=path, verify=False, samples=1, split=32)
    return path


def changed(model: onnx.ModelProto, name: str, values: np.ndarray) -> None:
    """Replace an initializer."""
    (place,) = [index for index, each in enumerate(model.graph.initializer) if each.name == name]
    model.graph.initializer[place].CopyFrom(numpy_helper.from_array(values, name))


def test_equal(quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(quantized), str(quantized)]) == 0
    assert capsys.readouterr().out == "equal\n"


def test_changes_are_found(quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One doubled scale, one moved zero point, three changed weights, and one pair less."""
    model = onnx.load(quantized)
    values = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    nodes = {node.name: node for node in model.graph.node}
    pairs = {node.input[0]: node for node in model.graph.node if node.op_type == "QuantizeLinear"}
    scaled, moved, removed = pairs["relu_1"], pairs["getitem_12"], pairs["cat"]
    changed(model, scaled.input[1], values[scaled.input[1]] * np.float32(2))
    changed(model, moved.input[2], values[moved.input[2]] + np.array(1, values[moved.input[2]].dtype))
    weight = next(name for name in values if name.startswith("residual.1.weight") and values[name].ndim == 4)
    codes = values[weight].copy()
    codes.reshape(-1)[:3] -= np.sign(codes.reshape(-1)[:3] + np.int8(1)).astype(np.int8) * np.int8(1)
    codes.reshape(-1)[:3] ^= np.int8(1)
    changed(model, weight, codes)
    count = int((codes != values[weight]).sum())
    (dequantize,) = [node for node in model.graph.node if removed.output[0] in node.input]
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == dequantize.output[0]:
                node.input[index] = "cat"
    for node in (removed, dequantize):
        model.graph.node.remove(nodes[node.name])
    other = tmp_path / "b.onnx"
    onnx.save(model, other)
    assert main(["diff", str(quantized), str(other), "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    rows = {row["tensor"]: row for row in value["pairs"]}
    shared = {name for name, node in pairs.items() if node.input[1] == scaled.input[1]}
    moved_too = {name for name, node in pairs.items() if node.input[2] == moved.input[2]}
    assert rows.keys() - {"cat"} >= {"relu_1", "getitem_12"}
    assert all(rows[name]["scale_ratio"] == [2.0, 2.0] for name in shared & rows.keys())
    assert all(rows[name]["zero_points"] == 1 for name in moved_too & rows.keys())
    assert value["first_pairs"] == {"cat": "uint8"}
    (row,) = [row for row in value["constants"] if row["tensor"] == weight]
    assert (row["changed"], row["count"]) == (count, codes.size)
    wanted = np.abs(codes.astype(int) - values[weight].astype(int)).max()
    assert row["largest"] == wanted
    assert value["operators"] == {
        op: [sum(node.op_type == op for node in each.graph.node) for each in (onnx.load(quantized), model)]
        for op in ("DequantizeLinear", "QuantizeLinear")
    }
    assert main(["diff", str(quantized), str(other)]) == 1
    assert f"quantized in {quantized} only: 1" in capsys.readouterr().out


def test_bad_input(quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(quantized), "absent.onnx"]) == 2
    assert capsys.readouterr().err == "ModelError: 'absent.onnx' does not exist: check the path\n"
