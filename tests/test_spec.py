"""The arithmetic of `QParams` against onnxruntime, bit for bit; the scale rules against their formulas."""

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
from sbonnx.spec import (
    MIN_SCALE,
    MIN_SCALE_FP16,
    SPARSEBIT_MIN_SCALE,
    Array,
    Bounds,
    QParams,
    QuantSpec,
    bounds_of,
    params_from_bounds,
)

ONNX_TYPES = {
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int16": TensorProto.INT16,
    "uint16": TensorProto.UINT16,
    "int4": TensorProto.INT4,
    "uint4": TensorProto.UINT4,
}
WIDE_TYPES = {TensorProto.INT4: TensorProto.INT8, TensorProto.UINT4: TensorProto.UINT8}
INT4_REACH = 2.0**30
"""In steps. Beyond 2^31, onnxruntime 1.31 casts the last value of an odd int4 tensor to int32 before it
saturates, and the largest value becomes the lowest code."""
TINY = float(np.finfo(np.float32).smallest_subnormal)
HUGE = float(np.finfo(np.float32).max)

SPECS = st.builds(
    QuantSpec, bits=st.integers(2, 16), signed=st.booleans(), symmetric=st.booleans(), narrow=st.booleans()
)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TENSORS = hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, max_side=6), elements=FLOATS)
EDGES = (0.0, -0.0, TINY, -TINY, 2.0**-126, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 127.5, 1e30, HUGE, -HUGE)


@cache
def session(dtype: str, rank: int, axis: int | None) -> onnxruntime.InferenceSession:
    """Inputs x, scale, zero; outputs the codes (int4 widened to int8 by Cast) and the dequantized x.

    Opset 21, nothing optimised. The zero point is an input, so that one session serves every number;
    a 4-bit one comes in as 8 bits, because numpy has no such type to feed.
    """
    kind = ONNX_TYPES[dtype]
    wide = WIDE_TYPES.get(kind, kind)
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node("Cast", ["zero"], ["z"], to=kind),
        helper.make_node("QuantizeLinear", ["x", "scale", "z"], ["q"], **attributes),
        helper.make_node("Cast", ["q"], ["codes"], to=wide),
        helper.make_node("DequantizeLinear", ["q", "scale", "z"], ["y"], **attributes),
    ]
    vector = [] if axis is None else ["c"]
    shape = [f"d{index}" for index in range(rank)]
    graph = helper.make_graph(
        nodes,
        "qdq",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("scale", TensorProto.FLOAT, vector),
            helper.make_tensor_value_info("zero", wide, vector),
        ],
        [
            helper.make_tensor_value_info("codes", wide, shape),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, shape),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def in_onnxruntime(x: Array, params: QParams) -> tuple[Array, Array]:
    """Codes and values of QuantizeLinear and DequantizeLinear, in the native type of the spec."""
    runner = session(params.spec.native_dtype().name, x.ndim, params.spec.axis)
    codes, values = runner.run(None, {"x": x, "scale": params.scale, "zero": params.zero_point})
    return codes, values


def assert_same(x: Array, params: QParams) -> None:
    """Codes equal, after the clip that a width without a type of its own needs; values equal bit for bit."""
    spec = params.spec
    if spec.bits <= 4:
        reach = np.float32(min(INT4_REACH * float(params.scale.min()), HUGE))
        x = np.asarray(np.clip(x, -reach, reach))
    codes, values = in_onnxruntime(x, params)
    clipped = np.clip(codes, spec.qmin, spec.qmax)
    ours = params.quantize(x)
    assert ours.dtype == spec.dtype
    np.testing.assert_array_equal(ours, clipped)
    if spec.fills_dtype:
        np.testing.assert_array_equal(clipped, codes)
    inside = codes == clipped
    np.testing.assert_array_equal(params.fake_quant(x)[inside].view(np.uint32), values[inside].view(np.uint32))


def finite_bounds(x: Array, spec: QuantSpec) -> Bounds:
    """The bounds of `x`, halved where hi - lo would be beyond float32."""
    bounds = bounds_of(x, spec.axis)
    return Bounds(bounds.lo / np.float32(2), bounds.hi / np.float32(2))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TENSORS, SPECS)
def test_quantize_equals_onnxruntime(x: Array, spec: QuantSpec) -> None:
    """Any finite data, any width from 2 to 16 bits, its own range (so half of the values clip)."""
    assert_same(x, params_from_bounds(finite_bounds(x, spec), spec))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TENSORS, SPECS, st.floats(MIN_SCALE, 2.0**100, width=32), st.floats(0, 1))
