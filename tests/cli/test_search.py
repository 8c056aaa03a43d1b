"""Recipe search (AUTO, MIXED) from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from sbonnx.cli import main
from tests.support.models import residual

COMMAND = ("quantize", "m.onnx", "--data", "d.npz", "--split", "2", "--backend", "virtual", "--set", "rounding=nearest")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).standard_normal((32, 3, 8, 8)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_auto(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-o", "q.onnx", "--recipe", "auto", "--bits", "w4a8", "--save-recipe", "r.yaml", "--set", "observer=mse"]
    assert main([*COMMAND, *flags, "-v"]) == 0
    out = capsys.readouterr().out
    assert "search steps, evaluated on 4 feeds held out" in out and "plain recipe" in out
    assert main(["quantize", "m.onnx", "--data", "d.npz", "--split", "2", "-o", "q2.onnx", "--recipe", "r.yaml"]) == 0
    assert (place / "q.onnx").read_bytes() == (place / "q2.onnx").read_bytes()


@pytest.mark.slow
def test_widths(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--average-bits", "4", "--set", "MIXED.WEIGHTS=2/4/8"]
    assert main([*COMMAND, "-o", "q.onnx", *flags, "-v"]) == 0
    out = capsys.readouterr().out
    assert "widths, cost in bits for 4" in out and "Pareto front" in out
    assert main([*COMMAND, "-o", "q2.onnx", *flags, "--json"]) == 0
    mixed = json.loads(capsys.readouterr().out)["search"]["mixed"]
    assert mixed["weights"].keys() == {"stem", "conv1", "conv2", "fc"} and mixed["front"]


def test_below_the_requested_quality(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--set", "MIXED.WEIGHTS=[4]", "--set", "MIXED.ACTIVATIONS=[8, 16]", "--set", "MIXED.LOSS=relative"]
    keys += ["--minimize", "bits"]
    assert main([*COMMAND, "-o", "q.onnx", "--bits", "w4a8", "--max-loss", "0.001%", *keys]) == 1
    err = capsys.readouterr().err
    assert "is not reached with the widest candidates (MIXED.WEIGHTS, MIXED.ACTIVATIONS)" in err
    assert "let the search widen inputs too: set MIXED.ACTIVATIONS" in err
    assert main([*COMMAND, "-o", "q.onnx", "--force", "--min-sqnr", "90dB"]) == 1
    assert "VERIFY.MIN_SQNR_DB asks for 90" in capsys.readouterr().err
    assert main([*COMMAND, "-o", "q.onnx", "--force", "--min-sqnr", "much"]) == 2
