"""A quantized model is refused, or made float again first: then the result is as good as from the float model."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.errors import ModelError
from sbonnx.metrics import sqnr_db
from sbonnx.pipeline import prepare
from sbonnx.quant_model import QuantModel
from sbonnx.recipe.names import Mode
from sbonnx.spec import Array
from sbonnx.stages.state import read_recipe
from tests.qdq.test_from_qoperator import Reader, images, product
from tests.support.models import model, residual, run

BACKENDS = ("onnxruntime", "tensorrt", "virtual")


def quantized(source: Any, backend: str, **overrides: Any) -> onnx.ModelProto:
    report = sbonnx.quantize(source, images(), recipe={"BACKEND": backend}, verify=False, **overrides)
    assert report.quantized is not None
    return report.quantized


def sites(source: Any, backend: str, **overrides: Any) -> Counter[tuple[str, str]]:
    """What would be quantized, by role and tensor."""
    recipe, rules = read_recipe(None, backend, overrides)
    return Counter((site.role, site.tensor) for site in prepare(source, recipe, rules).plan.sites)


def quality(made: onnx.ModelProto) -> float:
    """Signal to noise of the logits against the float model, in dB."""
    rows = [(run(residual(), feed)["y"], run(made, feed)["y"]) for feed in images()]
    expected, found = (np.concatenate(side) for side in zip(*rows, strict=True))
    return float(sqnr_db(expected, found))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quantized_model_is_refused_with_a_way_on(backend: str) -> None:
    made = quantized(residual(), backend)
    named = {f"'{node.name}' ({node.op_type} of '{node.input[0]}')" for node in made.graph.node}
    with pytest.raises(ModelError) as caught:
        quantized(made, backend)
    said = str(caught.value)
    assert any(f"first at {name}" in said for name in named)
    assert "--requantize (requantize=True)" in said
    assert "\n" not in said


@pytest.mark.parametrize("backend", BACKENDS)
def test_requantizing_finds_the_same_sites_and_quality(backend: str) -> None:
    made = quantized(residual(), backend)
    assert sites(made, backend, requantize=True) == sites(residual(), backend)
    again = sbonnx.quantize(made, images(), recipe={"BACKEND": backend}, verify=False, requantize=True)
    assert again.quantized is not None
    pairs = sum(node.op_type == "DequantizeLinear" for node in made.graph.node)
    assert f"pairs of an earlier quantization removed: {pairs}" in again.notes
    assert Counter(node.op_type for node in again.quantized.graph.node) == Counter(
        node.op_type for node in made.graph.node
    )
    assert quality(again.quantized) > quality(made) - 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", BACKENDS)
def test_from_one_runtime_to_another(first: str) -> None:
    for second in BACKENDS:
        made = quantized(quantized(residual(), first), second, requantize=True)
        # what the first one rounded and the second leaves float stays rounded
        assert quality(made) > quality(quantized(residual(), second)) - 6


def test_weights_alone_are_a_quantized_model_too() -> None:
    text = "agraph (float[3,64] x) => (float[3,8] y) {\n w = DequantizeLinear (c, s)\n y = MatMul (x, w)\n}"
    codes = np.random.default_rng(0).integers(-99, 99, (64, 8)).astype(np.int8)
    proto = model(text, c=codes, s=np.float32(0.01))
    data = [{"x": np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)}]
    with pytest.raises(ModelError, match=r"quantized already, first at .* \(DequantizeLinear of 'c'\)"):
        sbonnx.quantize(proto, data, verify=False)
    report = sbonnx.quantize(proto, data, verify=False, requantize=True)
    assert report.counts.weights == 1
    assert report.counts.activations == 1


@pytest.mark.parametrize("form", ["qdq", "qoperator", "dynamic"])
def test_what_onnxruntime_quantized(form: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    source, target = tmp_path / "f.onnx", tmp_path / "q.onnx"
    dynamic = form == "dynamic"
    onnx.save(product() if dynamic else residual(), str(source))
    data = images()
    if dynamic:
        data = [{"x": np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)}]
        quantization.quantize_dynamic(str(source), str(target))
    else:
        kind = quantization.QuantFormat.QDQ if form == "qdq" else quantization.QuantFormat.QOperator
        quantization.quantize_static(str(source), str(target), Reader(data), quant_format=kind)
    with pytest.raises(ModelError, match="quantized already"):
        sbonnx.quantize(target, data, verify=False)
    report = sbonnx.quantize(target, data, verify=False, requantize=True)
    assert report.quantized is not None
    assert ("integer operators written as float ones" in " ".join(report.notes)) == (form != "qdq")
    expected = [run(str(source), feed)["y"] for feed in data]
    found = [run(report.quantized, feed)["y"] for feed in data]
    assert sqnr_db(np.concatenate(expected), np.concatenate(found)) > 20


def test_our_own_qoperator_form() -> None:
    made = quantized(residual(), "onnxruntime", format="qoperator")
    with pytest.raises(ModelError, match="quantized already"):
        quantized(made, "onnxruntime")
    again = quantized(made, "onnxruntime", requantize=True)
    assert quality(again) > quality(quantized(residual(), "onnxruntime")) - 4


@pytest.mark.parametrize("mode", ["dynamic", "weight_only"])
def test_our_own_dynamic_and_blocked_products(mode: Mode) -> None:
    data = [{"x": np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)}]
    made = sbonnx.quantize(product(2048), data, verify=False, mode=mode).quantized
    assert made is not None
    with pytest.raises(ModelError, match="quantized already"):
        sbonnx.quantize(made, data, verify=False)
    again = sbonnx.quantize(made, data, verify=False, requantize=True, cpu="vnni").quantized
    assert again is not None
    expected = run(product(2048), data[0])["y"]
    least = sqnr_db(expected, run(made, data[0])["y"]) - 4  # four bits, by default, where weights stand alone
    assert sqnr_db(expected, run(again, data[0])["y"]) > least


def test_pairs_that_cannot_be_removed_are_refused() -> None:
    text = """agraph (uint8[3,8] c, float[3,8] x) => (float[3,4] y, float[3,8] v) {
        v = DequantizeLinear (c, s)
        y = MatMul (x, w)
    }"""
    proto = model(text, s=np.float32(0.5), w=(8, 4))
    rng = np.random.default_rng(0)
    data = [{"c": rng.integers(0, 255, (3, 8)).astype(np.uint8), "x": rng.standard_normal((3, 8)).astype(np.float32)}]
    report = sbonnx.quantize(proto, data, verify=False, requantize=True)
    (refusal,) = [one for one in report.refusals if one.what == "remove an earlier quantization"]
    assert "computed" in refusal.why


def test_the_steps_ask_for_it_as_well() -> None:
    made = quantized(residual(), "virtual")
    with pytest.raises(ModelError, match="quantized already"):
        QuantModel(made, {"BACKEND": "virtual"})
    with QuantModel(made, {"BACKEND": "virtual", "REQUANTIZE": True}) as quant:
        assert quant.prepared.plan.sites


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "q.onnx", tmp_path / "r.onnx"
    data = ["--data", str(digits().calib), "--split", "32", "--quiet", "--no-verify"]
    assert main(["quantize", str(digits().model), "-o", str(first), *data]) == 0
    assert main(["quantize", str(first), "-o", str(second), *data]) == 2
    error = capsys.readouterr().err
    assert "--requantize" in error
    assert len(error.splitlines()) == 1
    assert not second.exists()
    assert main(["quantize", str(first), "-o", str(second), *data, "--requantize"]) == 0
    assert second.exists()
    assert main(["plan", str(first), "--quiet"]) == 2
    assert main(["plan", str(first), "--quiet", "--requantize"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "backend"), zip(["cifar_resnet20", "squeezenet11", "ultraface_rfb320"], BACKENDS, strict=True)
)
def test_real_models(net: str, backend: str, pack: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None
    assert spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    feeds = data.load_calib(net, limit=4)
    source = pack / "models" / f"{net}.onnx"
    how: dict[str, Any] = {"backend": backend, "effort": "fast", "verify": False}
    first = sbonnx.quantize(source, feeds, output=tmp_path / "1.onnx", **how)
    second = sbonnx.quantize(tmp_path / "1.onnx", feeds, output=tmp_path / "2.onnx", requantize=True, **how)
    roles = ("activations", "weights", "biases")
    assert [getattr(first.counts, role) for role in roles] == [getattr(second.counts, role) for role in roles]
    assert mean_db(source, tmp_path / "2.onnx", feeds) > mean_db(source, tmp_path / "1.onnx", feeds) - 3


def mean_db(source: Path, made: Path, feeds: Any) -> float:
    """Signal to noise of all outputs together, in dB."""
    pairs: list[tuple[Array, Array]] = []
    for feed in feeds:
        expected, found = run(str(source), feed), run(str(made), feed)
        pairs += [(expected[name].ravel(), found[name].ravel()) for name in expected]
    expected_all, found_all = (np.concatenate(side).astype(np.float64) for side in zip(*pairs, strict=True))
    return float(sqnr_db(expected_all, found_all))