def test_any_scale_and_zero_point_equal_onnxruntime(x: Array, spec: QuantSpec, scale: float, share: float) -> None:
    zero = round(spec.qmin + share * (spec.qmax - spec.qmin))
    assert_same(x, QParams(np.array(scale, np.float32), np.array(zero, spec.dtype), spec))


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=4, max_side=5), elements=FLOATS),
    SPECS,
    st.data(),
)
def test_per_channel_equals_onnxruntime(x: Array, spec: QuantSpec, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, x.ndim - 1))
    spec = QuantSpec(spec.bits, spec.signed, spec.symmetric, axis, None, spec.narrow)
    assert_same(x, params_from_bounds(finite_bounds(x, spec), spec))


@pytest.mark.sampled
@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_edges_equal_onnxruntime(bits: int, signed: bool, symmetric: bool) -> None:
    """Zeros of both signs, subnormals, ties and the largest floats, in ranges from nothing to everything."""
    x = np.array(EDGES, np.float32)
    spec = QuantSpec(bits, signed, symmetric)
    for lo, hi in ((0, 0), (0, TINY), (-TINY, 0), (-1e-38, 1e-38), (3, 3), (-3, -3), (-1, 1), (-HUGE / 2, HUGE / 2)):
        bounds = Bounds(np.array(lo, np.float32), np.array(hi, np.float32))
        assert_same(x, params_from_bounds(bounds, spec))


@pytest.mark.parametrize("bits", range(2, 17))
def test_every_tie_rounds_to_even(bits: int) -> None:
    """All codes and all midpoints between them, one beyond each end."""
    spec = QuantSpec(bits)
    x = np.arange(2 * spec.qmin - 2, 2 * spec.qmax + 3).astype(np.float32) / 2
    assert_same(x, QParams(np.ones((), np.float32), np.zeros((), spec.dtype), spec))


def test_infinities_saturate_as_in_onnxruntime() -> None:
    params = params_from_bounds(Bounds(np.float32(-1), np.float32(3)), QuantSpec(8, signed=False, symmetric=False))
    assert_same(np.array([np.inf, -np.inf], np.float32), params)


def test_nan_becomes_the_code_of_zero() -> None:
    """ONNX leaves it open; ours is defined."""
    params = params_from_bounds(Bounds(np.float32(-1), np.float32(3)), QuantSpec(8, signed=False, symmetric=False))
    assert params.quantize(np.array([np.nan], np.float32)).tolist() == [params.zero_point]


