"""QUANTIZER.TYPE of a recipe decides what is trained, for a side and for single layers; without training it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx import quantize
from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.quant_model import QuantModel
from sbonnx.recipe.names import LEARNED
from tests.support.models import run

torch = pytest.importorskip("torch")

from sbonnx import qat  # noqa: E402
from sbonnx.graph.query import node_by_name  # noqa: E402
from sbonnx.qat.fakequant import METHODS, FakeQuant  # noqa: E402
from sbonnx.qat.fakequant.methods import ParameterizedClipping  # noqa: E402
from sbonnx.qat.module import origin_of  # noqa: E402

MODEL = digits().model
IMAGES = {"image": np.load(digits().calib)["image"][:16]}


def recipe(weights: str, activations: str, **sides: Any) -> dict[str, Any]:
    wishes: dict[str, Any] = {"BACKEND": "virtual", "SCHEDULE.FUSE_BN": True, "FIRST_BITS": 8, "LAST_BITS": 8}
    wishes["W"] = {"QUANTIZER": {"TYPE": weights, "BIT": 4}, **sides.get("W", {})}
    wishes["A"] = {"QUANTIZER": {"TYPE": activations, "BIT": 4}, **sides.get("A", {})}
    return wishes


def methods(module: Any) -> dict[str, str]:
    """The class of the fake-quant module of each tensor."""
    return {part.name: type(part).__name__ for part in module.modules() if isinstance(part, FakeQuant)}


def test_the_names_are_those_of_the_training_methods() -> None:
    assert {*LEARNED, "uniform"} == set(METHODS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("weights", "activations", "classes"),
    [
        ("lsq", "lsq", {"Lsq"}),
        ("lsq", "lsq+", {"Lsq", "LsqPlus"}),
        ("LSQ_plus", "lsq_plus", {"LsqPlus"}),
        ("DoReFa", "pact", {"DoReFa", "ParameterizedClipping"}),
        ("dorefa", "dorefa", {"DoReFa"}),
        ("adaround", "lsq", {"Lsq"}),
    ],
)
def test_a_recipe_is_trained_and_written(weights: str, activations: str, classes: set[str], tmp_path: Path) -> None:
    path = tmp_path / "q.onnx"
    module = qat.prepare(MODEL, IMAGES, recipe(weights, activations), rounding="nearest")
    assert set(methods(module).values()) == classes
    before = {name: value.clone() for name, value in module.state_dict().items()}
    qat.train(module, IMAGES, epochs=1, batch=16)
    assert any(not torch.equal(before[name], value) for name, value in module.state_dict().items())
    report = qat.export(module, path, IMAGES)
    assert not [refusal for refusal in report.refusals if refusal.what == "learn scales"], "it was done"
    (output,) = run(str(path), IMAGES).values()
    assert np.isfinite(output).all()


def test_layers_have_types_of_their_own() -> None:
    """By SPECIFIC; ALPHA_VALUE is where pact starts; an argument of `prepare` stands above all of it."""
    first = next(node.name for node in onnx.load(str(MODEL)).graph.node if node.op_type == "Conv")
    weights = {"SPECIFIC": [{"op:Gemm": ["QUANTIZER.TYPE", "dorefa"], first: ["QUANTIZER.TYPE", "uniform"]}]}
    activations = {"SPECIFIC": [{"op:Gemm": ["QUANTIZER.TYPE", "pact", "QUANTIZER.PACT.ALPHA_VALUE", 3]}]}
    wishes = recipe("lsq", "lsq+", W=weights, A=activations)
    module = qat.prepare(MODEL, IMAGES, wishes, rounding="nearest")
    found, nodes = methods(module), node_by_name(origin_of(module).prepared.graph)
    for site in origin_of(module).prepared.plan.sites:
        gemm = any(nodes[reader.node].op == "Gemm" for reader in site.readers)
        if site.role == "weight":
            others = "Uniform" if site.readers[0].node == first else "Lsq"
            assert found[site.key] == ("DoReFa" if gemm else others)
        elif site.role == "activation":
            assert found[site.key] == ("ParameterizedClipping" if gemm else "LsqPlus")
    (pact,) = [part for part in module.modules() if isinstance(part, ParameterizedClipping)]
    assert float(pact.alpha.detach()) == 3.0
    overruled = methods(qat.prepare(MODEL, IMAGES, wishes, weights="lsq", activations="lsq", rounding="nearest"))
    assert set(overruled.values()) == {"Lsq"}


def test_without_training_the_observer_is_used_and_the_report_says_so(tmp_path: Path) -> None:
    """PTQ writes the same file as with `uniform`, and logs one line for each side that says how to train."""
    made = {}
    for kind in ("uniform", "lsq"):
        path = tmp_path / f"{kind}.onnx"
        report = quantize(MODEL, IMAGES, recipe=recipe(kind, kind), output=path, rounding="nearest", verify=False)
        said = [refusal for refusal in report.refusals if refusal.what == "learn scales"]
        assert [refusal.where for refusal in said] == (
            [] if kind == "uniform" else ["W.QUANTIZER.TYPE", "A.QUANTIZER.TYPE"]
        )
        assert all("sbonnx qat" in refusal.why for refusal in said)
        made[kind] = path.read_bytes()
    assert made["uniform"] == made["lsq"]


def test_the_command_trains_by_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", **IMAGES)
    Path("lsq.yaml").write_text(json.dumps(recipe("lsq", "lsq")))
    line = ["qat", str(MODEL), "--data", "data.npz", "-o", "q.onnx", "--recipe", "lsq.yaml", "--epochs", "1", "--quiet"]
    line += ["--set", "rounding=nearest", "--no-verify"]
    assert main(line) == 0, capfd.readouterr().err
    (output,) = run("q.onnx", IMAGES).values()
    assert np.isfinite(output).all()


def test_two_layers_that_read_one_tensor_ask_for_different_methods(tmp_path: Path) -> None:
    from tests.ancestor.networks import residual_block

    images = {"x": np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)}
    wishes = recipe("lsq", "lsq", A={"SPECIFIC": [{"/skip/Conv": ["QUANTIZER.TYPE", "lsq+"]}]}) | {"FIRST_BITS": "w4a4"}
    with QuantModel(residual_block(), wishes) as model:
        model.prepare_calibration()
        model(images)
        model.calc_qparams()
        module = model.init_QAT()
    report = qat.export(module, tmp_path / "q.onnx", images)
    (said,) = [refusal for refusal in report.refusals if refusal.what == "train with lsq+"]
    assert said.where == "x" and "'/skip/Conv' reads the same tensor as '/conv1/Conv'" in said.why
