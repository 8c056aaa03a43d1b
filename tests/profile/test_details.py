"""Details of a result: nodes, histograms against onnxruntime and NumPy, and which tensors are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import sbonnx
from sbonnx import profiling
from sbonnx.assets import digits
from sbonnx.profiling.histograms import BINS
from sbonnx.report import Reason, Refusal
from tests.support.values import some


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits model with 3 bits, whose ranges clip."""
    path = tmp_path_factory.mktemp("details") / "q.onnx"
    sbonnx.quantize(digits().model, digits().calib, split=64, output=path, backend="virtual", bits="w3a3", verify=False)
    return path


def feeds(count: int = 3) -> list[dict[str, Any]]:
    images = np.load(digits().calib)["image"]
    return [{"image": images[8 * index : 8 * index + 8]} for index in range(count)]


def float_values(tensor: str) -> Any:
    """Values of a tensor of the original model, from onnxruntime."""
    model = onnx.load(digits().model)
    model.graph.output.append(onnx.helper.make_tensor_value_info(tensor, onnx.TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run([tensor], feed)[0].ravel() for feed in feeds()])


def pairs(path: Path) -> dict[str, tuple[float, float]]:
    """Scale and zero point of each QuantizeLinear with one scale, by its input before the Clip to 3 bits."""
    model = onnx.load(path)
    constants = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    clipped = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Clip"}
    return {
        clipped.get(node.input[0], node.input[0]): (float(constants[node.input[1]]), float(constants[node.input[2]]))
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and constants[node.input[1]].ndim == 0
    }


def test_histograms_are_those_of_the_float_model(quantized: Path) -> None:
    subject = profiling.subject_of(digits().model, quantized)
    found = profiling.details(subject.graph, subject.plan, subject.solution, feeds())
    assert found.profile is not None and found.profile.feeds == 3
    activations = [row for row in found.histograms if row.role == "activation"]
    assert activations and any(row.role == "weight" for row in found.histograms)
    numbers = pairs(quantized)
    for row in activations:
        values = float_values(row.tensor)
        scale, zero = numbers[row.tensor]
        low, high = (0 - zero) * scale, (7 - zero) * scale
        assert row.covered == pytest.approx((low, high), rel=1e-5)
        assert (row.low, row.high) == pytest.approx((values.min(), values.max()), rel=1e-4)
        outside = (values < low - scale / 2) | (values > high + scale / 2)
        assert row.clipped == pytest.approx(outside.mean(), abs=2e-4)
        expected, _ = np.histogram(values, BINS, (row.low, row.high))
        assert sum(row.counts) == values.size
        assert np.abs(np.subtract(row.counts, expected)).sum() <= 0.05 * values.size


@pytest.mark.slow
def test_weights_are_in_steps_of_their_channel(quantized: Path) -> None:
    """A value beyond half a step outside of the codes is clipped."""
    report = sbonnx.quantize(
        digits().model, digits().calib, split=64, backend="virtual", bits="w3a8", details=True, w_observer="percentile"
    )
    rows = [row for row in some(report.details).histograms if row.role == "weight"]
    assert rows
    for row in rows:
        assert (row.unit, row.step, row.covered) == ("step", 1.0, (-4.0, 3.0))
        width = (row.high - row.low) / BINS
        lower = [row.low + index * width for index in range(BINS)]
        sure = sum(n for n, x in zip(row.counts, lower, strict=True) if x > 3.5 or x + width < -4.5)
        maybe = sum(n for n, x in zip(row.counts, lower, strict=True) if x + width > 3.5 or x < -4.5)
        assert sure <= round(row.clipped * sum(row.counts)) <= maybe


def test_the_worst_tensors_come_first(quantized: Path) -> None:
    subject = profiling.subject_of(digits().model, quantized)
    found = profiling.details(subject.graph, subject.plan, subject.solution, feeds(1))
    assert found.profile is not None
    figures = [value for row in found.profile.layers for value in (row.weights, row.activations) if value is not None]
    assert len(found.histograms) == 6 < len(figures)
    layers = {row.node: row for row in found.profile.layers}
    reads = {
        read.tensor: min(
            value
            for node in found.nodes
            if any(other.tensor == read.tensor for other in node.reads)
            for value in [layers[node.name].weights if read.role == "weight" else layers[node.name].activations]
            if value is not None
        )
        for row in found.nodes
        for read in row.reads
        if row.name in layers and read.role != "bias"
    }
    assert [reads[row.tensor] for row in found.histograms] == sorted(reads.values())[:6]


def test_nodes_are_those_of_the_graph(quantized: Path) -> None:
    """Edges join producers and readers, and a refusal is at the node of that name or of that tensor."""
    subject = profiling.subject_of(digits().model, quantized)
    refusals = [
        Refusal("quantize", "node_relu", Reason("recipe", "a")),
        Refusal("quantize", "relu_1", Reason("recipe", "b")),
        Refusal("x", "nowhere", Reason("recipe", "c")),
    ]
    rows = profiling.details(subject.graph, subject.plan, None, None, refusals=refusals).nodes
    assert [row.name for row in rows] == [node.name for node in subject.graph.nodes]
    made = {node.name: {one.inputs[0].name for one in node.inputs if one.inputs} for node in subject.graph.nodes}
    assert {row.name: set(row.inputs) for row in rows} == made
    assert {row.name: row.refusals for row in rows if row.refusals} == {
        "node_relu": ("quantize: a",),
        "node_relu_1": ("quantize: b",),
    }
    assert {read.low for row in rows for read in row.reads} == {None}, "a plan has no ranges"


def test_nothing_is_measured_of_many_layers(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbonnx.profiling.page_details.MOST_LAYERS", 3)
    subject = profiling.subject_of(digits().model, quantized)
    found = profiling.details(subject.graph, subject.plan, subject.solution, feeds())
    assert found.profile is None and found.histograms == ()
    assert "more than 3" in found.notes[0] and "sbonnx profile" in found.notes[0]


@pytest.mark.slow
def test_a_report_has_details_only_if_asked() -> None:
    given = (digits().model, digits().calib)
    assert sbonnx.quantize(*given, split=64, effort="fast").details is None
    report = sbonnx.quantize(*given, split=64, effort="fast", details=True)
    assert {row.name for row in some(report.details).nodes} >= {"node_conv2d", "node_linear"}
    assert "Tensors that lose most" in report.to_html()
