"""``sbonnx demo``: its figures equal those of onnxruntime, and it runs without the packages that trained the model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sbonnx.assets import digits
from sbonnx.backends import BACKENDS
from sbonnx.cli import main
from sbonnx.cli.create.demo import DemoFigures, DemoRow, WorstLayer, _problems
from tests.support.models import run

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """
import sys
for name in ("torch", "sklearn", "onnxscript"):
    sys.modules[name] = None
from sbonnx.cli import main
sys.exit(main(sys.argv[1:]))
"""


def accuracy(path: Path) -> float:
    with np.load(digits().eval) as arrays:
        scores = run(str(path), {"image": arrays["image"]}, level="all")["scores"]
        return float((scores.argmax(1) == arrays["label"]).mean())


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    """Files of an earlier run are replaced."""
    out = tmp_path / "demo"
    out.mkdir()
    for name in ("float", *BACKENDS):
        (out / f"digits_{name}.onnx").write_text("earlier")
    begin = time.perf_counter()
    command = [sys.executable, "-c", WITHOUT, "demo", "--out", str(out), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert time.perf_counter() - begin < 60
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    value = json.loads(done.stdout)
    rows = {row["model"]: row for row in value["models"]}
    assert list(rows) == ["float", *BACKENDS]
    assert {path.name for path in out.iterdir()} == {Path(row["file"]).name for row in rows.values()}
    for row in rows.values():
        assert row["accuracy"] == pytest.approx(accuracy(Path(row["file"])), abs=1e-9)
        assert row["bytes"] == Path(row["file"]).stat().st_size
    for backend in BACKENDS:
        assert rows[backend]["accuracy"] > rows["float"]["accuracy"] - 0.02
        assert rows[backend]["agreement"] > 0.98
        assert rows[backend]["bytes"] < 0.5 * rows["float"]["bytes"]
        assert rows[backend]["worst"]
    timed = {name for name, row in rows.items() if row.get("latency_ratio") is not None}
    assert timed == {"onnxruntime"}, "the demo runs all files in onnxruntime, whose times say nothing of other runtimes"


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def quantized(backend: str, floats: Path, paths: object, target: Path, progress: object) -> DemoRow:
        worst = (WorstLayer("conv", "image", "uint8", 30.0, 20.0),)
        return DemoRow(backend, 0.99, 1000, str(target), DemoFigures(0.98, 20.0, None, worst, ()))

    monkeypatch.setattr("sbonnx.cli.create.demo._quantized", quantized)
    assert main(["demo", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for word in ("accuracy", "agreement with float", "worst layers", *BACKENDS, str(tmp_path / "digits_tensorrt.onnx")):
        assert word in out


def test_loss_of_accuracy_is_a_problem() -> None:
    rows = [
        DemoRow(model, accuracy, 1000, f"{model}.onnx")
        for model, accuracy in (("float", 0.99), ("good", 0.975), ("bad", 0.9))
    ]
    assert _problems(rows) == ("bad loses 9.0 percentage points of accuracy against float",)


def test_folder_that_cannot_be_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "demo")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("OutputError: the folder")
    assert len(err.splitlines()) == 1


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sbonnx.cli.create.demo._quantized", interrupt)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"interrupted; the files in '{tmp_path}' are complete, but some are missing\n"
