"""Layout of weights, channel axes and scaling of channels, against onnxruntime and against numpy's own indexing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.graph import Constant, Node, Variable, load
from sbonnx.linear.layer import LinearLayer, channel_axes
from sbonnx.spec import Array, QuantSpec, bounds_of, params_from_bounds
from tests.rounding.layers import scales
from tests.support.linear_ops import FIXED, Linear, layer_of, linear_ops, products
from tests.support.models import model, run


def wide(values: Array, axis: int, rank: int) -> Array:
    """One number per channel, to broadcast against an activation."""
    return values.reshape([-1 if place == axis % rank else 1 for place in range(rank)])


def out_axis(case: Linear) -> int:
    return 1 if case.op in ("Conv", "ConvTranspose") else -1


@settings(max_examples=100, deadline=None)
@given(linear_ops(), st.integers(0, 2**16))
def test_scaled_outputs(case: Linear, seed: int) -> None:
    layer, x, weight = case.layout, case.input(seed), case.constant(seed + 1)
    scale = np.random.default_rng(seed).uniform(0.5, 2.0, layer.out_channels)
    y = case.run(x, weight)
    assert y.shape[out_axis(case)] == layer.out_channels
    found = case.run(x, layer.scale_outputs(weight, scale))
    np.testing.assert_allclose(found, y * wide(scale, out_axis(case), y.ndim), rtol=1e-4, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(linear_ops(), st.integers(0, 2**16))
def test_scaled_inputs(case: Linear, seed: int) -> None:
    layer, x, weight = case.layout, case.input(seed), case.constant(seed + 1)
    assert x.shape[layer.data_axis] == layer.in_channels
    scale = np.random.default_rng(seed).uniform(0.5, 2.0, layer.in_channels)
    scaled = (x * wide(scale, layer.data_axis, x.ndim)).astype(np.float32)
    found = case.run(x, layer.scale_inputs(weight, scale))
    np.testing.assert_allclose(found, case.run(scaled, weight), rtol=1e-4, atol=1e-4)


@settings(max_examples=50, deadline=None)
@given(products(), st.integers(0, 2**16))
def test_constant_channels_pass_through_products(case: Linear, seed: int) -> None:
    layer, weight = case.layout, case.constant(seed)
    if layer.groups > 1:
        return
    values = np.random.default_rng(seed).normal(size=layer.in_channels)
    x = np.broadcast_to(wide(values, layer.data_axis, len(case.reads)), case.reads).astype(np.float32)
    y = case.run(x, weight)
    np.testing.assert_allclose(
        y, np.broadcast_to(layer.alpha * layer.through(weight, values), y.shape), rtol=1e-4, atol=1e-4
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**16))
def test_constant_channels_pass_through_convolutions(groups: int, channels: int, outputs: int, seed: int) -> None:
    case = Linear("Conv", (1, groups * channels, 4, 5), (groups * outputs, channels, 3, 2), {"group": groups})
    layer, weight = case.layout, case.constant(seed)
    values = np.random.default_rng(seed).normal(size=layer.in_channels)
    y = case.run(np.broadcast_to(wide(values, 1, 4), case.reads).astype(np.float32), weight)
    np.testing.assert_allclose(y[0, :, 0, 0], layer.through(weight, values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_constant_on_the_left(batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    weight, data = rng.normal(size=(*batch, 4, 5)), rng.normal(size=(5, 6))
    node = Node("MatMul", "m", {}, [Constant("w", weight.astype(np.float32)), Variable("x")], [Variable("y")])
    layer = LinearLayer.of(node)
    assert isinstance(layer, LinearLayer)
    assert (layer.index, layer.in_channels, layer.out_channels) == (0, 5, 4)
    matrices = layer.matrices(weight)
    np.testing.assert_allclose((matrices @ data).reshape(*batch, 4, 6), weight @ data)
    assert np.array_equal(layer.from_matrices(matrices), weight)
    by_input, by_output = rng.uniform(0.5, 2, 5), rng.uniform(0.5, 2, 4)
    np.testing.assert_allclose(layer.scale_inputs(weight, by_input) @ data, weight @ (by_input[:, None] * data))
    np.testing.assert_allclose(layer.scale_outputs(weight, by_output) @ data, by_output[:, None] * (weight @ data))


@pytest.mark.parametrize(
    ("op", "attributes", "shape", "why"),
    [
        ("Relu", {}, (3, 3), "Relu is not linear"),
        ("Conv", {}, (3, 3), "a weight of shape (3, 3) does not fit group 1"),
        ("Conv", {"group": 2}, (3, 3, 1), "a weight of shape (3, 3, 1) does not fit group 2"),
        ("Gemm", {}, (2, 3, 4), "a weight of shape (2, 3, 4) does not fit Gemm"),
        ("MatMul", {}, (3,), "a weight of rank 1 has no output channels"),
    ],
)
def test_reasons(op: str, attributes: dict[str, int], shape: tuple[int, ...], why: str) -> None:
    assert LinearLayer.of_shape(op, attributes, shape) == why


def test_nodes_without_a_constant_weight() -> None:
    x, y = Variable("x"), Variable("y")
    assert LinearLayer.of(Node("MatMul", "m", {}, [x, y])) == "MatMul has no constant weight"
    assert LinearLayer.of(Node("Relu", "r", {}, [x])) == "Relu is not a linear op"
    left = Node("Conv", "c", {}, [Constant("w", np.ones((1, 1, 1), np.float32)), y])
    assert LinearLayer.of(left) == "Conv has no constant weight"


@settings(max_examples=100, deadline=None)
@given(linear_ops())
def test_matrices_and_back(case: Linear) -> None:
    layout, weight = case.layout, case.constant(0)
    matrices = layout.matrices(weight)
    assert matrices.shape == (layout.groups, layout.outputs, layout.inputs)
    assert np.array_equal(np.sort(matrices, axis=None), np.sort(weight, axis=None))
    back = layout.from_matrices(matrices)
    assert np.array_equal(back, weight)
    assert back.flags.c_contiguous


@pytest.mark.parametrize("name", FIXED)
def test_the_input_keeps_the_order_of_channels(name: str) -> None:
    """One input channel after the other, and the window within: what every file with rows or moments relies on."""
    case = FIXED[name]
    layout = case.layout
    weight = np.arange(np.prod(case.weight)).reshape(case.weight)
    row = layout.matrices(weight)[0, 0]
    if case.op == "Conv":
        assert np.array_equal(row, weight[0].reshape(-1))
    elif case.op == "ConvTranspose":
        channels = case.weight[0] // layout.groups
        assert np.array_equal(row, weight[:channels, 0].reshape(-1))
    else:
        across = case.attributes.get("transB", 0)
        first = weight.reshape(-1, *case.weight[-2:])[0]
        assert np.array_equal(row, first[0] if across else first[:, 0])


@pytest.mark.sampled
@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_every_weight_has_its_scale(name: str, axis: int | None) -> None:
    """Codes times scales, matrix by matrix, are what `QParams` says of the whole weight."""
    case = FIXED[name]
    layout, weight = case.layout, case.constant(0)
    spec = QuantSpec(bits=4, axis=axis, symmetric=False)
    qparams = params_from_bounds(bounds_of(weight, axis), spec)
    codes = qparams.quantize(weight)
    scale, zero = layout.spread(qparams.scale, qparams), layout.spread(qparams.zero_point, qparams)
    meant = (layout.matrices(codes).astype(np.float32) - zero.astype(np.float32)) * scale
    assert np.array_equal(layout.from_matrices(meant), qparams.dequantize(codes))


def test_blocks_of_scales_are_spread() -> None:
    layout = layer_of("MatMul", {}, (8, 3))
    weight = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    qparams = scales(weight, QuantSpec(bits=4, axis=0, block_size=4))
    spread = layout.spread(qparams.scale, qparams)
    assert spread.shape == (1, 3, 8)
    assert np.array_equal(spread[0], np.repeat(qparams.scale.T, 4, axis=1))


def test_axes_of_vectors() -> None:
    for index in (0, 1):
        assert channel_axes("MatMul", {}, 1, index) == (None, 0)
    assert channel_axes("Relu", {}, 2) == channel_axes("Conv", {}, 4, 0) == (None, None)


CALLS = {
    "MatMul (x, w)": ((3, 8), (8, 5), 1),
    "MatMul (w, x)": ((8, 3), (5, 8), 0),
    "MatMul (x, w) ": ((2, 3, 8), (2, 8, 5), 1),
    "Gemm (x, w)": ((3, 8), (8, 5), 1),
    "Gemm <transB = 1> (x, w)": ((3, 8), (5, 8), 1),
    "Gemm <transA = 1> (x, w)": ((8, 3), (8, 5), 1),
    "MatMul (x, w)  ": ((3, 8), (8,), 1),
}
"""Shape of x, of w, and the input that w is."""


@pytest.mark.parametrize("call", CALLS)
def test_the_summed_axis_does_not_come_out(call: str) -> None:
    """Changing one place of that axis changes every output that any other change of the weight could."""
    shape, weight, index = CALLS[call]
    rng = np.random.default_rng(0)
    dims = ",".join(map(str, shape))
    proto = model(f"agraph (float[{dims}] x) => (float y) {{ y = {call} }}", w=weight)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    node = load(proto).nodes[0]
    _, axis = channel_axes(node.op, node.attrs, len(weight), index)
    assert axis is not None and weight[axis] == 8
    x = rng.standard_normal(shape).astype(np.float32)
    values = rng.standard_normal(weight).astype(np.float32)
    whole = run(model_with(call, dims, values), {"x": x})["y"]
    changed = values.copy()
    np.moveaxis(changed, axis, 0)[3] += 1
    assert (run(model_with(call, dims, changed), {"x": x})["y"] != whole).all()


def model_with(call: str, dims: str, weight: Array) -> onnx.ModelProto:
    proto = model(f"agraph (float[{dims}] x) => (float y) {{ y = {call} }}", w=weight)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto
