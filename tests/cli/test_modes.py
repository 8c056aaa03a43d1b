"""``--mode`` and ``--format``: tables of `plan` and files of `quantize`, with and without data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from sbonnx.cli import main
from tests.support.models import model, residual, run

X = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a MatMul, a convolutional network and data for both; the working directory."""
    text = "agraph (float[N,256] x) => (float[N,256] y) { y = MatMul (x, w) }"
    onnx.save(model(text, w=(256, 256)), str(tmp_path / "m.onnx"))
    onnx.save(residual(), str(tmp_path / "r.onnx"))
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ops(path: str) -> list[str]:
    return sorted(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--mode", "dynamic"], ["Cast", "DynamicQuantizeLinear", "MatMulInteger", "Mul", "Mul"]),
        (["--mode", "weight_only"], ["MatMulNBits"]),
        (["--mode", "weight_only", "--backend", "virtual"], ["DequantizeLinear", "MatMul"]),
    ],
)
def test_modes_without_data(
    flags: list[str], expected: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "m.onnx", "-o", "q.onnx", *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and any("not compared with float" in note for note in report["notes"])
    assert ops("q.onnx") == expected
    reference, value = run("m.onnx", {"x": X})["y"], run("q.onnx", {"x": X}, level="all")["y"]
    assert np.abs(reference - value).max() < 0.2 * np.abs(reference).max()


def test_plan_shows_the_rule(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "r.onnx", "--mode", "dynamic"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ConvInteger" in shown and "weight of Conv" not in shown
    assert main(["plan", "m.onnx", "--mode", "dynamic"]) == 0
    assert "the scale of the input is computed at run time" in " ".join(capsys.readouterr().out.split())


def test_integer_ops(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["quantize", "r.onnx", "--data", "d.npz", "--split", "2", "-o", "q.onnx", "--format", "qoperator"]
    assert main([*command, "--quiet"]) == 0
    assert ops("q.onnx").count("QLinearConv") == 3 and "DequantizeLinear" not in ops("q.onnx")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--data is missing"),
        (["--format", "qoperator"], "--data is missing"),
        (["--mode", "dynamic", "--backend", "tensorrt"], "must be static or weight_only"),
        (["--mode", "quick"], "must be static, dynamic or weight_only"),
        (["--mode", "weight_only", "--backend", "tensorrt", "--high-precision", "fp16"], "HIGH_PRECISION wants ranges"),
    ],
)
def test_refusals(flags: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "m.onnx", "-o", "q.onnx", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not Path("q.onnx").exists()
