"""Activations with a scale a channel: legal ONNX, and nothing that onnxruntime's integer kernels take."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from sbonnx import quantize
from sbonnx.schemes import Scheme
from sbonnx.verify.ort_options import NO_CHANNELS
from tests.support.values import some

RANDOM = np.random.default_rng(0)
FEEDS = [{"x": RANDOM.standard_normal((1, 3, 8, 8)).astype(np.float32)} for _ in range(4)]


def pooled() -> onnx.ModelProto:
    """Two convolutions and a global pool in a row: onnxruntime makes integer kernels of all three."""
    names = {"w": (8, 3, 3, 3), "v": (8, 8, 3, 3), "u": (5, 8, 1, 1)}
    weights = [
        numpy_helper.from_array(RANDOM.standard_normal(size).astype(np.float32), name) for name, size in names.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "first", pads=[1] * 4),
        helper.make_node("Conv", ["a", "v"], ["b"], "second", pads=[1] * 4),
        helper.make_node("GlobalAveragePool", ["b"], ["c"], "pool"),
        helper.make_node("Conv", ["c", "u"], ["y"], "last"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5, 1, 1])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("scheme", ["per-channel-affine", "per-channel-symmetric"])
def test_they_are_proved_without_the_rewrites_that_cannot_run_them(scheme: Scheme) -> None:
    report = quantize(pooled(), FEEDS, backend="virtual", a_qscheme=scheme)
    assert report.ok
    assert NO_CHANNELS in report.notes
    assert some(report.metrics).outputs[0].sqnr_db > 20
    assert report.quantized is not None
    options = ort.SessionOptions()
    options.log_severity_level = 4
    file = report.quantized.SerializeToString()
    fused: Any = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match=r"Scalar|scale|zero_point"):  # what the note is about
        fused.run(None, FEEDS[0])


def test_a_scale_a_tensor_needs_no_such_note() -> None:
    report = quantize(pooled(), FEEDS, backend="virtual")
    assert report.ok
    assert NO_CHANNELS not in report.notes
