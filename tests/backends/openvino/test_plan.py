"""Placement for OpenVINO, in plans and in the compiled model."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import sbonnx
from sbonnx import graph as graphs
from sbonnx.backends import BACKENDS
from sbonnx.backends.kernel_costs import Amounts, Price
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
    return {site.tensor: site.label for site in report.sites if site.role == "activation"}


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


def price(text: str, **weights: tuple[int, ...]) -> Price:
    """Cost of the only node of a graph, by the bundled table."""
    model = onnx.parser.parse_model(text)
    for name, shape in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    costs = BACKENDS["openvino"].kernel_costs("bundled")
    assert costs is not None
    found = costs.of(graphs.load(model).nodes[0])
    assert found is not None
    return found


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_integer_pools_have_blocks_of_64_channels(op: str) -> None:
    few, many = (
        price(
            f'<ir_version: 8, opset_import: ["" : 17]> g (float[1,{size},56,56] x) => (float[1,{size},56,56] y) '
            f"{{ y = {op}<kernel_shape = [5,5], pads = [2,2,2,2]>(x) }}"
        )
        for size in (16, 64)
    )
    assert few.integers == many.integers > 1.5 * few.floats
    assert many.integers < many.floats


def test_transposed_convolutions_have_a_price() -> None:
    head = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,128,14,14] x) => (float[1,64,28,28] y) '
    found = price(head + "{ y = ConvTranspose<strides = [2,2], pads = [1,1,1,1]>(x, w) }", w=(128, 64, 4, 4))
    half = price(head + "{ y = ConvTranspose<strides = [2,2], group = 2, pads = [1,1,1,1]>(x, w) }", w=(128, 32, 4, 4))
    assert found.integers < found.floats
    assert half.integers < found.integers


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
