"""onnxruntime is loaded without its telemetry: no upload thread, no device id, no session file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sbonnx.system.runtime import TELEMETRY_SWITCH

ROOT = Path(__file__).resolve().parents[2]

OPEN = """
import os, sys
from sbonnx.system.runtime import onnxruntime
from sbonnx.assets import digits
ort = onnxruntime()
ort.InferenceSession(str(digits().model))
"""

DIRECT = """
import sbonnx.api.create
import onnxruntime
"""

REPLACED = """
import os
import sbonnx.system.runtime
kept = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
os.environ.clear()
os.environ.update(kept)
sbonnx.system.runtime.onnxruntime()
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("home", "script"),
    [("writable", OPEN), ("a file", OPEN), ("writable", DIRECT), ("writable", REPLACED)],
    ids=["session", "no home", "imported by others", "other environment"],
)
def test_no_telemetry(home: str, script: str, tmp_path: Path) -> None:
    """Also where HOME cannot be written to, which the device id complains about on stderr otherwise."""
    (tmp_path / "tmp").mkdir()
    if home == "writable":
        (tmp_path / "home").mkdir()
    else:
        (tmp_path / "home").write_text("")
    kept = {name: value for name, value in os.environ.items() if name not in (TELEMETRY_SWITCH, "CI")}
    environment = {**kept, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path.name for path in tmp_path.rglob("*")} == {"home", "tmp"}


def test_a_choice_of_the_user_is_respected() -> None:
    switched = f"print(os.environ[{TELEMETRY_SWITCH!r}])"
    script = f"import os; from sbonnx.system import runtime; runtime.onnxruntime(); {switched}"
    environment = {**os.environ, TELEMETRY_SWITCH: "0", "CI": "1"}  # onnxruntime sends nothing in CI either
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "0\n"
