"""Rows times matrices are what onnxruntime computes, for every kind of linear node."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from sbonnx.errors import ModelError
from sbonnx.linear.im2col import geometry_of
from sbonnx.ops import LINEAR
from sbonnx.spec import Array
from tests.support.linear_ops import FIXED, Linear, layer_of, linear_ops


def output_of(case: Linear, x: Array, weight: Array) -> Array:
    """By rows and matrices, (G, n, O)."""
    return np.asarray(case.geometry.rows(x) @ case.layout.matrices(weight).swapaxes(1, 2))


def as_rows(case: Linear, y: Array) -> Array:
    """An output of onnxruntime as (G, n, O), n in the order of the rows."""
    layout = case.layout
    if case.op in ("Conv", "ConvTranspose"):
        wide = y.reshape(y.shape[0], layout.groups, layout.outputs, -1)
        return np.asarray(wide.transpose(1, 0, 3, 2).reshape(layout.groups, -1, layout.outputs))
    if case.op == "MatMul" and y.ndim > 2:
        batch = y.shape[:-2]
        weight = (1,) * (len(batch) - len(case.weight[:-2])) + case.weight[:-2]
        own = [axis for axis, size in enumerate(weight) if size > 1]
        rest = [axis for axis, size in enumerate(weight) if size == 1]
        return np.asarray(
            y.transpose(*own, *rest, len(batch), len(batch) + 1).reshape(layout.groups, -1, layout.outputs)
        )
    return y.reshape(1, -1, layout.outputs)


def check(case: Linear, seed: int) -> None:
    x, weight = case.input(seed), case.constant(seed + 1)
    expected = as_rows(case, case.run(x, weight))
    found = output_of(case, x, weight)
    assert found.shape[1] == case.geometry.count(x.shape) == expected.shape[1]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FIXED)
def test_rows_of_the_corners(name: str) -> None:
    check(FIXED[name], 3)


@settings(max_examples=150, deadline=None)
@given(linear_ops(), st.integers(0, 2**16))
def test_rows(case: Linear, seed: int) -> None:
    check(case, seed)


@settings(max_examples=100, deadline=None)
@given(linear_ops(), st.integers(0, 2**16))
def test_picked_rows_are_rows(case: Linear, seed: int) -> None:
    """Any choice, in any order, with repetitions, whichever way few and many are gathered."""
    x, geometry = case.input(seed), case.geometry
    count = geometry.count(x.shape)
    picks = np.random.default_rng(seed).integers(0, count, max(1, seed % 20))
    rows = geometry.rows(x, picks)
    assert rows.dtype == np.float32
    assert np.array_equal(rows, geometry.rows(x)[:, picks])


def test_only_the_picked_rows_are_unfolded() -> None:
    """Eight windows of a picture whose windows would take 81 MB."""
    case = Linear("Conv", (1, 16, 375, 375), (4, 16, 3, 3), {"pads": [1] * 4})
    x = case.input(0)
    picks = np.arange(0, 140_000, 17_500)
    case.geometry.rows(x, picks)
    tracemalloc.start()
    case.geometry.rows(x, picks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_half_precision_becomes_single() -> None:
    case = FIXED["conv"]
    x = case.input(0).astype(np.float16)
    rows = case.geometry.rows(x)
    assert rows.dtype == np.float32
    assert np.array_equal(rows, case.geometry.rows(x.astype(np.float32)))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"strides": [1]}, "Conv '/head': strides has 1 numbers, and its weight asks for 2"),
        ({"pads": [1, 1]}, "Conv '/head': pads has 2 numbers, and its weight asks for 4"),
        ({"auto_pad": "SAME"}, "Conv '/head': auto_pad is 'SAME', which ONNX does not know"),
    ],
)
def test_attributes_that_do_not_fit(attributes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        geometry_of(layer_of("Conv", {}, (4, 3, 3, 3)), attributes, name="/head")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"), [("conv", (2, 4, 9)), ("conv", (2, 5, 9, 7)), ("matmul", (2, 7)), ("matmul, batches", (2, 5, 6))]
)
def test_inputs_that_do_not_fit(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        FIXED[name].geometry.count(shape)


def test_the_shape_wanted_of_a_transposed_convolution_may_count_batch_and_channels() -> None:
    """onnxruntime reads the last numbers."""
    short = FIXED["transposed, to a shape"]
    whole = Linear(short.op, short.reads, short.weight, short.attributes | {"output_shape": [1, 3, 9, 13]})
    assert whole.geometry == short.geometry


FEEDS: dict[str, dict[str, tuple[int, ...]]] = {
    "cifar_resnet20": {"input": (2, 3, 32, 32)},
    "mobilenetv2_tin200": {"input": (1, 3, 64, 64)},
    "squeezenet11": {"input": (1, 3, 224, 224)},
    "fastestdet": {"input.1": (1, 3, 352, 352)},
    "ultraface_rfb320": {"input": (1, 3, 240, 320)},
    "minilm_l6": {"input_ids": (2, 9), "attention_mask": (2, 9), "token_type_ids": (2, 9)},
}


def feeds_of(name: str) -> dict[str, Array]:
    """Noise for pictures, ones for ids and masks."""
    random = np.random.default_rng(0)
    shapes = FEEDS[name]
    if "attention_mask" in shapes:
        return {key: np.ones(shape, np.int64) for key, shape in shapes.items()}
    return {key: random.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}


@pytest.mark.parametrize("name", FEEDS)
def test_every_layer_of_a_real_model(pack: Path, name: str) -> None:
    """A few rows of each, times its matrices, are what the layer gave, but for its bias."""
    ort = pytest.importorskip("onnxruntime")
    proto = onnx.load(pack / "models" / f"{name}.onnx")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    nodes = [node for node in proto.graph.node if node.op_type in LINEAR and node.input[1] in constants]
    assert len(nodes) >= 20
    wanted = list(dict.fromkeys(name for node in nodes for name in (node.input[0], node.output[0])))
    given = {each.name for each in (*proto.graph.input, *proto.graph.output)}
    proto.graph.output.extend(onnx.ValueInfoProto(name=each) for each in wanted if each not in given)
    feeds = feeds_of(name)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    computed = [each for each in wanted if each not in feeds]
    values = feeds | dict(zip(computed, session.run(computed, feeds), strict=True))
    for number, node in enumerate(nodes):
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        attributes = {key: each.decode() if isinstance(each, bytes) else each for key, each in attributes.items()}
        x, weight = values[node.input[0]], constants[node.input[1]]
        case = Linear(node.op_type, x.shape, weight.shape, attributes)
        expected = as_rows(case, values[node.output[0]])
        assert case.geometry.count(x.shape) == expected.shape[1]
        picks = np.random.default_rng(number).integers(0, expected.shape[1], 10)
        found = case.geometry.rows(x, picks) @ case.layout.matrices(weight).swapaxes(1, 2)
        if len(node.input) > 2:
            found = found + constants[node.input[2]].reshape(case.layout.groups, 1, -1) * attributes.get("beta", 1.0)
        scale = max(float(np.abs(expected).max()), 1e-3)
        np.testing.assert_allclose(found, expected[:, picks], rtol=0, atol=1e-4 * scale, err_msg=node.name)
