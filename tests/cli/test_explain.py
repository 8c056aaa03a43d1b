"""``sbonnx explain`` and ``sbonnx doctor``."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any

import pytest

from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.cli.about.explain import general
from sbonnx.errors import DeviceError
from sbonnx.linting import RULES
from sbonnx.patterns import FUSE, SIMPLIFY
from sbonnx.recipe.sections.whole import KEYS
from sbonnx.system import runtime

MODEL = str(digits().model)


def explained(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["explain", *words, "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def test_every_rule_key_and_pattern() -> None:
    kinds: dict[str, list[str]] = {
        "lint rule": [rule.id for rules in RULES.values() for rule in rules],
        "pattern": [pattern.name for pattern in (*SIMPLIFY, *FUSE)],
        "of the recipe": list(KEYS),
    }
    for kind, subjects in kinds.items():
        for subject in subjects:
            value = general(subject.lower())
            assert kind in value.kind
            assert value.subject == subject


def test_a_key_has_its_default_values_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    value = explained(["observer"], capsys)
    assert (value["subject"], value["default"], value["option"]) == (
        "A.OBSERVER.TYPE",
        "mse; virtual: minmax",
        ["--observer"],
    )
    assert "kl_histogram" in value["values"]
    assert main(["explain", "T04"]) == 0
    out = capsys.readouterr().out
    assert "must hold  QuantizeLinear specifies the type" in out
    assert "neither a zero point nor output_dtype" in out and "+ d_c = QuantizeLinear (x, s, z)" in out


def test_a_node_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Quantized, refused with the reason of the plan, excluded by the user, and a tensor."""
    trt = ["--model", MODEL, "--backend", "trt"]
    quantized = explained(["node_conv2d_7", *trt], capsys)
    assert [text.partition(" ")[0] for text in quantized["quantized"]] == ["cat", "head.0.weight"]
    assert main(["plan", MODEL, "--backend", "trt"]) == 0
    plan = capsys.readouterr().out
    refused = explained(["node_linear", *trt], capsys)
    assert refused["verdict"].startswith("stays float")
    assert refused["not_done"][0].removeprefix("quantize: ").removesuffix(" (R03)") in plan
    excluded = explained(["node_conv2d_7", *trt, "--exclude", "node_conv2d_7"], capsys)
    assert excluded["verdict"].startswith("stays float")
    assert excluded["quantized"] == []
    assert explained(["cat", *trt], capsys)["verdict"] == "quantized"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["roundingx"], "'roundingx' is no lint rule, recipe key, pattern or known reason. Did you mean rounding,"),
        (["node_con", "--model", MODEL], "has no node or tensor 'node_con'. Nearest: 'node_conv2d'"),
        (["x", "--model", "absent.onnx"], "'absent.onnx' does not exist"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["packages"]["numpy"] == metadata.version("numpy")
    assert value["python"].startswith(platform.python_version())
    assert "CPUExecutionProvider" in value["onnxruntime"]["providers"]
    assert 0 < value["memory"]["available"] <= value["memory"]["total"]
    assert main(["doctor"]) == 0
    assert "optional packages" in capsys.readouterr().out


def test_doctor_without_a_runtime(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise DeviceError("onnxruntime is not installed: pip install 'sbonnx[cpu]'")

    monkeypatch.setattr(runtime, "onnxruntime", absent)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "onnxruntime      not usable" in out
    assert "note: onnxruntime is not installed: pip install 'sbonnx[cpu]'" in out


@pytest.mark.parametrize(
    ("code", "name"),
    [("slower-in-integers", "R02"), ("float16-model", "R10"), ("scales-raised", "R12"), ("r04", "R04")],
)
def test_the_code_of_a_reason(code: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = explained([code], capsys)
    assert found["subject"] == name and found["meaning"] and found["fix"]


def test_a_refusal_names_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(["node_linear", "--model", MODEL, "--exclude", "node_linear"], capsys)
    assert any(text.endswith("(R04)") for text in found["not_done"])
