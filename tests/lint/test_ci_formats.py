"""Findings as annotations of GitHub, JUnit XML and SARIF."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.linting import Finding, rules_for
from sbonnx.linting.ci_formats import github, junit

RULES = rules_for("tensorrt@10")
FINDINGS = [
    Finding("T02", "error", "n,1", "t", "50 % of\nit: <x>", "do y"),
    Finding("T03", "warning", "", "", "why", "do z"),
]


def test_github_escapes_like_the_toolkit() -> None:
    """Escapes of actions/toolkit, `packages/core/src/command.ts`: % CR LF in messages, : and , in properties too."""
    first, second = github(FINDINGS, Path("a,b/m.onnx")).split("\n")
    assert first == ("::error file=a%2Cb/m.onnx,title=sbonnx T02::n,1 / t: 50 %25 of%0Ait: <x>. To fix it: do y.")
    assert second == "::warning file=a%2Cb/m.onnx,title=sbonnx T03::why. To fix it: do z."


def test_junit_has_a_case_per_rule() -> None:
    root = ElementTree.fromstring(junit(FINDINGS, RULES, Path("m.onnx"), "tensorrt@10"))
    cases = {case.attrib["name"].partition(":")[0]: case for case in root.iter("testcase")}
    assert list(cases) == [rule.id for rule in RULES]
    (suite,) = root
    assert (suite.get("tests"), suite.get("failures")) == (str(len(RULES)), "1")
    failures = {name for name, case in cases.items() if case.find("failure") is not None}
    assert failures == {"T02"}
    assert "error: n,1 / t: 50 % of\nit: <x>" in (cases["T02"].findtext("failure") or "").replace("\\x0a", "\n")
    assert "warning: why" in (cases["T03"].findtext("system-out") or "")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else on stdout; SARIF is that of --sarif."""
    model, file = str(digits().model), tmp_path / "r.sarif"
    words = ["lint", model, "--target", "trt@10"]
    assert main([*words, "--output-format", "sarif", "--sarif", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    assert main([*words, "--output-format", "junit"]) == 0
    assert ElementTree.fromstring(capsys.readouterr().out).tag == "testsuites"
    assert main([*words, "--output-format", "github"]) == 0
    assert capsys.readouterr().out == ""
    assert main([*words, "--json"]) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--output-format", "json"]) == 0
    assert capsys.readouterr().out == plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output-format", "xml"], "--output-format 'xml' is not known: choose one of text, json,"),
        (["--output-format", "junit", "--json"], "--json and --output-format junit are two forms: drop one"),
    ],
)
def test_bad_formats(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(digits().model), "--target", "trt@10", *words]) == 2
    assert message in capsys.readouterr().err
