"""Below the requested quality: exit code 1, the reason first, and the file is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from sbonnx.cli import main
from tests.support.models import residual

COMMAND = ("quantize", "m.onnx", "--data", "d.npz", "-o", "q.onnx", "--backend", "onnxruntime")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


ASKED = {
    "VERIFY.MIN_SQNR_DB=90": "output 'y' has ",
    "VERIFY.MIN_SQNR_DB={y: 90}": "VERIFY.MIN_SQNR_DB asks for 90",
    "min_cosine=1": "VERIFY.MIN_COSINE asks for 1",
    "max_size=0.01": "VERIFY.MAX_SIZE_RATIO allows 0.01",
    "max_latency=0.0001": "VERIFY.MAX_LATENCY_RATIO allows 0.0001",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wish", ASKED)
def test_quantize(wish: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--set", wish]) == 1
    out, err = capfd.readouterr()
    line, *others = err.splitlines()
    assert [other.split()[0] for other in others] in ([], ["advice:"]), "advice is for outputs, and one line"
    assert line.startswith("below quality: ") and ASKED[wish] in line
    assert "m.onnx -> q.onnx" in out
    assert (place / "q.onnx").exists()
    assert main([*COMMAND, "--set", wish, "--force", "--json"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert list(report)[2:4] == ["ok", "problems"]
    assert report["ok"] is False and ASKED[wish] in report["problems"][0]
    assert report["problem_codes"][0] == "limit-missed" and len(report["problem_codes"]) == len(report["problems"])
    assert main([*COMMAND, "--set", wish, "--force", "--no-verify", "--quiet"]) == 0


def test_ops_that_stay_float(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--set", "a_qscheme=per-tensor-symmetric", "--set", "min_integer=1"]
    assert main([*COMMAND, *flags, "--verbose"]) == 1
    out, err = capfd.readouterr()
    assert "VERIFY.MIN_INTEGER asks for 1 (first: 'stem': the Relu after it stays in float" in err
    assert "integer kernel" in out and "planned ops" in out and "optimisation levels" in out


@pytest.mark.slow
def test_reason_before_the_tables(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Both streams in one file, as in a log."""
    command = [sys.executable, "-m", "sbonnx", *COMMAND, "--set", "min_sqnr=90", "--set", "kernel_costs=none"]
    home = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=home)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    first = next(at for at, line in enumerate(lines) if "m.onnx -> q.onnx" in line)
    assert done.returncode == 1
    assert any(line.startswith("below quality: output 'y'") for line in lines[:first])


def test_unknown_output_is_reported_before_any_work(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--set", "min_sqnr={z: 20}"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and "the model has no output 'z': there are 'y'" in err
    assert not (place / "q.onnx").exists()


def test_compare(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--quiet"]) == 0
    verb = ["compare", "m.onnx", "q.onnx", "--data", "d.npz"]
    assert main([*verb, "--min-sqnr", "10", "--min-integer", "1", "--max-size", "100"]) == 0
    assert "planned ops" in capfd.readouterr().out
    for flags, message in (
        (["--min-sqnr", "90"], "--min-sqnr asks for 90"),
        (["--min-cosine", "1"], "--min-cosine asks for 1"),
        (["--max-size", "0.001"], "--max-size allows 0.001"),
        (["--max-latency", "0.0001"], "--max-latency allows 0.0001"),
    ):
        assert main([*verb, *flags, "--json"]) == 1
        out, err = capfd.readouterr()
        value = json.loads(out)
        assert message in value["problems"][0] and message in err
        assert list(value)[2:4] == ["ok", "problems"]
        assert value["kernels"]["share"] == 1.0 and value["levels"]
