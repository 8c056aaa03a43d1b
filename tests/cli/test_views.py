"""``inspect``, ``plan``, ``recipe`` and ``simplify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx import recipe as recipes
from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.planning import from_dict
from tests.support.models import batchnorm, model, run

MODEL = str(digits().model)

WITH_BN = """
agraph (float[N,3,8,8] x) => (float[N,4,8,8] y) {
    i = Identity(x)
    c = Conv <kernel_shape = [1,1]> (i, w)
    n = BatchNormalization(c, n_gamma, n_beta, n_mean, n_var)
    y = Relu(n)
}"""


def with_bn() -> onnx.ModelProto:
    weights: dict[str, Any] = batchnorm("n", 4)
    return model(WITH_BN, w=(4, 3, 1, 1), **weights)


# --- inspect -------------------------------------------------------------------------------------------------------


def test_inspect_agrees_with_onnx(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", MODEL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    proto = onnx.load(MODEL)
    assert found["opset"] == proto.opset_import[0].version
    assert found["bytes"] == Path(MODEL).stat().st_size
    assert found["nodes"] == sum(node.op_type != "Constant" for node in proto.graph.node)  # those are parameters
    assert found["ops"]["Conv"] == sum(node.op_type == "Conv" for node in proto.graph.node)
    assert [one["name"] for one in found["inputs"]] == ["image"]
    assert found["inputs"][0]["shape"] == ["batch", 1, 8, 8]
    read = {name for node in proto.graph.node for name in node.input}
    tensors = [tensor for tensor in proto.graph.initializer if tensor.name in read]
    tensors += [attribute.t for node in proto.graph.node if node.op_type == "Constant" for attribute in node.attribute]
    assert found["parameters"] == sum(int(np.prod(tensor.dims)) for tensor in tensors)
    assert found["qdq"] == []


def test_inspect_prints_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", MODEL, "--verbose"]) == 0
    tables = capsys.readouterr().out
    assert main(["inspect", MODEL]) == 0
    lines = capsys.readouterr().out
    for word in ("opset", "parameters", "(batch, 1, 8, 8)", "Conv"):
        assert word in tables and word in lines
    assert "BatchNormalization" in tables


def test_inspect_sees_branches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
    agraph (bool c, float[2] x) => (float[2] y) {
        y = If (c) <
            then_branch = a () => (float[2] p) { p = Relu(x) },
            else_branch = b () => (float[2] q) { q = Neg(x) }
        >
    }"""
    onnx.save(model(text), str(tmp_path / "m.onnx"))
    assert main(["inspect", str(tmp_path / "m.onnx"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(found["branches"].values()) == [1, 1]
    assert found["nodes"] == 3
    assert found["ops"] == {"If": 1, "Neg": 1, "Relu": 1}


# --- plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "virtual"])
def test_plan_shows_every_site_and_refusal(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    command = ["plan", MODEL, "--backend", backend, "--set", "EXCLUDE=[op:Gemm]"]
    assert main([*command, "-v", "-o", str(target)]) == 0
    out = capsys.readouterr().out
    plan = from_dict(json.loads(target.read_text()))
    assert plan.backend == backend
    assert plan.sites
    lines = out.splitlines()
    for site in plan.sites:
        assert any(line.startswith(site.tensor) and line.endswith(site.why) for line in lines)
    if backend != "tensorrt":  # where a product of 10 columns stays float for its own reason
        assert any("EXCLUDE" in refusal.why for refusal in plan.refusals)
    for refusal in plan.refusals:
        assert any(refusal.why in line and line.rstrip().endswith(refusal.where) for line in lines)
    assert main(command) == 0
    shorter = capsys.readouterr().out.splitlines()
    for refusal in plan.refusals:
        kinds = {other.what for other in plan.refusals if other.why == refusal.why}
        assert sum(refusal.why in line for line in shorter) <= len(kinds)
    assert not plan.refusals or any(plan.refusals[0].why in line for line in shorter)
    assert main([*command, "--json"]) == 0
    assert from_dict(json.loads(capsys.readouterr().out)) == plan
    assert json.loads(target.read_text()) == json.loads(json.dumps(plan.to_dict()))


# --- recipe --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "virtual"])
def test_the_printed_default_is_the_default(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "--backend", backend]) == 0
    path = tmp_path / "r.yaml"
    path.write_text(capsys.readouterr().out)
    assert recipes.load(path) == recipes.load(None, backend=backend)


def test_a_recipe_resolved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("BACKEND: virtual\nW: {QUANTIZER: {BIT: 4}, SPECIFIC: [{conv1*: [QUANTIZER.BIT, 8]}]}\n")
    assert main(["recipe", str(path), "--set", "A.QUANTIZER.BIT=6"]) == 0
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(capsys.readouterr().out)
    assert recipes.load(resolved) == recipes.load(path, overrides={"a_bit": 6})
    assert main(["recipe", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["W"]["QUANTIZER"]["BIT"] == 4


def test_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"BACKEND", "W", "A", "SCHEDULE"} <= schema["properties"].keys()


# --- simplify ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "left"), [([], ["Conv", "Relu"]), (["--no-fuse"], ["Conv", "BatchNormalization", "Relu"])]
)
def test_simplify(flags: list[str], left: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "m.onnx", tmp_path / "s.onnx"
    onnx.save(with_bn(), str(source))
    assert main(["simplify", str(source), "-o", str(target), *flags, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [node.op_type for node in onnx.load(str(target)).graph.node] == left
    assert (value["nodes_before"], value["nodes_after"]) == (4, len(left))
    assert ("fuse_bn" in {one["pattern"] for one in value["applied"]}) == (not flags)
    x = np.random.default_rng(9).standard_normal((3, 3, 8, 8)).astype(np.float32)
    before, after = (run(str(path), {"x": x})["y"] for path in (source, target))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)


def test_simplify_prints_applied_patterns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "m.onnx", tmp_path / "s.onnx"
    onnx.save(with_bn(), str(source))
    np.savez(tmp_path / "d.npz", x=np.ones((2, 3, 8, 8), np.float32))
    assert main(["simplify", str(source), "-o", str(target), "--data", str(tmp_path / "d.npz")]) == 0
    out = capsys.readouterr().out
    for word in ("4 -> 2", "fuse_bn", "outputs against the original", f"written: {target}"):
        assert word in out


def test_simplify_without_usable_feeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No guess of a dynamic axis is accepted by the model, but the data are."""
    source, target = tmp_path / "m.onnx", tmp_path / "s.onnx"
    text = "agraph (float[N,L] x) => (float[N,3] y) { i = Identity(x) y = MatMul(i, w) }"
    onnx.save(model(text, w=(7, 3)), str(source))
    command = ["simplify", str(source), "-o", str(target), "--quiet"]
    assert main(command) == 1
    err = capsys.readouterr().err
    assert "not verified" in err
    assert "--data" in err
    assert len(err.splitlines()) == 1
    np.savez(tmp_path / "d.npz", x=np.ones((2, 7), np.float32))
    assert main([*command, "--force", "--data", str(tmp_path / "d.npz")]) == 0
