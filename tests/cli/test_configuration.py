"""Options from ``sbonnx.toml`` and ``pyproject.toml``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sbonnx.assets import digits
from sbonnx.cli import main

MODEL = str(digits().model)


@pytest.fixture
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, below the folder of the configuration."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def recipe(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["recipe", "--json", *words]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)["recipe"]
    return value


@pytest.mark.parametrize(("name", "table"), [("sbonnx.toml", ""), ("pyproject.toml", "tool.sbonnx")])
def test_found_upwards_and_named(
    name: str, table: str, below: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options at the top hold for every command, those of a table for one; the output names file and options."""
    head, inner = (f"[{table}]\n", f"[{table}.plan]\n") if table else ("", "[plan]\n")
    (tmp_path / name).write_text(f'{head}backend = "trt@10"\n{inner}exclude = ["node_conv2d_7"]\n')
    assert recipe([], capsys)["BACKEND"] == "tensorrt"
    assert main(["plan", MODEL]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"configuration: {tmp_path / name} (backend, exclude)\n")
    assert "for tensorrt: " in out
    assert not [line for line in out.splitlines() if line.startswith("head.0.weight ")]
    assert main(["plan", MODEL, "--no-config"]) == 0
    assert "for onnxruntime: " in capsys.readouterr().out


def test_precedence(below: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Typed option, configuration, recipe file, default; the nearer file alone counts."""
    (tmp_path / "sbonnx.toml").write_text('backend = "trt"\n')
    (tmp_path / "a" / "sbonnx.toml").write_text('set = { A_OBSERVER = "minmax", BITS = "w4a8", EFFORT = "fast" }\n')
    found = recipe(["--set", "OBSERVER=percentile", "--bits", "int8"], capsys)
    assert found["BACKEND"] == "onnxruntime"
    assert (found["A"]["OBSERVER"]["TYPE"], found["W"]["QUANTIZER"]["BIT"]) == ("percentile", 8)
    assert found["EFFORT"] == "fast"
    (below / "r.yaml").write_text("EFFORT: best\nW: {QUANTIZER: {BIT: 5}}\nSAMPLES: 3\n")
    found = recipe(["r.yaml"], capsys)
    assert (found["EFFORT"], found["W"]["QUANTIZER"]["BIT"], found["SAMPLES"]) == ("fast", 4, 3)


def test_paths_are_relative_to_the_file(below: Path, tmp_path: Path) -> None:
    (tmp_path / "calib.npz").write_bytes(digits().calib.read_bytes())
    (tmp_path / "sbonnx.toml").write_text('[quantize]\ndata = "calib.npz"\nno_verify = true\n')
    assert main(["quantize", MODEL, "-o", "q.onnx", "--quiet"]) == 0
    assert (below / "q.onnx").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "the configuration {file} is not TOML: "),
        ("backendd = 'ort'", "'backendd' in {file} is no option or command. Did you mean backend"),
        ("[plan]\nexclud = ['x']", "'plan.exclud' in {file} is no option or command. Did you mean exclude"),
        ("quiet = 'yes'", "'quiet' in {file} is true or false, got 'yes'"),
        ("set = ['SAMPLES=3']", "'set' in {file} is a table of recipe keys"),
        ("backend = {a = 1}", "'backend' in {file} is no option or command"),
    ],
)
def test_bad_files(text: str, message: str, below: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line; the help and the version do not need the file."""
    file = tmp_path / "sbonnx.toml"
    file.write_text(text)
    assert main(["plan", MODEL]) == 2
    captured = capsys.readouterr()
    assert message.format(file=file) in captured.err
    assert len(captured.err.splitlines()) == 1
    for words in (["plan", "-h"], ["version"], ["help"], ["plan", MODEL, "--no-config", "--quiet"]):
        assert main(words) == 0


def test_other_projects_are_passed_over(below: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pyproject.toml without our table, and one that is not TOML."""
    (tmp_path / "sbonnx.toml").write_text('backend = "virtual"\n')
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (below / "pyproject.toml").write_text("a b")
    assert recipe([], capsys)["BACKEND"] == "virtual"
