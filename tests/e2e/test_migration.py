"""The scripts of other tools in the migration guide run in their environments, and give the figures of its table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks import migration
from benchmarks.peers.environments import FOLDER, absent

ROW = re.compile(r"^\| ([\w -]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \| [\d.]+ \|$", re.MULTILINE)
TOP1, DECIBELS, KILOBYTES = 0.01, 3.0, 10.0
"""Tolerances: other processors and versions round other values."""


def rows() -> dict[str, tuple[float, float, float]]:
    """Return top-1, SQNR and size by tool, of the table of the page."""
    found = ROW.findall(migration.PAGE.read_text(encoding="utf-8"))
    return {tool: (float(top1), float(sqnr), float(size)) for tool, top1, sqnr, size in found}


def check(tool: str, found: migration.Measured) -> None:
    top1, sqnr, size = rows()[tool]
    assert found.top1 == pytest.approx(top1, abs=TOP1)
    assert found.sqnr_db == pytest.approx(sqnr, abs=DECIBELS)
    assert found.kilobytes == pytest.approx(size, abs=KILOBYTES)


def test_every_tool_has_a_script_and_a_row() -> None:
    scripts = migration.scripts()
    assert scripts.keys() == migration.TITLES.keys()
    for name, script in scripts.items():
        ast.parse(script)
        assert f"digits_{name}.onnx" in script
    assert rows().keys() == {*migration.TITLES.values(), "sbonnx", "sbonnx --backend tensorrt"}


@pytest.mark.slow
@pytest.mark.parametrize("ending", migration.COMMANDS)
def test_the_command(ending: str, tmp_path: Path) -> None:
    check(" ".join(["sbonnx", *migration.COMMANDS[ending]]), migration.run_sbonnx(ending, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", migration.TITLES)
def test_the_script_of_a_peer(name: str, tmp_path: Path) -> None:
    why = absent(FOLDER, name)
    if why is not None:
        pytest.skip(f"{migration.TITLES[name]}: {why}")
    check(migration.TITLES[name], migration.run_peer(name, tmp_path))
