"""Every benchmark is a command that starts: its modules are imported and its options are read."""

from __future__ import annotations

import importlib
import sys

import pytest

from benchmarks.results import ROOT

WITHOUT_OPTIONS = ("child", "operators")
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.parent.name != "peers" and path.stem not in WITHOUT_OPTIONS and "if __name__ ==" in path.read_text()
)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if ".qat." in name:
        pytest.importorskip("torch")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert not ended.value.code
    assert "usage: " in capsys.readouterr().out
