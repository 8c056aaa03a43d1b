"""TensorRT's rules: each found where it is broken, and nowhere else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx.errors import ModelError, RecipeError
from sbonnx.linting import RULES, TARGETS, Finding, lint
from tests.lint.seeded import ASIDE, CASES, CONV, MORE, SCORES, Case
from tests.support.models import residual

TENSORRT = [target for target in TARGETS if target.startswith("tensorrt")]


INFORM = {"P15", *ASIDE}
"""Said of most models: what a DLA would want, and which channels fill a kernel."""


def found(case: Case, rule: str) -> list[Finding]:
    """Findings, without what is said of most models."""
    return [one for one in lint(case.model(), case.target) if one.rule == rule or one.rule not in INFORM]


def test_every_rule_has_a_seeded_model() -> None:
    assert list(CASES) == [rule.id for rule in RULES["tensorrt"] if rule.id not in ASIDE]


@pytest.mark.parametrize("rule", ASIDE)
def test_what_only_informs_is_said_once(rule: str) -> None:
    bad, clean = ASIDE[rule]
    (one,) = [one for one in lint(bad.model(), bad.target) if one.rule == rule]
    assert one.severity == "info"
    assert rule not in {one.rule for one in lint(clean.model(), clean.target)}


def test_asymmetric_codes_for_a_dla_came_with_its_flag() -> None:
    bad, _ = ASIDE["T02-dla"]
    assert [target for target in TENSORRT if "T02-dla" in {one.rule for one in lint(bad.model(), target)}] == [
        "tensorrt@11",
        "tensorrt@10",
    ]


@pytest.mark.parametrize("rule", CASES)
def test_a_seeded_fault_is_found_by_its_rule_alone(rule: str) -> None:
    bad, clean = CASES[rule]
    findings = found(bad, rule)
    assert {one.rule for one in findings} == {rule}, findings
    names = {node.name for node in bad.model().graph.node}
    assert all(one.node in names or rule == "T14-newest" for one in findings)
    assert all(one.why and one.mend for one in findings)
    assert not found(clean, rule)


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule, cases in MORE.items() for case in cases])
def test_other_ways_to_break_a_rule(rule: str, case: Case) -> None:
    assert rule in {one.rule for one in lint(case.model(), case.target)}


def test_a_pair_counts_once() -> None:
    bad, _ = CASES["T02"]
    assert [one.node for one in lint(bad.model(), "tensorrt@11") if one.rule not in INFORM] == ["d_c"]


def test_versions_differ() -> None:
    """int4 came with 10, opset 21 is more than 8.6 is documented for, and half precision is typed since 11."""
    blocks = CASES["T11"][1].model()
    rules = {target: {one.rule for one in lint(blocks, target)} - INFORM for target in TENSORRT}
    assert rules == {"tensorrt@11": set(), "tensorrt@10": set(), "tensorrt@8.6": {"T03", "T14-newest"}}
    cast = CASES["T19"][0].model()
    assert not {one.rule for one in lint(cast, "tensorrt@10")} - INFORM


def test_files_graphs_and_models_are_read_alike(tmp_path: Path) -> None:
    bad, _ = CASES["T05"]
    onnx.save(bad.model(), str(tmp_path / "m.onnx"))
    graph = graphs.load(bad.model(), opset=1)
    before = graphs.digest(graph)
    findings = lint(tmp_path / "m.onnx", "tensorrt@11")
    assert findings == lint(graph, "tensorrt@11") == lint(bad.model(), "tensorrt@11")
    assert graphs.digest(graph) == before
    assert json.loads(json.dumps(findings[0].to_dict()))["rule"] == "T05"


def test_a_float_model_has_nothing_to_say() -> None:
    assert all(not lint(residual(), target) for target in TENSORRT)


def test_dynamic_shapes_and_unknown_ones_are_no_fault() -> None:
    proto = CONV.model()
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    assert not {one.rule for one in lint(proto, "tensorrt@11")} - INFORM


def test_attention_with_both_factors_quantized_is_clean() -> None:
    assert not {one.rule for one in lint(SCORES.model(), "tensorrt@11")} - INFORM


def test_shape_arithmetic_is_not_quantization() -> None:
    """A Clip of int64 sizes beside a quantized conv."""
    case = CONV.but(("y = Conv", "n = Shape(x)\nk = Clip(n, one)\nv = Conv"), one=np.array(1, np.int64))
    case = replace(case, body=case.body + "y = Reshape(v, k)")
    assert not {one.rule for one in lint(case.model(), "tensorrt@11")} - INFORM


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="tensorrt@11"):
        lint(CONV.model(), "tensorrt@9")
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"m\.onnx"):
        lint(tmp_path / "m.onnx", "tensorrt@11")


def test_our_output_is_clean() -> None:
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(3)]
    report = sbonnx.quantize(residual(), feeds, backend="tensorrt", verify=False)
    assert report.quantized is not None
    for target in TENSORRT:
        assert not [one for one in lint(report.quantized, target) if one.severity == "error"]
