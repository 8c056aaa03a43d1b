"""Small floats in blocks, and 2 bits, against the reference evaluator of onnx, and the text of OCP MX 1.0."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import sbonnx
from sbonnx import linting, qdq
from sbonnx.graph import load, to_proto
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import Moments
from sbonnx.rounding import make_rounder
from sbonnx.small_floats import FLOATS, IN_BLOCKS, Kind
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, params_from_bounds
from sbonnx.system.runtime import open_session, session_options

TYPES = {"float8_e4m3fn": TensorProto.FLOAT8E4M3FN, "float4_e2m1fn": TensorProto.FLOAT4E2M1}
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
KINDS = pytest.mark.parametrize("kind", IN_BLOCKS)


def spec_of(kind: Kind) -> QuantSpec:
    """The type of a weight (rows, columns) with blocks along its rows."""
    return QuantSpec(bits=FLOATS[kind].bits, axis=0, block_size=FLOATS[kind].block, kind=kind)


def solved(weight: Array, kind: Kind) -> QParams:
    block = spec_of(kind).block_size
    assert block is not None
    blocks = [weight[at : at + block] for at in range(0, len(weight), block)]
    low, high = (np.stack([end(part, axis=0) for part in blocks]) for end in (np.min, np.max))
    return params_from_bounds(Bounds(low, high), spec_of(kind))


def evaluated(model: onnx.ModelProto, **feeds: Array) -> list[Any]:
    """Outputs by the reference evaluator."""
    return list(ReferenceEvaluator(model).run(None, feeds))


def referenced(x: Array, scale: Array, kind: Kind) -> tuple[Array, Array]:
    """Codes, as numbers, and values of QuantizeLinear and DequantizeLinear of the onnx package."""
    block: dict[str, Any] = {"axis": 0, "block_size": FLOATS[kind].block}
    code_type = TYPES[FLOATS[kind].codes]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["q"], output_dtype=code_type, **block),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["y"], **block),
        helper.make_node("Cast", ["q"], ["codes"], to=TensorProto.FLOAT),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "scale")]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("codes", "y")]
    graph = helper.make_graph(nodes, "blocks", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    codes, values = evaluated(model, x=x, scale=scale)
    return codes, values


def without_widths(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without the attribute ``__bits``: the reference evaluator refuses what it does not know."""
    for node in model.graph.node:
        for attribute in [attribute for attribute in node.attribute if attribute.name == "__bits"]:
            node.attribute.remove(attribute)
    return model


EXTREMES = np.array([0.0, -0.0, 1e-45, -1e-38, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 5.5, 448, 464, -3e38, 3e38, 7.0])


@KINDS
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_codes_and_values_equal_those_of_the_onnx_package(kind: Kind, data: st.DataObject) -> None:
    """Bit for bit, for random, tiny and huge values, signed zeros, midpoints and saturation, in partial blocks too."""
    shape = (data.draw(st.sampled_from([7, 16, 32, 48, 64])), 3)
    weight = data.draw(hnp.arrays(np.float32, shape, elements=FLOAT32 | st.sampled_from(EXTREMES.tolist())))
    params = solved(weight, kind)
    with np.errstate(all="ignore"):
        codes, values = referenced(weight, params.scale, kind)
    np.testing.assert_array_equal(params.quantize(weight).astype(np.float32).view(np.uint32), codes.view(np.uint32))
    np.testing.assert_array_equal(params.fake_quant(weight).view(np.uint32), values.view(np.uint32))


@KINDS
def test_midpoints_and_extremes_at_scale_1(kind: Kind) -> None:
    weight = EXTREMES.astype(np.float32)[:, None]
    params = QParams(np.ones((1, 1), np.float32), np.zeros((1, 1), spec_of(kind).dtype), spec_of(kind))
    codes, _ = referenced(weight, params.scale, kind)
    np.testing.assert_array_equal(params.quantize(weight).astype(np.float32).view(np.uint32), codes.view(np.uint32))
    largest = np.float32(FLOATS[kind].most)
    assert codes.min() == -largest and codes.max() == largest


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
@given(st.floats(2.0**-100, 2.0**100, width=32) | st.sampled_from([1.0, 4.0, 6.0, 7.99, 8.0, 448.0, 256.0, 0.1]))
def test_powers_are_those_of_the_specification(kind: Kind, largest: float) -> None:
    """Section 6.3: the largest power of two at most the largest magnitude, over that of the type."""
    power = Fraction(2) ** (math.frexp(largest)[1] - 1)
    assert power <= Fraction(largest) < 2 * power
    of_type = 2 ** int(math.log2(FLOATS[kind].most))
    scale = params_from_bounds(Bounds(np.float32(-largest), np.float32(0)), spec_of(kind)).scale
    assert Fraction(float(scale)) == power / of_type


