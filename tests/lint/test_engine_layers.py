"""Layers of an engine, from files written by hand after TensorRT's documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx.cli import main
from sbonnx.errors import DataError
from sbonnx.linting.engine_layers import engine_report
from tests.support.models import model

TEXT = """
agraph (float[1,32,8,8] x) => (float[1,32,8,8] z) {
    a = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)
    r = Relu(a)
    z = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (r, v)
}"""

LINEAR = "Row major linear FP32"
INT8 = "Thirty-two wide channel vectorized row major Int8 format"


def tensors(*types: str) -> list[dict[str, Any]]:
    return [{"Name": f"t{at}", "Dimensions": [1], "Format/Datatype": one} for at, one in enumerate(types)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized file with two convolutions, and the files of an engine that runs one of them in float."""
    folder = tmp_path_factory.mktemp("engine")
    onnx.save(model(TEXT, w=(32, 32, 3, 3), v=(32, 32, 3, 3)), str(folder / "m.onnx"))
    data = [{"x": np.random.default_rng(at).standard_normal((1, 32, 8, 8)).astype(np.float32)} for at in range(4)]
    sbonnx.quantize(folder / "m.onnx", data, backend="tensorrt@10", output=folder / "q.onnx", effort="fast")
    first, second = (node for node in graphs.load(folder / "q.onnx").nodes if node.op == "Conv")
    copy = f"Reformatting CopyNode for Input Tensor 0 to {first.name}"
    rows = [
        {"Name": copy, "LayerType": "Reformat", "Inputs": tensors(LINEAR), "Outputs": tensors(INT8)},
        {
            "Name": f"{first.name} + Relu",
            "LayerType": "CaskConvolution",
            "Inputs": tensors(INT8),
            "Outputs": tensors(LINEAR),
            "Metadata": f"[ONNX Layer: {first.name}]\x1e[ONNX Layer: Relu]",
        },
        {
            "Name": "__myl_Conv_0",
            "LayerType": "kgen",
            "Inputs": tensors("FP16 NCHW"),
            "Outputs": tensors(LINEAR),
            "Metadata": f"[ONNX Layer: {second.name}]",
        },
    ]
    (folder / "layers.json").write_text(json.dumps({"Layers": rows, "Bindings": ["x", "z"]}))
    times = [
        {"count": 100},
        *({"name": row["Name"], "averageMs": at + 0.25, "timeMs": 9} for at, row in enumerate(rows)),
    ]
    (folder / "profile.json").write_text(json.dumps(times))
    return folder


def test_join(place: Path) -> None:
    found = engine_report(graphs.load(place / "q.onnx"), place / "layers.json", place / "profile.json")
    convolutions = [row for row in found.planned if row.op == "Conv"]
    assert [(row.runs_in, row.ms) for row in convolutions] == [("integers", 1.25), ("float", 2.25)]
    assert convolutions[0].types == f"{INT8} -> {LINEAR}"
    assert (found.ms, found.reformat_ms, len(found.reformats)) == (3.75, 0.25, 1)
    untimed = engine_report(graphs.load(place / "q.onnx"), place / "layers.json")
    assert (untimed.ms, untimed.reformat_ms) == (None, None)


def test_the_verb(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["lint", str(place / "q.onnx"), "--target", "tensorrt@10", "--engine-layers", str(place / "layers.json")]
    main([*command, "--engine-profile", str(place / "profile.json")])
    shown = capsys.readouterr().out
    assert "1 of 2 planned operators in integers; 1 reformats, 0.25 of 3.75 ms" in shown and "FP16 NCHW" in shown
    main([*command, "--json"])
    assert [row["runs_in"] for row in json.loads(capsys.readouterr().out)["engine"]["planned"]] == ["integers", "float"]
    assert main([*command[:3], "onnxruntime", *command[4:]]) == 2
    assert "--engine-layers is about a TensorRT engine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", 'no list "Layers"'),
        ('{"Layers": ["a", "b"]}', "--profilingVerbosity=detailed"),
        ('{"Layers": [{"Name": "other"}]}', "names no operator of the model"),
    ],
)
def test_bad_files(text: str, says: str, place: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(DataError, match=says):
        engine_report(graphs.load(place / "q.onnx"), tmp_path / "bad.json")


@pytest.mark.parametrize("text", ["{}", '[{"count": 3}]', '[{"name": "a"}]', '[{"name": "a", "averageMs": "x"}]'])
def test_bad_profiles(text: str, place: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(DataError, match=r"bad\.json"):
        engine_report(graphs.load(place / "q.onnx"), place / "layers.json", tmp_path / "bad.json")
