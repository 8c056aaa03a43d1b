"""`sbonnx qat`: from a float model and unlabelled data to a trained file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from sbonnx.assets import digits
from sbonnx.cli import main

pytest.importorskip("torch")

MODEL = str(digits().model)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", image=np.load(digits().calib)["image"][:64])
    return tmp_path


@pytest.mark.slow
def test_trains_and_writes(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A complete checkpoint is exported without further training."""
    line = ["qat", MODEL, "--data", "data.npz", "--split", "16", "-o", "q.onnx", "--bits", "w4a8"]
    line += ["--epochs", "2", "--batch", "16", "--lr", "0.01", "--checkpoint", "run.pt", "--json", "--quiet"]
    assert main(line) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["output"] == "q.onnx" and report["metrics"]["outputs"][0]["sqnr_db"] > 20
    assert report["notes"][0].startswith("trained for 2 epochs, 8 steps: mean loss in the last epoch 0.0")
    first = onnx.load("q.onnx").SerializeToString()
    assert main([*line, "--force"]) == 0
    assert onnx.load("q.onnx").SerializeToString() == first


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "best"], "methods: uniform, lsq"),
        (["--epochs", "0"], "--epochs must be 1 or more, got 0"),
        (["--augment", "shift,rotate"], "augment: there is no 'rotate'; there are: flip, shift, cutmix, mixup"),
        (["--quant-lr", "-1"], "--quant-lr must be 0 or more"),
        (["--set", "mode=dynamic"], "MODE: dynamic has no ranges of activations to train"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], message: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["qat", MODEL, "--data", "data.npz", "--split", "16", "-o", "q.onnx", *flags]) == 2
    error = capfd.readouterr().err
    assert message in error and "Traceback" not in error
    assert sorted(path.name for path in place.iterdir()) == ["data.npz"]


def test_defaults_are_those_of_settings() -> None:
    """Written twice, because `--help` must not import torch."""
    from sbonnx.cli.create import qat as command
    from sbonnx.qat import Settings

    assert Settings(**{row.name: row.default for row in command.SETTINGS}) == Settings()


@pytest.mark.slow
def test_augment(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = ["qat", MODEL, "--data", "data.npz", "--split", "16", "-o", "q.onnx", "--bits", "w4a8", "--quiet"]
    assert main([*line, "--epochs", "1", "--augment", "shift,mixup", "--checkpoint", "run.pt", "--no-verify"]) == 0
    assert main([*line, "--epochs", "1", "--augment", "shift", "--checkpoint", "run.pt", "--force"]) != 0
    assert "checkpoint of other augmentations" in capfd.readouterr().err


@pytest.mark.slow
def test_adapters_train_in_place_of_the_weights(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = ["qat", MODEL, "--data", "data.npz", "--split", "16", "-o", "a.onnx", "--bits", "w4a8", "--adapters", "2"]
    assert main([*line, "--epochs", "1", "--batch", "16", "--lr", "0.01", "--json", "--quiet"]) == 0
    assert json.loads(capfd.readouterr().out)["metrics"]["outputs"][0]["sqnr_db"] > 20
    assert main([*line[:-1], "0", "--force", "--quiet"]) == 2
    assert "rank" in capfd.readouterr().err
