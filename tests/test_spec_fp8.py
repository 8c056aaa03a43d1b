"""FP8 (E4M3) codes against onnxruntime's QuantizeLinear and against ml_dtypes, bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper

from sbonnx.errors import NumericError
from sbonnx.small_floats import FP8_MAX
from sbonnx.spec import MIN_SCALE, Array, Bounds, QParams, QuantSpec, bounds_of, params_from_bounds

E4M3 = ml_dtypes.float8_e4m3fn
SPEC = QuantSpec(kind="fp8")
VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
HUGE = float(np.finfo(np.float32).max)


@cache
def session(rank: int, axis: int | None, block: int | None) -> onnxruntime.InferenceSession:
    """Inputs x and scale; outputs the codes as bytes, and the dequantized x. Nothing is optimised."""
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    if block is not None:
        attributes["block_size"] = block
    shape = [f"d{index}" for index in range(rank)]
    scales = [] if axis is None else (["c"] if block is None else [f"s{index}" for index in range(rank)])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["q"], output_dtype=TensorProto.FLOAT8E4M3FN, **attributes),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["y"], **attributes),
    ]
    graph = helper.make_graph(
        nodes,
        "qdq",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("scale", TensorProto.FLOAT, scales),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def assert_same(x: Array, params: QParams) -> None:
    """What onnxruntime gives back is what we give back; with scale 1 that is the code itself."""
    runner = session(x.ndim, params.spec.axis, params.spec.block_size)
    (values,) = runner.run(None, {"x": x, "scale": params.scale})
    ours = params.fake_quant(x)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours.view(np.uint32), values.view(np.uint32))


def at(scale: float) -> QParams:
    return QParams(np.array(scale, np.float32), np.zeros((), E4M3), SPEC)


def test_the_spec_says_what_it_is() -> None:
    assert (SPEC.qmin, SPEC.qmax, SPEC.centre) == (-448, 448, 0)
    assert SPEC.dtype == SPEC.native_dtype() == np.dtype(E4M3)
    assert SPEC.fills_dtype
    assert (SPEC.label(), QuantSpec(kind="fp8", axis=1).label()) == ("fp8", "fp8 axis 1")
    assert np.nanmax(VALUES) == FP8_MAX
    wrongs: list[dict[str, Any]] = [{"bits": 4}, {"signed": False}, {"symmetric": False}, {"narrow": True}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="fp8 has 8 bits"):
            QuantSpec(kind="fp8", **wrong)


def test_every_code_and_every_midpoint() -> None:
    """All 254 finite codes, what lies half way between neighbours, and a hair on either side: ties go to even."""
    finite = np.unique(VALUES[np.isfinite(VALUES)])
    middle = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([finite, middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, -HUGE)])
    edges = [0.0, -0.0, 448, 463.9, 464, 465, 1e30, HUGE, -HUGE, 2.0**-10, 2.0**-149]
    x = np.concatenate([x, edges]).astype(np.float32)
    assert_same(x, at(1.0))
    inside = x[np.abs(x) <= FP8_MAX]
    np.testing.assert_array_equal(at(1.0).quantize(inside).view(np.uint8), inside.astype(E4M3).view(np.uint8))
    np.testing.assert_array_equal(at(1.0).fake_quant(finite), finite)


def test_what_is_beyond_saturates_and_nan_stays() -> None:
    """As ONNX casts with saturate = 1."""
    codes = at(2.0).quantize(np.array([np.inf, -np.inf, 1e38, -1000.0, np.nan], np.float32))
    assert codes[:4].astype(np.float32).tolist() == [448, -448, 448, -448]
    assert np.isnan(codes[4].astype(np.float32))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=6), elements=FLOATS))
def test_a_range_of_its_own_equals_onnxruntime(x: Array) -> None:
    bounds = bounds_of(x)
    params = params_from_bounds(bounds, SPEC)
    assert_same(x, params)
    widest = max(-float(bounds.lo), float(bounds.hi))
    if widest > FP8_MAX * MIN_SCALE:
        np.testing.assert_allclose(params.scale, widest / 448, rtol=1e-6)
        assert np.abs(params.fake_quant(x)).max() >= widest * (1 - 2.0**-4)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=2, max_side=8), elements=FLOATS),
    st.floats(MIN_SCALE, 2.0**100, width=32),
)
def test_any_scale_equals_onnxruntime(x: Array, scale: float) -> None:
    assert_same(x, at(scale))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=3, max_side=5), elements=FLOATS), st.data())
def test_per_channel_equals_onnxruntime(x: Array, data: st.DataObject) -> None:
    spec = QuantSpec(kind="fp8", axis=data.draw(st.integers(0, x.ndim - 1)))
    assert_same(x, params_from_bounds(bounds_of(x, spec.axis), spec))


def test_blocks_equal_onnxruntime() -> None:
    rng = np.random.default_rng(0)
    spec = QuantSpec(kind="fp8", axis=0, block_size=4)
    scale = rng.uniform(0.01, 0.1, (2, 3)).astype(np.float32)
    assert_same(rng.standard_normal((7, 3)).astype(np.float32), QParams(scale, np.zeros(scale.shape, E4M3), spec))


def test_limits_and_ranges() -> None:
    params = params_from_bounds(Bounds(np.float32(-1), np.float32(3.5)), SPEC)
    assert (params.limits.lo, params.limits.hi) == (np.float32(-3.5), np.float32(3.5))
    assert params.zero_point.dtype == E4M3
    assert params_from_bounds(Bounds(np.float32(0), np.float32(0)), SPEC).scale == 1
    with pytest.raises(NumericError, match="not finite"):
        params_from_bounds(Bounds(np.float32(0), np.float32(np.inf)), SPEC)
    ancestor = params_from_bounds(Bounds(np.float32(-1), np.float32(3.5)), SPEC, rule="sparsebit")
    assert ancestor.scale == params.scale
