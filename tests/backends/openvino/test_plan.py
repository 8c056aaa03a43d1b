"""Placement for OpenVINO, in plans and in the compiled model."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import sbonnx
from sbonnx.backends import BACKENDS
from sbonnx.backends.kernel_costs import Amounts
from sbonnx.errors import RecipeError
from sbonnx.recipe import load
from sbonnx.report import Report

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,32,14,14] x) => (float[1,32,14,14] y)'


def planned(body: str, **weights: tuple[int, ...]) -> Report:
    """Quantize without verification and without costs."""
    model = onnx.parser.parse_model(f"{HEAD} {{ {body} }}")
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        values = rng.normal(0, 0.1, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    for node in model.graph.node:
        node.name = node.output[0]
    feeds = [{"x": rng.normal(0, 1, (1, 32, 14, 14)).astype(np.float32)} for _ in range(4)]
    return sbonnx.quantize(model, feeds, backend="openvino", verify=False, kernel_costs="none")


def activations(report: Report) -> dict[str, str]:
    return {site["tensor"]: site["label"] for site in report.sites if site["role"] == "activation"}


def test_pairs_are_behind_fused_activations_where_a_reader_wants_integers() -> None:
    body = "a = Conv<pads = [1,1,1,1]>(x, v) b = Sigmoid(a) c = Mul(a, b) d = Conv<pads = [1,1,1,1]>(c, w) y = Sin(d)"
    sites = activations(planned(body, v=(32, 32, 3, 3), w=(32, 32, 3, 3)))
    assert set(sites) == {"x", "c"}  # none inside SiLU, and none before the float op


def test_inputs_of_transposed_convolutions_have_the_zero_point_0() -> None:
    body = "a = Conv<pads = [1,1,1,1]>(x, v) b = ConvTranspose<pads = [1,1,1,1]>(a, w) y = Sin(b)"
    sites = activations(planned(body, v=(32, 32, 3, 3), w=(32, 32, 3, 3)))
    assert sites["x"].startswith("uint8") and sites["a"].startswith("int8")


def test_costs_are_those_of_the_table() -> None:
    costs = BACKENDS["openvino"].kernel_costs("bundled")
    assert costs is not None
    times = {
        (variant, kind): costs.ns("Convolution", variant, kind, Amounts(macs=1e7))
        for variant in ("1x1", "depthwise")
        for kind in ("float", "u8")
    }
    assert times["1x1", "float"] > 1.5 * times["1x1", "u8"]
    assert times["depthwise", "float"] < times["depthwise", "u8"]


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"bits": "w8a16"}, "must be 8 for the backend openvino"),
        ({"w_qscheme": "per-channel-affine"}, "must be per-channel-symmetric or per-tensor-symmetric for the backend"),
        ({"high_precision": "fp16"}, "must be fp32 for the backend openvino"),
        ({"format": "qoperator"}, "must be qdq for the backend openvino"),
    ],
)
def test_limits(wish: dict[str, str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load(None, backend="openvino", overrides=wish)
