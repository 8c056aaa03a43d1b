"""Files are executed in the runtime of their backend, if it is installed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

import sbonnx
from sbonnx.assets import digits
from sbonnx.backends import BACKENDS, ExecutedLayer
from sbonnx.errors import ModelError
from sbonnx.report import Report
from sbonnx.verify.kernel_count import count_layers
from tests.support.extras import needs_openvino


def quantized() -> Report:
    files = digits()
    return sbonnx.quantize(files.model, files.calib, backend="openvino", split=32)


@needs_openvino
def test_reports_are_of_the_runtime() -> None:
    report = quantized()
    assert report.metrics["runtime"] == "openvino"
    assert report.metrics["kernels"]["share"] == 1.0
    assert report.metrics["kernels"]["integer"]["Convolution"] >= 2
    assert report.metrics["latency_ratio"] > 0
    assert min(output["sqnr_db"] for output in report.metrics["outputs"]) > 25
    assert not any("onnxruntime only" in note for note in report.notes)


def test_a_runtime_that_is_absent_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS["openvino"]
    assert backend.runtime is not None
    absent = replace(backend.runtime, absent=lambda: "OpenVINO is not installed: pip install it")
    monkeypatch.setitem(BACKENDS, "openvino", replace(backend, runtime=absent))
    report = quantized()
    assert report.metrics["runtime"] == "onnxruntime"
    assert "the file was executed in onnxruntime only. OpenVINO is not installed: pip install it" in report.notes
    assert "faster" not in report.verdict.text and "slower" not in report.verdict.text


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
