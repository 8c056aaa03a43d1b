"""Options from ``sbonnx.toml`` and ``pyproject.toml``."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.cli.configuration import find
from sbonnx.cli.create import quantize
from sbonnx.errors import RecipeError
from sbonnx.recipe import load
from sbonnx.recipe.names import FILE_KEYS
from sbonnx.recipe.sections.whole import KEYS

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


def test_settings_and_keys_that_are_files(
    below: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of --preprocess and --recipe, and recipe keys that name files; words such as presets are no files."""
    (tmp_path / "r.yaml").write_text("SAMPLES: 3\n")
    keys = 'KERNEL_COSTS = "costs.json", CALIBRATION.CACHE = "cache", tensor_overrides = "none"'
    (tmp_path / "sbonnx.toml").write_text(f'preprocess = "raw.yaml"\nrecipe = "r.yaml"\nset = {{ {keys} }}\n')
    values = find(below).default_map({"quantize": quantize.OPTIONS})["quantize"]
    assert values["preprocess"] == str(tmp_path / "raw.yaml")
    assert values["recipe"] == str(tmp_path / "r.yaml")
    settings = load(None, overrides=values["set"])
    assert settings.kernel_costs == str(tmp_path / "costs.json")
    assert settings.calibration.cache == str(tmp_path / "cache")
    assert settings.tensor_overrides is None
    (tmp_path / "sbonnx.toml").write_text('preprocess = "imagenet"\nrecipe = "AUTO"\n')
    values = find(below).default_map({"quantize": quantize.OPTIONS})["quantize"]
    assert (values["preprocess"], values["recipe"]) == ("imagenet", "AUTO")


def test_keys_that_are_files_are_known() -> None:
    """No other key takes a path, apart from patterns of names, runtimes and heads."""
    taken = set()
    for key in KEYS:
        for backend in ("onnxruntime", "qnn"):
            with contextlib.suppress(RecipeError):
                load(None, backend=backend, overrides=[f"{key}=some/file.json"])
                taken.add(key)
    others = {"INCLUDE", "EXCLUDE", "SKIP_TRACE_MODULES", "FLOAT_NODES", "VERIFY.HEAD", "VERIFY.RUNTIMES"}
    assert taken - others == set(FILE_KEYS)


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


EVIL = "from pathlib import Path\nPath('ran').touch()\n\n\ndef go(*_):\n    return []\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[quantize]\ndata = "evil.py:go"', "'data' in {file} is the function 'evil.py:go'"),
        ('[quantize]\nmetric = "evil.py:go"', "'metric' in {file} is the function 'evil.py:go'"),
        ('ort-library = ["evil.so"]', "'ort_library' in {file} is not taken from configuration files"),
        ('decode = "evil.py:go"', "'decode' in {file} is the function 'evil.py:go'"),
        ('[batch]\nscheduler = "tcp://127.0.0.1:1"', "'scheduler' in {file} is not taken from configuration files"),
        ("force = true", "'force' in {file} is not taken from configuration files"),
        ('report = "r.json"', "'report' in {file} is not taken from configuration files"),
        ('[quantize]\nsave-recipe = "r.yaml"', "'save_recipe' in {file} is not taken from configuration files"),
        ('[quantize]\noutput = "q.onnx"', "'output' in {file} is not taken from configuration files"),
        ('[demo]\nout = "there"', "'out' in {file} is not taken from configuration files"),
    ],
)
def test_no_code_no_outputs(
    text: str, named: str, below: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that comes with a folder starts no script, connects to nothing and writes nothing."""
    file = tmp_path / "sbonnx.toml"
    file.write_text(text)
    (tmp_path / "evil.py").write_text(EVIL)
    assert main(["plan", MODEL]) == 2
    assert named.format(file=file) in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["evil.py", "sbonnx.toml"]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no owners")
@pytest.mark.parametrize("place", ["file", "folder"])
def test_files_of_others_are_passed_over(
    place: str, below: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that other users own or can write to is not used, nor one in a folder of them; the output says so."""
    file = tmp_path / "sbonnx.toml"
    file.write_text('backend = "tensorrt"\n')
    subject = file if place == "file" else tmp_path
    assert recipe([], capsys)["BACKEND"] == "tensorrt"
    mode = subject.stat().st_mode
    subject.chmod(mode | stat.S_IWOTH)
    assert recipe([], capsys)["BACKEND"] == "onnxruntime"
    assert main(["plan", MODEL]) == 0
    assert f"note: the configuration {file} is not used: all users can write to it" in capsys.readouterr().out.replace(
        "its folder", "it"
    )
    subject.chmod(mode)
    if os.geteuid() == 0:
        os.chown(subject, 65534, 65534)
        assert recipe([], capsys)["BACKEND"] == "onnxruntime"
        os.chown(subject, 0, 65534)
        subject.chmod(mode | stat.S_IWGRP)
        assert recipe([], capsys)["BACKEND"] == "onnxruntime"


def test_the_search_ends_with_the_working_tree(
    below: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the root of a repository, and at the home folder."""
    (tmp_path / "sbonnx.toml").write_text('backend = "virtual"\n')
    (below / ".git").mkdir()
    assert recipe([], capsys)["BACKEND"] == "onnxruntime"
    (below / ".git").rmdir()
    monkeypatch.setenv("HOME", str(tmp_path / "a"))
    assert recipe([], capsys)["BACKEND"] == "onnxruntime"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert recipe([], capsys)["BACKEND"] == "virtual"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pyproject.toml", "tool = 3"),
        ("pyproject.toml", "tool = []"),
        ("pyproject.toml", "a = " + "[" * 100_000),
        ("pyproject.toml", "a = '" + "x" * (1 << 19) + "'"),
        ("sbonnx.toml", "a = " + "[" * 100_000),
        ("sbonnx.toml", "# " + "x" * (1 << 19)),
        ("sbonnx.toml", "set = {SAMPLES = 2001-01-01}"),
        ("sbonnx.toml", "backend = 2001-01-01"),
        ("sbonnx.toml", "exclude = [[2001-01-01]]"),
    ],
)
def test_hostile_toml(name: str, content: str, below: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Deep, large and unusual files: those of other tools are passed over, ours are one line."""
    (tmp_path / name).write_text(content)
    code = main(["plan", MODEL, "--quiet"])
    err = capsys.readouterr().err
    assert (code, err) == (0, "") if name == "pyproject.toml" else code == 2
    assert "internal error" not in err
    assert len(err.splitlines()) == (name == "sbonnx.toml")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no FIFOs")
def test_a_fifo_is_no_configuration(below: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "sbonnx.toml")
    assert main(["plan", MODEL]) == 2
    assert "it is a FIFO (named pipe), not a regular file" in capsys.readouterr().err
