"""`sbonnx prune` killed at any moment and run again writes the same bytes, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sbonnx.assets import digits

ROOT = Path(__file__).resolve().parents[2]
KILLS = 3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL"),
]


def test_killed_and_run_again(tmp_path: Path) -> None:
    """Kills are spread over the duration of a whole run, on a cache that all runs share."""

    def start(out: Path) -> subprocess.Popen[bytes]:
        files = [str(digits().model), "--data", str(digits().calib), "-o", str(out / "small.onnx")]
        goal = ["--macs", "0.6", "--split", "1", "--set", f"CALIBRATION.CACHE={tmp_path / 'cache'}", "--quiet"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
        command = [sys.executable, "-m", "sbonnx", "prune", *files, *goal]
        return subprocess.Popen(command, env=environment, cwd=tmp_path)

    for name in ("tmp", "whole", "out"):
        (tmp_path / name).mkdir()
    begin = time.monotonic()
    assert start(tmp_path / "whole").wait(timeout=300) == 0
    seconds = time.monotonic() - begin
    for part in range(1, KILLS + 1):
        process = start(tmp_path / "out")
        try:
            process.wait(timeout=seconds * part / (KILLS + 1))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.returncode in (0, 2, -signal.SIGKILL)  # 2: an earlier run got to its end, the file exists
    (tmp_path / "out" / "small.onnx").unlink(missing_ok=True)
    assert start(tmp_path / "out").wait(timeout=300) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["small.onnx"]
    assert not list((tmp_path / "tmp").iterdir())
    assert (tmp_path / "out" / "small.onnx").read_bytes() == (tmp_path / "whole" / "small.onnx").read_bytes()
