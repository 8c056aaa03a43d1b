"""``sbonnx lint``: exit codes, tables, JSON and SARIF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.linting import RULES, TARGETS, rules_for
from sbonnx.linting.fix import FIXES
from tests.lint.seeded import CASES
from tests.support.models import model, residual
from tests.support.qdq_models import Net


def net(scale: float = 0.05, output: bool = True) -> onnx.ModelProto:
    """Pair, convolution, pair. A scale of 0 is an error; without the pair at its end the model gets a warning."""
    made = Net()
    y = made.conv(made.pair("x", scale))
    return made.done(made.pair(y) if output else y)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return saved(tmp_path / "clean.onnx", net())


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return saved(tmp_path / "slow.onnx", net(output=False))


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    return saved(tmp_path / "wrong model.onnx", net(scale=0.0))


def saved(path: Path, model: onnx.ModelProto) -> Path:
    onnx.save(model, str(path))
    return path


def lint(path: Path, *arguments: str, target: str = "onnxruntime") -> int:
    return main(["lint", str(path), "--target", target, *arguments])


def test_clean_model(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(clean) == 0
    count = len(rules_for("onnxruntime"))
    assert capsys.readouterr().out == f"{clean} for onnxruntime: {count} rules, 0 errors, 0 warnings, 0 info\n"


def test_warnings_do_not_fail(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(slow) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("0 errors, 1 warning, 0 info")
    assert "O17" in out


def test_errors_fail(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(wrong) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("1 error, 0 warnings, 0 info")
    assert "O01" in out
    assert lint(wrong, "--quiet") == 1
    assert capsys.readouterr() == ("", "")


def test_the_target_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its version; without one it is the newest."""
    feed, file = {"x": np.ones((1, 3, 8, 8), np.float32) + np.eye(8, dtype=np.float32)}, tmp_path / "trt.onnx"
    for backend in ("tensorrt@11", "tensorrt@10"):
        sbonnx.quantize(residual(), [feed], file, backend=backend, verify=False, force=True)
        assert main(["lint", str(file)]) in (0, 1)
        assert capsys.readouterr().out.startswith(f"{file} for {backend}: ")