@given(hnp.arrays(np.float32, (5, 2), elements=st.floats(2.0**-90, 2.0**90, width=32)))
def test_scales_of_nvfp4_are_small_floats_times_a_power(largest: Array) -> None:
    """No block is clipped by more than its scale is rounded; the stored codes give back the scale exactly."""
    scale = params_from_bounds(Bounds(-largest, largest), spec_of("nvfp4")).scale
    unit = sbonnx.small_floats.tensor_scale(scale)
    stored = (scale / np.float32(unit)).astype(FLOATS["nvfp4"].scale_dtype)
    np.testing.assert_array_equal(stored.astype(np.float32) * np.float32(unit), scale)
    assert math.frexp(unit)[0] == 0.5
    near = largest > largest.max() * 2.0**-13
    np.testing.assert_allclose(scale[near] * 6, largest[near], rtol=2.0**-4)


def product(rows: int = 96, columns: int = 24) -> tuple[onnx.ModelProto, Array]:
    """A product with weights of different ranges, and inputs that are correlated."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((rows, columns)) * rng.uniform(0.01, 2, (rows, 1))).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", rows])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", columns])],
        [numpy_helper.from_array(weight, "w")],
    )
    x = rng.standard_normal((256, rows)) @ (np.eye(rows) + rng.standard_normal((rows, rows)) / 8)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), x.astype(np.float32)


@KINDS
def test_files(kind: Kind, tmp_path: Path) -> None:
    """Valid by the checker, of the standard's types, computed as the onnx package does, read and stripped."""
    proto, x = product()
    file = tmp_path / "q.onnx"
    report = sbonnx.quantize(proto, [{"x": x}], file, backend="virtual", bits=kind)
    written = onnx.load(file)
    onnx.checker.check_model(written, full_check=True)
    assert written.opset_import[0].version == FLOATS[kind].opset
    codes = next(tensor for tensor in written.graph.initializer if tensor.name == "w_quantized")
    assert codes.data_type == TYPES[FLOATS[kind].codes]
    assert len(codes.raw_data) == 96 * 24 * FLOATS[kind].bits // 8
    (ours,) = open_session(str(file), session_options()).run(None, {"x": x})
    (theirs,) = evaluated(without_widths(written), x=x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    (floats,) = evaluated(proto, x=x)
    noise = 10 * math.log10(float((floats**2).mean() / ((floats - theirs) ** 2).mean()))
    assert noise == pytest.approx(report.sqnr_db, abs=0.5)
    assert noise > (28 if kind == "mxfp8" else 17)
    graph = load(file)
    (pair,) = qdq.read(graph)
    assert (pair.qparams.spec.kind, pair.qparams.spec.block_size) == (kind, FLOATS[kind].block)
    qdq.strip(graph)
    (stripped,) = open_session(to_proto(graph).SerializeToString(), session_options()).run(None, {"x": x})
    np.testing.assert_allclose(stripped, ours, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("settings", [{"block_size": 32}, {"w_qscheme": "per-channel-affine", "block_size": 16}, {}])
def test_two_bits_are_stored_in_two(settings: dict[str, Any], tmp_path: Path) -> None:
    """int2 and uint2 from opset 25 on: computed as the onnx package and onnxruntime do, read with their width."""
    proto, x = product()
    proto = onnx.version_converter.convert_version(proto, 25)
    file = tmp_path / "q.onnx"
    sbonnx.quantize(proto, [{"x": x}], file, backend="virtual", mode="weight_only", bits="w2", verify=False, **settings)
    written = onnx.load(file)
    onnx.checker.check_model(written, full_check=True)
    signed = "w_qscheme" not in settings
    kinds = {tensor.name: tensor.data_type for tensor in written.graph.initializer}
    assert kinds["w_quantized"] == kinds["w_zero_point"] == (TensorProto.INT2 if signed else TensorProto.UINT2)
    assert len(next(one for one in written.graph.initializer if one.name == "w_quantized").raw_data) == 96 * 24 // 4
    (pair,) = qdq.read(load(file))
    assert (pair.qparams.spec.bits, pair.qparams.spec.signed) == (2, signed)
    (ours,) = open_session(str(file), session_options("off")).run(None, {"x": x})
    (theirs,) = evaluated(without_widths(written), x=x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    assert not [finding for finding in linting.lint(written, "onnxruntime") if finding.severity == "error"]
    assert "int2" in str(linting.lint(written, "tensorrt@11"))


def test_tensorrt_reads_nvfp4(tmp_path: Path) -> None:
    """The form that NVIDIA's parser wants: no error of lint; a length that blocks do not divide stays float."""
    proto, x = product()
    sbonnx.quantize(proto, [{"x": x}], tmp_path / "q.onnx", backend="tensorrt@11", bits="nvfp4")
    findings = linting.lint(onnx.load(tmp_path / "q.onnx"), "tensorrt@11")
    assert not [finding for finding in findings if finding.severity != "info"]
    odd, x = product(rows=90)
    refused = sbonnx.quantize(odd, [{"x": x}], tmp_path / "odd.onnx", backend="tensorrt@11", bits="nvfp4", verify=False)
    assert "TensorRT takes FP4 in whole blocks of 16" in str(refused.to_dict())


@KINDS
def test_compensation_is_better_than_nearest(kind: Kind) -> None:
    proto, x = product()
    weight = numpy_helper.to_array(proto.graph.initializer[0])
    layer = LinearLayer.of_shape("MatMul", {}, weight.shape)
    assert isinstance(layer, LinearLayer)
    moments = Moments.of_rows(layer, x[None].astype(np.float64), x[None].astype(np.float64))
    rounded = make_rounder("gptq", {}).round(weight, solved(weight, kind), moments)
    assert rounded.loss is not None and rounded.nearest is not None
    assert rounded.loss < 0.7 * rounded.nearest


def test_constants_in_branches_are_lowered() -> None:
    """onnxruntime has no kernels for these types; sessions compute with the values of the constants."""
    codes = helper.make_tensor("codes", TensorProto.FLOAT4E2M1, [32], bytes([0x72] * 16), raw=True)
    scale = helper.make_tensor("scale", TensorProto.FLOAT8E8M0, [1], bytes([129]), raw=True)
    dequantize = helper.make_node(
        "DequantizeLinear", ["codes", "scale"], ["y"], axis=0, block_size=32, output_dtype=TensorProto.FLOAT
    )
    output = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [32])]
    branch = helper.make_graph([dequantize], "then", [], output, [codes, scale])
    other = helper.make_graph(
        [helper.make_node("Identity", ["zeros"], ["y"])], "else", [], output,
        [numpy_helper.from_array(np.zeros(32, np.float32), "zeros")],
    )  # fmt: skip
    choice = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other)
    graph = helper.make_graph([choice], "g", [helper.make_tensor_value_info("c", TensorProto.BOOL, [])], output)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    session = open_session(model.SerializeToString(), session_options())
    (values,) = session.run(None, {"c": np.array(True)})
    assert values.tolist() == [4.0, 24.0] * 16


def test_other_errors_of_sessions_stay() -> None:
    graph: Any = helper.make_graph(
        [helper.make_node("DequantizeLinear", ["codes", "scale"], ["y"], axis=0, block_size=32)],
        "g",
        [helper.make_tensor_value_info(name, kind, [32]) for name, kind in (("codes", TensorProto.FLOAT4E2M1),)]
        + [helper.make_tensor_value_info("scale", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [32])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    with pytest.raises(Exception, match="Could not find an implementation for DequantizeLinear"):
        open_session(model.SerializeToString(), session_options())
