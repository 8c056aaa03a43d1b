"""``sbonnx eval``: one row a model, JSON with intervals, and usage errors of one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.verify import intervals

MODEL, DATA = str(digits().model), str(digits().eval)


def test_models_side_by_side(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copy(MODEL, tmp_path / "copy.onnx")
    command = ["eval", MODEL, str(copy), "--data", DATA, "--metric", "top1"]
    assert main(command) == 0
    out = capfd.readouterr().out
    assert "top1 of 450 labelled samples" in out and "difference" in out and "+0.0000 (-0.0043 to +0.0043)" in out
    assert main([*command, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    first, second = report["rows"]
    assert first["metric"]["low"] < first["metric"]["value"] < first["metric"]["high"]
    low, high = intervals.paired(0, 0, 450)
    assert second["difference"] == {"value": 0.0, "low": low, "high": high} and report["chance"] == 0.1


@pytest.mark.slow
def test_the_verdict_of_compare_knows_the_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A loss of accuracy that --max-loss allows is no loss."""
    model = onnx.load(MODEL)
    (bias,) = (one for one in model.graph.initializer if one.name == model.graph.node[-1].input[2])
    shifted = numpy_helper.to_array(bias) + np.eye(1, 10, dtype=np.float32)[0] * np.float32(3.8)
    bias.CopyFrom(numpy_helper.from_array(shifted, bias.name))
    onnx.save(model, tmp_path / "shifted.onnx")
    command = ["compare", MODEL, str(tmp_path / "shifted.onnx"), "--data", DATA, "--eval", DATA, "--metric", "top1"]
    assert main([*command, "--max-loss", "10%"]) == 0
    said = next(line for line in capfd.readouterr().out.splitlines() if "accuracy" in line)
    assert said.startswith("  ok  accuracy kept: top1 0.97"), said
    assert "far from float" not in said, "the outputs are, and labels decide"
    assert main(command) in (0, 1)
    out, err = capfd.readouterr()
    said = next(line for line in out.splitlines() if "accuracy" in line)
    assert ("accuracy lost" in said) is bool(err) and "accuracy kept" not in said


WRONG = {
    "no metric": (["--data", DATA], "--metric is missing"),
    "no data": (["--metric", "top1"], "--data is missing"),
    "misspelt": (["--data", DATA, "--metric", "top2"], "there is no metric 'top2': did you mean top"),
    "no labels": (["--data", str(digits().calib), "--metric", "top1"], "needs labels and the data has none"),
    "no file": (["--data", DATA, "--metric", "none.py:f"], "--metric: there is no file 'none.py'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_one_line(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    flags, message = WRONG[case]
    assert main(["eval", MODEL, *flags]) == 2
    out, err = capfd.readouterr()
    assert not out and message in err and len(err.splitlines()) == 1