def blocked(x: Array, params: QParams, axis: int, size: int) -> tuple[Array, Array]:
    """Codes and values of blocked QuantizeLinear and DequantizeLinear in onnxruntime."""
    kind = ONNX_TYPES[params.spec.dtype.name]
    attributes: dict[str, Any] = {"axis": axis, "block_size": size}
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **attributes),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **attributes),
        ],
        "blocked",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, params.scale.shape),
            helper.make_tensor_value_info("z", kind, params.scale.shape),
        ],
        [helper.make_tensor_value_info("q", kind, None), helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    runner = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    codes, values = runner.run(None, {"x": x, "s": params.scale, "z": params.zero_point})
    return codes, values


@pytest.mark.parametrize(("shape", "axis", "size"), [((4, 8), 1, 4), ((8, 3), 0, 2), ((5, 7), 1, 4), ((2, 6, 3), 1, 3)])
def test_blocks_equal_onnxruntime(shape: tuple[int, ...], axis: int, size: int) -> None:
    """One scale a block along the axis; the last block may be shorter."""
    random = np.random.default_rng(0)
    spec = QuantSpec(8, axis=axis, block_size=size)
    blocks = tuple(-(-n // size) if i == axis else n for i, n in enumerate(shape))
    params = QParams(random.uniform(0.01, 0.1, blocks).astype(np.float32), np.zeros(blocks, np.int8), spec)
    x = random.standard_normal(shape).astype(np.float32)
    codes, values = blocked(x, params, axis, size)
    np.testing.assert_array_equal(params.quantize(x), codes)
    np.testing.assert_array_equal(params.dequantize(params.quantize(x)), values)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])
def test_numbers_of_one_tensor_are_arrays_too(symmetric: bool, scale_dtype: Any) -> None:
    """Shape () must not decay to a numpy scalar: sessions and files take arrays only."""
    params = params_of(-1, 2, QuantSpec(8, symmetric=symmetric), scale_dtype=scale_dtype)
    codes = params.quantize(np.float32(0.5))
    for value in (params.scale, params.zero_point, codes, params.dequantize(codes)):
        assert type(value) is np.ndarray
        assert value.shape == ()


# Scale rules ---------------------------------------------------------------------------------------------------------


def params_of(lo: float, hi: float, spec: QuantSpec, **rule: Any) -> QParams:
    return params_from_bounds(Bounds(np.float32(lo).reshape(()), np.float32(hi).reshape(())), spec, **rule)


@pytest.mark.parametrize(
    ("spec", "scale", "zero"),
    [
        (QuantSpec(8), 2.54 / 127, 0),
        (QuantSpec(8, narrow=True), 2.54 / 127, 0),
        (QuantSpec(4), 2.54 / 7, 0),
        (QuantSpec(8, signed=False), 2.54 / 127, 128),
        (QuantSpec(8, symmetric=False), 3.81 / 255, -43),
        (QuantSpec(8, signed=False, symmetric=False), 3.81 / 255, 85),
        (QuantSpec(4, signed=False, symmetric=False), 3.81 / 15, 5),
        (QuantSpec(16, signed=False, symmetric=False), 3.81 / 65535, 21845),
    ],
)
def test_scale_and_zero_point_of_a_range(spec: QuantSpec, scale: float, zero: int) -> None:
    """-1.27 .. 2.54, by hand."""
    params = params_of(-1.27, 2.54, spec)
    np.testing.assert_allclose(params.scale, scale, rtol=1e-6)
    assert params.zero_point == zero
    assert params.scale.dtype == np.float32
    assert params.zero_point.dtype == spec.dtype


def test_the_negative_end_has_one_code_more() -> None:
    assert params_of(-1.28, 1.0, QuantSpec(8)).scale == np.float32(0.01)
    assert params_of(-1.28, 1.0, QuantSpec(8, narrow=True)).scale == np.float32(np.float64(np.float32(1.28)) / 127)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TENSORS, SPECS)
def test_nothing_in_the_range_clips(x: Array, spec: QuantSpec) -> None:
    """Every value comes back within half a step: a step more at an affine end, whose zero point was rounded."""
    x = x / np.float32(4)
    params = params_from_bounds(bounds_of(x), spec)
    error = np.abs(params.fake_quant(x).astype(np.float64) - x)
    steps = 0.5 if spec.symmetric else 1.0
    assert (error <= steps * float(params.scale) * (1 + 2e-3) + np.abs(x) * 2.0**-22).all()
    limits = params.limits
    assert limits.lo <= 0 <= limits.hi


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SPECS, st.sampled_from(["exact", "sparsebit"]), FLOATS, FLOATS)
def test_zero_is_represented_exactly(spec: QuantSpec, rule: Any, a: float, b: float) -> None:
    params = params_of(min(a, b) / 4, max(a, b) / 4, spec, rule=rule)
    assert spec.qmin <= params.zero_point <= spec.qmax
    assert params.scale >= MIN_SCALE
    assert params.fake_quant(np.zeros(1, np.float32)).tolist() == [0.0]


def test_ranges_without_width() -> None:
    for spec in (QuantSpec(8), QuantSpec(8, signed=False, symmetric=False)):
        assert params_of(0, 0, spec).scale == 1.0
        assert params_of(0, TINY, spec).scale == np.float32(MIN_SCALE)
        constant = params_of(3, 3, spec)
        np.testing.assert_allclose(constant.fake_quant(np.full(1, 3, np.float32)), [3], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_range_that_is_not_finite_is_an_error(bad: float, symmetric: bool) -> None:
    with pytest.raises(NumericError, match="not finite"):
        params_of(min(bad, 0), max(bad, 0), QuantSpec(8, symmetric=symmetric))


def test_a_scale_beyond_half_precision_is_an_error() -> None:
    with pytest.raises(NumericError, match="float16"):
        params_of(-1e9, 1e9, QuantSpec(8), scale_dtype=np.float16)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(2.0**-20, 2.0**16, width=32), SPECS)
def test_half_precision_scales_round_up(top: float, spec: QuantSpec) -> None:
    """The scale is a float16, no smaller than the exact one, and so the top of the range still fits."""
    params = params_of(0, top, spec, scale_dtype=np.float16)
    exact = params_of(0, top, spec).scale
    assert params.scale == np.float32(np.float16(params.scale))
    assert params.scale >= exact
    assert params.scale >= MIN_SCALE_FP16
    assert params.scale <= max(float(exact) * (1 + 2.0**-10), MIN_SCALE_FP16 * (1 + 2.0**-10))


