"""Lint in CI: the hook of pre-commit, the steps of the GitHub Action, and what the Docker image names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

from sbonnx.integrations.lint_files import main
from tests.lint.seeded import CASES

ROOT = Path(__file__).resolve().parents[2]
HOOKS: Any = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
ACTION: Any = yaml.safe_load((ROOT / ".github" / "actions" / "lint" / "action.yml").read_text())


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a model that breaks T02, one that does not, and a file that is no model."""
    bad, clean = CASES["T02"]
    (tmp_path / "models" / "deep").mkdir(parents=True)
    onnx.save(bad.model(), tmp_path / "models" / "bad.onnx")
    onnx.save(clean.model(), tmp_path / "models" / "deep" / "clean.onnx")
    (tmp_path / "text.onnx").write_text("no model")
    return tmp_path


def test_files(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, clean = files / "models" / "bad.onnx", files / "models" / "deep" / "clean.onnx"
    given = ["--target", "tensorrt@10"]
    assert main([*given, str(clean)]) == 0
    assert "error" not in capsys.readouterr().out
    assert main([*given, str(bad), str(clean)]) == 1
    found = capsys.readouterr().out.splitlines()
    assert [line for line in found if line.startswith(f"{bad}: error T02 at ")]
    assert main([*given, str(files / "models")]) == 1
    assert capsys.readouterr().out.splitlines() == found, "a folder stands for all its models"
    assert main([*given, "--github", str(bad)]) == 1
    assert f"::error file={bad},title=sbonnx T02::" in capsys.readouterr().out
    assert main([*given, str(files / "text.onnx"), str(bad)]) == 2
    read = capsys.readouterr()
    assert read.err.startswith(f"error: {files / 'text.onnx'}: ") and len(read.err.splitlines()) == 1
    assert "T02" in read.out, "other files are checked"
    assert main(["--target", "nowhere", str(bad)]) == 2
    assert main(given) == 0


def test_warnings_fail_if_strict(tmp_path: Path) -> None:
    from sbonnx.linting import lint

    warned = [
        (bad.target, bad.model())
        for bad, _ in CASES.values()
        if {found.severity for found in lint(bad.model(), bad.target)} == {"warning"}
    ]
    target, model = warned[0]
    onnx.save(model, tmp_path / "w.onnx")
    assert main(["--target", target, str(tmp_path / "w.onnx")]) == 0
    assert main(["--target", target, "--strict", str(tmp_path / "w.onnx")]) == 1


def test_the_hook_runs_the_module() -> None:
    (hook,) = HOOKS
    assert hook["entry"].split() == ["python", "-m", "sbonnx.integrations.lint_files"]
    assert re.search(hook["files"], "a/b.onnx") and not re.search(hook["files"], "a/b.onnx.data")
    assert main(hook["args"]) == 0


@pytest.mark.slow
def test_pre_commit_runs_the_hook(files: Path) -> None:
    pytest.importorskip("pre_commit", reason="pre-commit is not installed")
    subprocess.run(["git", "init", "-q", str(files)], check=True)
    subprocess.run(["git", "add", "."], cwd=files, check=True)
    given = [sys.executable, "-m", "pre_commit", "try-repo", str(ROOT), "sbonnx-lint", "--files"]
    for name, code in (("models/deep/clean.onnx", 0), ("text.onnx", 1)):
        done = subprocess.run([*given, name], cwd=files, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == code, done.stdout + done.stderr
        assert "sbonnx lint" in done.stdout


@pytest.mark.slow
def test_the_steps_of_the_action(files: Path) -> None:
    install, step = ACTION["runs"]["steps"]
    assert (ROOT / ".github" / "actions" / "lint" / "../../..").resolve() == ROOT
    assert '"$GITHUB_ACTION_PATH/../../..[cpu]"' in install["run"]
    if shutil.which("bash") is None:
        pytest.skip("the steps need bash")
    python = files / "tools" / "sbonnx-lint" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    inputs = {f"${{{{ inputs.{name} }}}}": row.get("default", "") for name, row in ACTION["inputs"].items()}

    def run(**given: str) -> subprocess.CompletedProcess[str]:
        chosen = {**inputs, **{f"${{{{ inputs.{name} }}}}": value for name, value in given.items()}}
        environment = {name: chosen[value] for name, value in step["env"].items()}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env={**os.environ, **environment, "RUNNER_TEMP": str(files / "tools")},
            cwd=files,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    found = run(files="models/**/*.onnx", target="tensorrt@10")
    assert found.returncode == 1, found.stderr
    assert "::error file=models/bad.onnx,title=sbonnx T02::" in found.stdout
    assert run(files="models/deep/*.onnx", target="tensorrt@10").returncode == 0
    nothing = run(files="none/*.onnx")
    assert nothing.returncode == 2
    assert nothing.stdout == "::error::no file matches 'none/*.onnx'\n"


def test_the_docker_image_names_what_exists() -> None:
    text = (ROOT / "examples" / "docker" / "Dockerfile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    (extras,) = re.findall(r"\.whl\)\[([a-z,]+)\]", text)
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
    assert all(f"Python :: {version}" in project for version in re.findall(r"python:(3\.\d+)-slim", text))
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists()
    assert ".git" in (ROOT / ".dockerignore").read_text().split()
