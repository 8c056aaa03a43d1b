"""No process that sbonnx starts imports a module from the working folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sbonnx.system import isolation
from tests.support.coverage import unmeasured

PACKAGE = Path(isolation.__file__).resolve().parents[1]

SHADOWED = (
    *("__future__", "json", "select", "threading", "multiprocessing", "queue", "importlib", "contextlib", "typing"),
    *("numpy", "onnx", "onnxruntime", "typer", "yaml", "pydantic", "sitecustomize", "usercustomize"),
)
"""Modules that the start of an interpreter, sbonnx or its dependencies import."""

HELPERS = f"import os, runpy, subprocess, sys\nmodule = runpy.run_path({isolation.__file__!r})\n"
"""Start of scripts for interpreters in which sbonnx is not installed."""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with modules that leave a file when they are imported."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(folder / name)!r} + '.imported', 'w').close()\n")
    monkeypatch.chdir(folder)
    return folder


def imported(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.imported"))


@pytest.mark.parametrize("flags", [["-m", "sbonnx"], ["-msbonnx"]])
def test_the_module_run(hostile: Path, flags: list[str]) -> None:
    """Without what ``-m`` imports from there before it runs sbonnx, where no start-up file has imported that."""
    asked = [sys.executable, "-I", "-c", "import runpy, sys; print(*sys.modules)"]
    for name in set(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()) & {*SHADOWED}:
        (hostile / f"{name}.py").unlink()
    done = subprocess.run([sys.executable, *flags, "recipe", "--help"], check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "Usage" in done.stdout, done.stderr
    assert not imported(hostile)


@pytest.mark.parametrize("run_in", ["checkout", "elsewhere"])
def test_a_source_checkout_runs_as_a_module(tmp_path: Path, run_in: str) -> None:
    """The working folder stays on the path where sbonnx itself lies there, and only there."""
    package = tmp_path / "checkout" / "sbonnx"
    package.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("__init__", "errors", "version"):
        shutil.copy(PACKAGE / f"{name}.py", package)
    (package / "__main__.py").write_text("import sbonnx, sys; print(sbonnx.__file__, *sys.path, sep='\\n')")
    environment = {**os.environ, "PYTHONPATH": "" if run_in == "checkout" else str(package.parent)}
    asked = [sys.executable, "-m", "sbonnx"]
    done = subprocess.run(asked, check=False, cwd=tmp_path / run_in, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, *path = done.stdout.splitlines()
    assert Path(file).parent == package and str(package.parent) in path
    assert str(tmp_path / "elsewhere") not in path


@pytest.mark.skipif(sys.platform == "win32", reason="workers inherit open files")
@pytest.mark.parametrize(("context", "attacked"), [("safe_start", False), ("leave_it", True)])
def test_processes_of_multiprocessing(hostile: Path, tmp_path: Path, context: str, attacked: bool) -> None:
    """The second case shows that the attack works where nothing is done."""
    script = tmp_path / "script.py"
    script.write_text(
        HELPERS + "import contextlib, multiprocessing\n"
        f"start = module.get({context!r}, contextlib.nullcontext)\n"
        "if __name__ == '__main__':\n"
        "    for way in ('spawn', 'forkserver'):\n"
        "        with start():\n"
        "            process = multiprocessing.get_context(way).Process(target=os.getpid)\n"
        "            process.start()\n"
        "        process.join()\n"
        "    print(os.environ.get('PYTHONSAFEPATH'))\n"
    )
    done = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True, env=unmeasured())
    assert bool(imported(hostile)) == attacked
    assert attacked or done.stdout == "None\n", done.stderr


def test_a_command_finds_what_its_parent_finds(hostile: Path, tmp_path: Path) -> None:
    """Modules in zip files, in folders added to `sys.path`, and (of an interpreter without a virtual environment) in
    the user site, there also through the import hook of an editable install.
    """
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("in_zip.py", "import in_site, hooked\ndef main(*values): print(ascii(values))\n")
    base = tmp_path / "base"
    script = tmp_path / "script.py"
    script.write_text(
        HELPERS + f"sys.path.append({str(tmp_path / 'code.zip')!r})\n"
        "command = module['python_command']('in_zip', 'main', [1, 2.5], 'é\\udcff', None)\n"
        "sys.exit(subprocess.call(command))\n"
    )
    python = os.path.realpath(sys.executable)  # before Python 3.11, `sys._base_executable` is that of the environment
    environment = {"PYTHONUSERBASE": str(base), "PATH": "/usr/bin:/bin"}
    asked = [python, "-c", "import site; print(site.getusersitepackages())"]
    site = Path(subprocess.run(asked, check=False, env=environment, capture_output=True, text=True).stdout.strip())
    site.mkdir(parents=True)
    (site / "in_site.py").write_text("")
    (site / "hook.pth").write_text("import sys, types; sys.modules['hooked'] = types.ModuleType('hooked')\n")
    done = subprocess.run([python, script], check=False, env=environment, capture_output=True, text=True)
    assert done.stdout == "([1, 2.5], '\\xe9\\udcff', None)\n", done.stderr
    assert not imported(hostile)
