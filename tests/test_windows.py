"""Code paths of Windows, as far as another system can run them: names that Windows lacks are removed (simulation)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import pytest

from sbonnx.assets import digits
from sbonnx.batch.remote import local_path
from sbonnx.system.python_files import names_function

ROOT = Path(__file__).resolve().parents[1]
SIMULATION = ROOT / "tests" / "support" / "windows"
CONSOLE = "import sys; from sbonnx.cli import main; sys.exit(main())"
IMPORTS = """
import importlib, pathlib, sys, sbonnx
assert sys.platform == "win32"
import os
assert not hasattr(os, "fork") and "fcntl" in sys.modules and sys.modules["fcntl"] is None
TORCH = ("sbonnx.qat", "sbonnx.training", "sbonnx.torchnet.onnx_to_torch")
OPTIONAL = ("sbonnx.batch.dask", *TORCH, "sbonnx.integrations.olive", "sbonnx.__main__")
home = pathlib.Path(sbonnx.__file__).parent
files = [file for folder in (".", "calib", "patterns") for file in (home / folder).rglob("*.py")]
names = [".".join(("sbonnx", *file.relative_to(home).with_suffix("").parts)) for file in files]
for name in names:
    if not name.startswith(OPTIONAL):
        importlib.import_module(name)
print(len(names))
"""


def simulated(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the simulation, in a folder."""
    paths = [str(SIMULATION), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SBONNX_TEST_WINDOWS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_modules_import_commands_and_batches_run(tmp_path: Path) -> None:
    done = simulated(tmp_path, "-c", IMPORTS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300
    files = digits()
    given = [str(files.model), "--data", str(files.calib), "--split", "32", "--effort", "fast"]
    done = simulated(tmp_path, "-c", CONSOLE, "quantize", *given, "-o", "q.onnx")
    assert done.returncode == 0, done.stdout + done.stderr
    again = simulated(tmp_path, "-c", CONSOLE, "quantize", *given, "-o", "q.onnx")
    assert again.returncode == 2 and "exists" in again.stderr
    job = {"model": str(files.model), "data": str(files.calib), "split": 32, "set": {"EFFORT": "fast"}}
    (tmp_path / "jobs.yaml").write_text(json.dumps({"output": "out", "jobs": [job]}))
    done = simulated(tmp_path, "-c", CONSOLE, "batch", "jobs.yaml", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "out").rglob("*.onnx"))
    assert not list(tmp_path.glob(".*.sbonnx")), "temporary folders are removed"


@pytest.mark.parametrize("path", [r"C:\models\data.py", r"..\data.py", r"\\server\share\data.py", "data.py"])
def test_functions_in_files_with_a_drive(path: str) -> None:
    assert names_function(f"{path}:load")
    assert not names_function(path)
    assert PureWindowsPath(f"{path}:load".rpartition(":")[0]) == PureWindowsPath(path)


@pytest.mark.parametrize("path", [r"C:\models\a.onnx", "C:/models/a.onnx", r"d:a.onnx", r"\\server\share\a.onnx"])
def test_a_drive_is_no_protocol_of_a_url(path: str) -> None:
    assert local_path(path) == Path(path)
