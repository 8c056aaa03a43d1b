"""The program around the verbs: help, exit codes, stdout and stderr."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import sbonnx
from sbonnx import recipe
from sbonnx.assets import digits
from sbonnx.cli import VERBS, main, options
from sbonnx.cli.app import GROUPS, build
from sbonnx.cli.examples import EXAMPLES
from sbonnx.present.text.printer import Printer
from sbonnx.present.text.tables import show_refusals
from sbonnx.report import Reason, Refusal
from sbonnx.system import native as loops
from sbonnx.system.terminal import to_json
from sbonnx.values import json_values
from sbonnx.version import __version__

ROOT = Path(__file__).resolve().parents[2]
NAMES = [verb.__name__.rpartition(".")[2] for verb in VERBS]


def test_every_command_has_examples_that_parse() -> None:
    program: Any = typer.main.get_command(build())
    commands = {*NAMES, "help", *(f"llm {each.name}" for group in GROUPS for each in group.COMMANDS)}
    assert commands == EXAMPLES.keys()
    for name, lines in EXAMPLES.items():
        command = program
        for word in name.split():
            command = command.get_command(command.make_context("sbonnx", [], resilient_parsing=True), word)
        for line in lines:
            words = shlex.split(re.split(r"  #| > |\)\"", line.removeprefix('eval "$('))[0])
            assert words[: 1 + len(name.split())] == ["sbonnx", *name.split()]
            command.make_context(name, words[1 + len(name.split()) :])


def test_defaults_in_the_help_are_those_of_the_recipe() -> None:
    rows = [row for row in vars(options).values() if isinstance(row, options.CommandOption) and row.shown and row.key]
    assert len(rows) > 10
    for row in rows:
        text, key = row.shown, row.key
        given = recipe.load(
            overrides=[f"{key}={text}"]
            if text not in ("none", "all") and not text.startswith("by ")
            else [f"{key}=null"][:0]
        )
        assert given.to_dict() == recipe.load().to_dict(), row.flags


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_verb(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for verb, name in zip(VERBS, NAMES, strict=True):
        assert f"  {name}" in out
        assert verb.HELP.partition(".")[0] in out


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
def test_help_of_each_verb(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    for words in ([name, "-h"], ["help", name]):
        assert main(words) == 0
        assert capsys.readouterr().out == out
    assert f"Usage: sbonnx {name}" in out
    for flag in ("--json", "--quiet", "--debug"):
        assert flag in out


@pytest.mark.parametrize("verb", VERBS, ids=NAMES)
def test_a_verb_reads_options_that_it_declares(verb: Any) -> None:
    names = re.findall(r"given\[(options\.)?([A-Z_]+)\]", Path(verb.__file__).read_text())
    assert {getattr(options if shared else verb, name) for shared, name in names} <= set(verb.OPTIONS)
    assert len({row.name for row in verb.OPTIONS}) == len(verb.OPTIONS)


def test_options_of_quantize(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "--help"]) == 0
    out = capsys.readouterr().out
    flags = "--data --output --backend --recipe --bits --set --force --split --samples --device --no-verify --report"
    flags += " --memory --granularity --cache --asym --feedback --trt-cache --json-progress"
    assert not [flag for flag in flags.split() if flag not in out]
    assert "-o" in out
    assert "MODEL" in out


@pytest.mark.parametrize(
    ("missing", "loops_text"),
    [([], "yes"), (loops.MODULES, "no"), (loops.MODULES[1:2], "all but sbonnx.moments._lags")],
)
def test_version(
    missing: list[str], loops_text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "missing", lambda: list(missing))
    assert main(["--version"]) == 0
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"sbonnx {__version__} (compiled loops: {loops_text})\n" * 2


def test_compiled_loops_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has a note about it."""
    monkeypatch.setenv(loops.SWITCH, "0")
    assert loops.missing() == list(loops.MODULES)
    report = sbonnx.quantize(digits().model, None, mode="weight_only", backend="virtual", verify=False)
    assert any("numpy ran in place of the compiled loops (SBONNX_COMPILED=0)" in note for note in report.notes)


def test_help_is_light() -> None:
    """Printing the help imports no heavy package."""
    heavy = "{'numpy', 'onnx', 'onnxruntime', 'onnx_graphsurgeon', 'pydantic', 'yaml'}"
    code = f"import sys; from sbonnx.cli import main; main(['--help']); print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_stdout_is_json_only(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(digits().model), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert captured.err == ""


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_quiet_prints_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(digits().model), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_reader_closes_the_pipe() -> None:
    """``sbonnx plan ... | head -1`` exits with 0."""
    command = [sys.executable, "-m", "sbonnx", "plan", str(digits().model), "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_piped_tables_are_not_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    long = "layer/" * 100
    Printer().table("title", ("name", "value"), [(long, 0.5), ("short [red]", None)])
    title, head, first, second, _ = capsys.readouterr().out.split("\n", 4)
    assert title == "title"
    assert head.split() == ["name", "value"]
    assert first == f"{long}    0.5"
    assert second == "short [red]"


@pytest.mark.parametrize(("width", "columns"), [(80, ["layer", "dB", "bars"]), (32, ["layer", "dB"]), (20, ["layer"])])
def test_columns_of_narrow_terminals(
    width: int, columns: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names stay on one line, as long as there is something else to leave out."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    name = "/layer1/conv1/Conv"
    Printer().table("t", ("layer", "dB", "bars"), [(name, 12.5, "████████")], optional=("bars", "dB"))
    lines = capsys.readouterr().out.splitlines()
    assert re.sub(r"\x1b\[[0-9;]*m", "", lines[2]).split() == columns
    assert any(name in line for line in lines)


def test_reasons_of_one_code_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    refusals = [
        Refusal("Conv", f"n{index}", Reason("type-of-codes", f"its input 'x{index}' is int4")) for index in range(3)
    ]
    refusals.append(Refusal("Conv", "n9", Reason("input-float", "its input 'x9' is float")))
    show_refusals(Printer(), refusals)
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()[2:4]]
    texts = [[text.strip() for text in row if text.strip()] for row in rows]
    assert texts == [
        ["3", "Conv", "its input 'x0' is int4", "type-of-codes", "n0"],
        ["1", "Conv", "its input 'x9' is float", "input-float", "n9"],
    ]
    show_refusals(Printer(), refusals, verbose=True)
    assert "its input 'x2' is int4" in capsys.readouterr().out


def test_json_of_other_types() -> None:
    values = {"a": float("inf"), "b": (float("nan"), -float("inf")), "c": Path("x"), 4: {1}, "f": 1.5}
    assert json_values(values) == {"a": "inf", "b": ["nan", "-inf"], "c": "x", "4": [1], "f": 1.5}
    assert json.loads(to_json(values)) == json_values(values)
