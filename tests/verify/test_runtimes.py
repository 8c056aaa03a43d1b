"""Files are executed in the runtime of their backend, if it is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import sbonnx
from sbonnx.assets import digits
from sbonnx.backends import BACKENDS, ExecutedLayer
from sbonnx.cli import main
from sbonnx.errors import DeviceError, ModelError, RecipeError
from sbonnx.report import Report
from sbonnx.verify.kernel_count import count_layers
from sbonnx.verify.runtimes import RECORDED, chosen_runtime
from tests.support.extras import needs_openvino
from tests.support.values import some


def quantized() -> Report:
    files = digits()
    return sbonnx.quantize(files.model, files.calib, backend="openvino", split=32)


@pytest.mark.slow
@needs_openvino
def test_reports_are_of_the_runtime() -> None:
    report = quantized()
    assert some(report.metrics).runtime == "openvino"
    assert some(some(report.metrics).kernels).share == 1.0
    assert some(some(report.metrics).kernels).integer["Convolution"] >= 2
    assert some(some(report.metrics).latency_ratio) > 0
    assert min(output.sqnr_db for output in some(report.metrics).outputs) > 25
    assert not any("onnxruntime only" in note for note in report.notes)


def test_a_runtime_that_is_absent_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS["openvino"]
    assert backend.runtime is not None
    absent = replace(backend.runtime, absent=lambda: "OpenVINO is not installed: pip install it")
    monkeypatch.setitem(BACKENDS, "openvino", replace(backend, runtime=absent))
    report = quantized()
    assert some(report.metrics).runtime == "onnxruntime"
    assert "the file was executed in onnxruntime only. OpenVINO is not installed: pip install it" in report.notes
    assert "faster" not in report.verdict.text and "slower" not in report.verdict.text


def recorded(folder: Path, backend: str | None) -> Path:
    """The digits network, as if quantized for a backend."""
    model = onnx.load(str(digits().model))
    if backend is not None:
        model.metadata_props.add(key=RECORDED, value=backend)
    path = folder / f"{backend}.onnx"
    onnx.save(model, path)
    return path


def test_files_are_executed_in_the_runtime_that_they_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, own, gone = (recorded(tmp_path, name) for name in (None, "openvino", "removed"))
    backend = BACKENDS["openvino"]
    assert backend.runtime is not None
    installed = replace(backend, runtime=replace(backend.runtime, absent=lambda: None))
    monkeypatch.setitem(BACKENDS, "openvino", installed)
    assert chosen_runtime(None, [plain, own]) == "openvino"
    assert chosen_runtime(None, [plain, gone]) == "onnxruntime"
    assert chosen_runtime(None, [own], device="cuda") == "onnxruntime"
    assert chosen_runtime("onnxruntime", [own]) == "onnxruntime"
    with pytest.raises(RecipeError, match="--device cuda is for onnxruntime, and --runtime is openvino"):
        chosen_runtime("openvino", [own], device="cuda")
    missing = replace(backend, runtime=replace(backend.runtime, absent=lambda: "OpenVINO is not installed"))
    monkeypatch.setitem(BACKENDS, "openvino", missing)
    assert chosen_runtime(None, [own]) == "onnxruntime"
    with pytest.raises(DeviceError, match="OpenVINO is not installed"):
        chosen_runtime("OpenVINO", [own])


@pytest.mark.parametrize("name", ["tensorrt", "qnn", "tflite"])
def test_backends_without_a_runtime_are_one_line(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(digits().model), "--runtime", name]) == 2
    out, err = capfd.readouterr()
    assert not out
    assert f"--runtime '{name}' is not known: choose one of onnxruntime, openvino" in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
@needs_openvino
def test_commands_execute_in_another_runtime(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files, path = digits(), tmp_path / "digits.onnx"
    sbonnx.quantize(files.model, files.calib, backend="openvino", split=32, output=path, verify=False)
    pair, labelled = [str(files.model), str(path)], ["--data", str(files.eval), "--split", "32"]

    def value(*command: str) -> dict[str, Any]:
        assert main([*command, "--json"]) == 0
        found: dict[str, Any] = json.loads(capfd.readouterr().out)
        return found

    assert value("compare", *pair, *labelled, "--samples", "2")["runtime"] == "openvino"
    assert value("compare", *pair, *labelled, "--samples", "2", "--runtime", "ort")["runtime"] == "onnxruntime"
    assert main(["compare", *pair, *labelled, "--samples", "2", "-v"]) == 0
    out = capfd.readouterr().out
    assert "(run in openvino)" in out
    assert "ratio of pairs of runs" in out, "the latency is that of the runtime that was used"
    bench = value("bench", *pair, "--seconds", "0.1")
    assert bench["runtime"] == "openvino"
    assert len(bench["rows"]) == 2
    both = value("eval", *pair, *labelled, "--metric", "top1", "--runtime", "openvino")
    assert both["runtimes"] == ["openvino", "openvino"]
    assert min(row["metric"]["value"] for row in both["rows"]) > 0.9
    assert value("eval", *pair, *labelled, "--metric", "top1")["runtimes"] == ["onnxruntime", "openvino"]


@needs_openvino
def test_a_file_that_is_no_model_is_one_line() -> None:
    runtime = BACKENDS["openvino"].runtime
    assert runtime is not None
    with pytest.raises(ModelError, match="OpenVINO refuses the model: ") as caught:
        runtime.open(b"not a model", None)
    assert "\n" not in str(caught.value)


def test_layers_are_counted_by_the_nodes_that_they_compute() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[1,4] x) => (float[1,4] y) {
            xc = QuantizeLinear(x, s, z)
            xd = DequantizeLinear(xc, s, z)
            wd = DequantizeLinear(w, s, z)
            a = MatMul(xd, wd)
            b = MatMul(a, wd)
            y = Relu(b)
        }"""
    )
    constants = {"s": np.float32(0.1), "z": np.int8(0), "w": np.ones((4, 4), np.int8)}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    layers = [ExecutedLayer("FC", frozenset({"a"}), integer=True), ExecutedLayer("FC", frozenset({"b"}), integer=False)]
    kernels = count_layers(model, layers, "Acme")
    assert (kernels.integer, kernels.floating, kernels.planned, kernels.in_integers) == ({"FC": 1}, {"FC": 1}, 2, 1)
    assert kernels.weights_in_integers == 0.5
    (row,) = kernels.float_weighted
    assert (row.node, row.why) == ("b", "its input 'a' is float")
