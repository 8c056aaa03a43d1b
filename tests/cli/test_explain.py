"""``sbonnx explain`` and ``sbonnx doctor``."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sbonnx import runtime
from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.cli.about.explain import _general
from sbonnx.errors import DeviceError
from sbonnx.heads.protect import REASON as HEAD
from sbonnx.lint import RULES
from sbonnx.patterns import FUSE, SIMPLIFY
from sbonnx.plan.modes import CONVOLUTION
from sbonnx.recipe.loading import all_keys
from sbonnx.report.reasons import REASONS, reason_of
from tests.support.reason_texts import reason_texts

MODEL = str(digits().model)


def explained(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["explain", *words, "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def test_every_rule_key_and_pattern() -> None:
    kinds: dict[str, list[str]] = {
        "lint rule": [rule.id for rules in RULES.values() for rule in rules],
        "pattern": [pattern.name for pattern in (*SIMPLIFY, *FUSE)],
        "of the recipe": list(all_keys()),
    }
    for kind, subjects in kinds.items():
        for subject in subjects:
            value = _general(subject.lower())
            assert kind in value["kind"]
            assert value["subject"] == subject


def test_a_key_has_its_default_values_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    value = explained(["observer"], capsys)
    assert (value["subject"], value["default"], value["option"]) == (
        "A.OBSERVER.TYPE",
        "mse; virtual: minmax",
        ["--observer"],
    )
    assert "kl_histogram" in value["values"]
    assert main(["explain", "T04"]) == 0
    assert "must hold  QuantizeLinear specifies the type" in capsys.readouterr().out


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
    ("text", "code"),
    [
        ("it would be slower in integers: about 24 µs a sample, in float 29", "R02"),
        ("float16 has no integer kernels on onnxruntime's CPU", "R10"),
        ("a group has 1 input and 1 output channels; TensorRT's integer kernels want multiples of 4", "R03"),
        ("'850': 5 scales are raised to 6.1e-05", "R12"),
        ("r04", "R04"),
    ],
)
def test_the_text_of_a_reason(text: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = explained([text], capsys)
    assert found["subject"] == code and found["meaning"] and found["fix"]


def test_reasons_have_a_page_and_one_code() -> None:
    assert len({reason.code for reason in REASONS}) == len(REASONS)
    for reason in REASONS:
        assert (Path(__file__).parents[2] / reason.page).is_file(), reason.code


def test_a_refusal_names_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(["node_linear", "--model", MODEL, "--exclude", "node_linear"], capsys)
    assert any(text.endswith("(R04)") for text in found["not_done"])


OTHER_REASONS = (*CONVOLUTION.values(), HEAD.format("head"), "it would be slower in integers: its kernel takes about 9")
"""Reasons that are module constants, or that a function returns by name of the node."""


@pytest.mark.parametrize("text", [*reason_texts(), *OTHER_REASONS])
def test_every_reason_of_a_plan_is_explained(text: str) -> None:
    """A new reason needs an entry in `REASONS`, whose pattern finds it."""
    assert reason_of(text) is not None


def test_reasons_are_found_in_the_source() -> None:
    """At every place where a plan or a scale refuses something."""
    functions = {where.rpartition(" ")[2] for where in reason_texts().values()}
    assert functions >= {"_at_linear", "_obstacles", "_gemm", "quantizable", "weight", "slow_linear", "unfit", "tie"}
