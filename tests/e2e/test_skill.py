"""The agent skill: its form, and the commands of its ten tasks, run as an agent would."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import yaml

from sbonnx import cli
from sbonnx.assets import digits, skill

TASKS = re.findall(r"^## (\d+)\. .*?(?=^## |\Z)", (skill() / "SKILL.md").read_text(), re.MULTILINE | re.DOTALL)


def execute(line: str) -> int:
    """Run a command of sbonnx or a script of the skill in this process; return its exit code."""
    words = shlex.split(line)
    output = words[words.index(">") + 1] if ">" in words else "printed.txt"
    name, *arguments = words[: words.index(">")] if ">" in words else words
    with Path(output).open("w") as file, redirect_stdout(file):
        if name == "sbonnx":
            return cli.main(arguments)
        assert name == "python"
        sys.argv = arguments
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(arguments[0], run_name="__main__")
        return int(ended.value.code or 0)


def test_the_form_is_that_of_agent_skills() -> None:
    """Front matter with name (that of the folder) and description; scripts beside it are named in the text."""
    _, front, text = (skill() / "SKILL.md").read_text().split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts["name"] == skill().name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", facts["name"])
    assert 0 < len(facts["description"]) <= 1024 and "Use when" in facts["description"]
    assert len(text.splitlines()) < 500
    scripts = {path.relative_to(skill()).as_posix() for path in (skill() / "scripts").glob("*.py")}
    assert scripts == set(re.findall(r"scripts/\w+\.py", text))
    assert TASKS == [str(number) for number in range(1, 11)]


def test_a_summary_without_an_interval_of_the_latency() -> None:
    """On a busy machine there may be too few runs for one."""
    summarize = runpy.run_path(str(skill() / "scripts" / "summary.py"))["verdict"]
    verdict = {"accuracy": "kept", "text": "as in float"}
    lines = summarize({"verdict": verdict, "problems": [], "latency_ratio": 0.5, "latency_interval": None})
    assert lines == ["kept: as in float", "time: 0.50 of float (too few runs for an interval)"]


@pytest.mark.slow
def test_the_commands_of_all_tasks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(skill(), tmp_path, dirs_exist_ok=True)
    shutil.copy(digits().model, tmp_path / "model.onnx")
    shutil.copy(digits().calib, tmp_path / "calib.npz")
    shutil.copy(digits().eval, tmp_path / "val.npz")
    (tmp_path / "calib").mkdir()
    with np.load(digits().calib) as arrays:
        np.savez(tmp_path / "calib" / "0.npz", image=arrays["image"][:32])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    for block in re.findall(r"```sh\n(.*?)```", Path("SKILL.md").read_text(), re.DOTALL):
        for line in block.splitlines():
            code = execute(line)
            allowed = {0, 1} if "lint" in line else {0}
            assert code in allowed, f"{line}: {code}"
            if line.startswith("python"):
                assert len(Path("printed.txt").read_text().splitlines()) >= 2, line
    values = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(values) == 12 and all("schema" in value for value in values.values())
    assert [values[name]["verdict"]["accuracy"] for name in ("quantize", "limited", "compare", "prune")] == ["kept"] * 4
    assert values["limited"]["metrics"]["evaluation"]["metric"] == "top1"
    assert values["lint"]["counts"]["error"] > values["fixed"]["counts"]["error"]
    assert values["rule"]["subject"] == "T02"
    assert len(values["dry_run"]["jobs"]) == 2