# The ancestor's numbers: the activation tensor and the min-max row of its inventory.
GOLDEN = [
    (QuantSpec(8), False, 0.094401, 0),
    (QuantSpec(4), False, 1.604821, 0),
    (QuantSpec(8, signed=False, symmetric=False), False, 0.061256, 59),
    (QuantSpec(4, signed=False, symmetric=False), False, 1.041344, 3),
    (QuantSpec(8, signed=False, symmetric=False), True, 0.047201, 0),
    (QuantSpec(4, signed=False, symmetric=False), True, 0.802411, 0),
]


def golden_activation() -> Array:
    """Shape (4, 8, 8, 8): 4 t^3 with t = ((37 i) mod 1009) / 504.5 - 0.8, times 1 + 0.25 n for sample n."""
    t = (37 * np.arange(2048) % 1009) / 504.5 - 0.8
    samples = (4 * t**3).reshape(4, 8, 8, 8)
    return np.asarray(samples * (1 + 0.25 * np.arange(4)).reshape(4, 1, 1, 1), np.float32)


@pytest.mark.parametrize(("spec", "relu", "scale", "zero"), GOLDEN)
def test_sparsebit_min_max_golden_values(spec: QuantSpec, relu: bool, scale: float, zero: int) -> None:
    x = golden_activation()
    np.testing.assert_allclose([x.min(), x.max()], [-3.584, 12.036158], rtol=1e-6)
    params = params_from_bounds(bounds_of(np.maximum(x, 0) if relu else x), spec, rule="sparsebit")
    np.testing.assert_allclose(params.scale, scale, atol=5e-7)
    assert params.zero_point == zero


def test_sparsebit_weight_golden_values() -> None:
    """Weights (3, 2, 3, 3), flat j: ((17 j mod 29) - 14) / 20, 4 bits per channel."""
    w = ((17 * np.arange(54) % 29 - 14) / 20).reshape(3, 2, 3, 3).astype(np.float32)
    spec = QuantSpec(4, axis=0)
    params = params_from_bounds(bounds_of(w, 0), spec, rule="sparsebit")
    np.testing.assert_allclose(params.scale, [0.093333] * 3, atol=5e-7)


def test_sparsebit_floor() -> None:
    for spec in (QuantSpec(8), QuantSpec(8, signed=False, symmetric=False)):
        assert params_of(0, 0, spec, rule="sparsebit").scale == np.float32(SPARSEBIT_MIN_SCALE)


# The types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(2, 17))
def test_codes_of_a_width(bits: int) -> None:
    signed, unsigned, narrow = QuantSpec(bits), QuantSpec(bits, signed=False), QuantSpec(bits, narrow=True)
    assert (signed.qmin, signed.qmax) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert (unsigned.qmin, unsigned.qmax) == (0, 2**bits - 1)
    assert narrow.qmin == -narrow.qmax
    for spec in (signed, unsigned):
        native = ml_dtypes.iinfo(spec.native_dtype())  # type: ignore[no-untyped-call]
        assert native.min <= spec.qmin
        assert spec.qmax <= native.max
        assert spec.fills_dtype == (native.min == spec.qmin and native.max == spec.qmax)


@pytest.mark.parametrize(
    "wrong", [{"bits": 1}, {"bits": 17}, {"axis": -1}, {"block_size": 4}, {"axis": 0, "block_size": 0}]
)
def test_a_spec_that_means_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        QuantSpec(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_a_scale_that_divides_nothing_is_refused(scale: float) -> None:
    with pytest.raises(NumericError):
        QParams(np.float32(scale).reshape(()), np.zeros((), np.int8), QuantSpec(8))


def test_bounds() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
    assert [bounds_of(x).lo.tolist(), bounds_of(x).hi.tolist()] == [-5, 6]
    assert bounds_of(x, 0).hi.tolist() == [-2, 2, 6]
    assert bounds_of(x, 1).lo.tolist() == [-5, -4, -3, -2]
    empty = bounds_of(np.zeros((3, 0), np.float32), 0)
    assert empty.lo.tolist() == empty.hi.tolist() == [0, 0, 0]
    both = bounds_of(x).union(Bounds(np.float32(-9), np.float32(1)))
    assert [both.lo.tolist(), both.hi.tolist()] == [-9, 6]