def test_json(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(wrong, "--json") == 1
    value = json.loads(capsys.readouterr().out)
    assert value["target"] == "onnxruntime"
    assert value["counts"] == {"error": 1, "warning": 0, "info": 0}
    (one,) = value["findings"]
    assert one.keys() == {"rule", "severity", "node", "tensor", "why", "mend"}
    assert (one["rule"], one["severity"]) == ("O01", "error")


@pytest.mark.parametrize("target", TARGETS)
def test_float_model_for_every_target(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(digits().model, "--json", target=target) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["error"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "tensorflow"], "choose one of tensorrt@11"),
        ([], "--target is missing"),
        (["--target", "onnxruntime", "--sarif", "nowhere/x.sarif"], "there is no folder"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lint", str(clean), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_file_that_is_not_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    for path in (tmp_path / "bad.onnx", tmp_path / "absent.onnx"):
        assert lint(path) == 2
        assert "ModelError" in capsys.readouterr().err


# --- SARIF ------------------------------------------------------------------------------------------------------------


def check_sarif(value: dict[str, Any], target: str) -> list[dict[str, Any]]:
    """Check the rules of SARIF 2.1.0 for the parts that are written; return the results."""
    assert value["version"] == "2.1.0"
    assert value["$schema"].endswith("sarif-2.1.0.json")
    (run,) = value["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "sbonnx"
    assert [rule["id"] for rule in driver["rules"]] == [rule.id for rule in rules_for(target)]
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["help"]["text"]
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] == driver["rules"][result["ruleIndex"]]["defaultConfiguration"]["level"]
        assert result["message"]["text"]
        (location,) = result["locations"]
        place = location["physicalLocation"]["artifactLocation"]
        assert run["artifacts"][place["index"]]["location"]["uri"] == place["uri"]
        assert " " not in place["uri"]
        for one in location.get("logicalLocations", ()):
            assert one["fullyQualifiedName"]
            assert one["kind"] == "element"
    results: list[dict[str, Any]] = run["results"]
    return results


def test_sarif(wrong: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "found.sarif"
    assert lint(wrong, "--sarif", str(target)) == 1
    assert f"written: {target}" in capsys.readouterr().out
    (one,) = check_sarif(json.loads(target.read_text()), "onnxruntime")
    assert (one["ruleId"], one["level"]) == ("O01", "error")
    assert one["locations"][0]["logicalLocations"][0]["name"] in one["message"]["text"]
    assert one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("/wrong%20model.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.sarif", "wrong model.onnx"]


@pytest.mark.parametrize("target", TARGETS)
def test_sarif_of_each_target(target: str, slow: Path, tmp_path: Path) -> None:
    code = lint(slow, "--sarif", str(tmp_path / "found.sarif"), "--quiet", target=target)
    results = check_sarif(json.loads((tmp_path / "found.sarif").read_text()), target)
    assert code == any(result["level"] == "error" for result in results)


def test_sarif_is_not_overwritten_without_force(
    slow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = Path(slow.name)
    assert lint(relative, "--sarif", "found.sarif") == 0
    before = json.loads(Path("found.sarif").read_text())
    assert before["runs"][0]["artifacts"][0]["location"]["uri"] == slow.name
    capsys.readouterr()
    assert lint(relative, "--sarif", "found.sarif") == 2
    assert "--force" in capsys.readouterr().err
    assert lint(relative, "--sarif", "found.sarif", "--force") == 0


# --- --fix ------------------------------------------------------------------------------------------------------------


def signed() -> onnx.ModelProto:
    """int8 activations, which onnxruntime runs slowly: fixed by a shift."""
    made = Net()
    return made.done(made.pair(made.conv(made.pair("x", kind="int8", zero=-128))))


def test_fix_writes_and_checks_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, made = saved(tmp_path / "signed.onnx", signed()), tmp_path / "made.onnx"
    before = given.read_bytes()
    assert lint(given, "--fix", "-o", str(made)) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1] == "fixed: 1"
    assert "O11" in out
    assert f"{made} for onnxruntime" in out
    assert f"written: {made}" in out
    assert given.read_bytes() == before
    assert lint(made) == 0
    assert "O11" not in capsys.readouterr().out


def test_json_of_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, made = saved(tmp_path / "signed.onnx", signed()), tmp_path / "made.onnx"
    assert lint(given, "--fix", "-o", str(made), "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["output"] == str(made)
    assert value["findings"] == []
    (row,) = value["fixed"]
    assert row.keys() == {"rule", "node", "tensor", "what", "done", "exact"}
    assert (row["rule"], row["done"], row["exact"]) == ("O11", True, True)


def test_exit_code_by_remaining_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scale that float16 rounds to 0: only calibration can fix that."""
    wrong, made = saved(tmp_path / "wrong.onnx", CASES["T05"][0].model()), tmp_path / "made.onnx"
    assert lint(wrong, "--fix", "-o", str(made), target="tensorrt@11") == 1
    out = capsys.readouterr().out
    assert "not fixed" in out
    assert "calibration" in out
    assert made.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fix"], "-o is missing"),
        (["-o", "made.onnx"], "add --fix"),
        (["--fix", "-o", "signed.onnx", "--force"], "is an input"),
        (["--fix", "-o", "there.onnx"], "--force"),
        (["--fix", "-o", "nowhere/made.onnx"], "there is no folder"),
    ],
)
def test_outputs_of_fix(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(Path("signed.onnx"), signed())
    Path("there.onnx").write_bytes(b"kept")
    assert lint(Path("signed.onnx"), *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["signed.onnx", "there.onnx"]
    assert Path("there.onnx").read_bytes() == b"kept"


# --- the document -----------------------------------------------------------------------------------------------------


def table(family: str) -> str:
    """Format the rules of one target family as a Markdown table: id, severity, requirement, effect of ``--fix``."""
    rows = ["| rule | severity | what must hold | `--fix` |", "|---|---|---|---|"]
    for rule in RULES[family]:
        fixes = [fix.title for fix in FIXES[family] if rule.id in fix.rules]
        only = f" ({', '.join(rule.versions)})" if rule.versions else ""
        rows.append(f"| {rule.id} | {rule.severity} | {rule.title}{only} | {'; '.join(fixes) or '-'} |")
    return "\n".join(rows)


@pytest.mark.parametrize("family", RULES)
def test_document_lists_the_rules(family: str) -> None:
    """When this fails: replace the table in docs/lint.md by the text of `table(family)`."""
    assert table(family) in (Path(__file__).resolve().parents[2] / "docs" / "lint.md").read_text()


def test_a_float_model_has_nothing_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    from sbonnx.assets import digits

    assert main(["lint", str(digits().model), "--target", "ort"]) == 0
    assert "note: the model has no Q/DQ pairs and no integer operators" in capsys.readouterr().out


def test_a_model_with_quantized_weights_alone_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has DequantizeLinear nodes only."""
    text = "agraph (float[2,4] x) => (float[2,3] y) { w = DequantizeLinear (codes, scale) y = MatMul (x, w) }"
    onnx.save(model(text, codes=np.ones((4, 3), np.int8), scale=np.float32(0.1)), tmp_path / "w.onnx")
    assert main(["lint", str(tmp_path / "w.onnx"), "--target", "ort"]) == 0
    assert "no Q/DQ pairs" not in capsys.readouterr().out
