"""Shell completion, in a real bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sbonnx.cli import main

ROOT = Path(__file__).resolve().parents[2]

ASK = """
source script.bash
shopt -u extdebug
for line in "$@"; do
    read -ra COMP_WORDS <<< "$line"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _sbonnx_completion sbonnx
    echo "${COMPREPLY[*]}" | tr '\\n' ' '; echo
done
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands, options, backends, recipe keys; files where nothing else fits (``complete -o default``)."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "complete -o default" in script
    (tmp_path / "script.bash").write_text(script)
    program = tmp_path / "sbonnx"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m sbonnx "$@"\n')
    program.chmod(0o755)
    lines = {
        "sbonnx qu": "quantize",
        "sbonnx plan m.onnx --exc": "--exclude",
        "sbonnx plan m.onnx --backend tensor": "tensorrt tensorrt@11 tensorrt@10 tensorrt@8.6",
        "sbonnx plan m.onnx --set W.QSC": "W.QSCHEME=",
        "sbonnx plan m.onnx --set w_obs": "w_observer=",
        "sbonnx quantize m.onnx --observer ms": "mse",
        "sbonnx completion f": "fish",
        "sbonnx llm ev": "evaluate",
        "sbonnx plan m.on": "",
    }
    environment = {"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"}
    command = ["bash", "--norc", "-c", ASK, "bash", *lines]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert (dict(zip(lines, map(str.strip, done.stdout.splitlines()), strict=True)), done.stderr) == (lines, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_SBONNX_COMPLETE=complete_{shell}" in capsys.readouterr().out


def test_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err == ("RecipeError: no completion for the shell 'tcsh': choose bash, zsh or fish\n")
