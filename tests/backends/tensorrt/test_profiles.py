"""The table of TensorRT's versions: one source for recipes, planning and lint, and what planning does with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import linting
from sbonnx.backends import BACKENDS, backend_for
from sbonnx.backends.tensorrt import profiles
from sbonnx.backends.tensorrt.backend import FILES, TENSORRT
from sbonnx.backends.tensorrt.profiles import PROFILES
from sbonnx.errors import ModelError
from sbonnx.graph import load, query
from sbonnx.linting import TARGETS, lint
from sbonnx.schemes import VERSIONS, Version
from sbonnx.small_floats import FP4, FP8
from sbonnx.spec import CODES_SINCE, HALF_LIMITS, QuantSpec, ScaleLimits
from tests.support.models import model, residual

RNG = np.random.default_rng(0)
MLP = """
agraph (float[N,256] x) => (float[N,192] y) {
    h = MatMul (x, w1)
    r = Relu (h)
    y = Gemm <transB = 1> (r, w2, b2)
}"""


def mlp(**more: Any) -> onnx.ModelProto:
    shapes: dict[str, Any] = {"w1": (256, 128), "w2": (192, 128), "b2": 192}
    arrays = {name: RNG.standard_normal(shape).astype(np.float32) / 16 for name, shape in shapes.items()}
    return model(MLP, **arrays, **more)


def feeds(proto: onnx.ModelProto) -> list[dict[str, Any]]:
    shape = [dim.dim_value or 4 for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    return [{"x": RNG.standard_normal(shape).astype(np.float32)} for _ in range(3)]


def test_the_table() -> None:
    assert tuple(PROFILES) == VERSIONS
    assert ScaleLimits(profiles.MIN_SCALE, profiles.MAX_SCALE) == HALF_LIMITS
    assert {version: profile.newest_opset for version, profile in PROFILES.items()} == {"11": 25, "10": 24, "8.6": 17}
    assert PROFILES["8.6"].codes == {"int8"}
    assert PROFILES["10"].codes == PROFILES["11"].codes == {"int8", "int4", FP8, FP4}
    assert [profile.only_strong for profile in PROFILES.values()] == [True, False, False]
    targets = [name for name in TARGETS if name.startswith("tensorrt")]
    assert [profile.target for profile in PROFILES.values()] == targets
    assert backend_for("tensorrt").files == replace(FILES, profile=PROFILES["11"])
    assert backend_for("tensorrt", "8.6").files == replace(FILES, profile=PROFILES["8.6"])
    assert backend_for("virtual") is BACKENDS["virtual"]
    assert linting.tensorrt.STRONGLY_TYPED == ("tensorrt@11",)


def test_types_are_as_old_as_onnx_says() -> None:
    """The first opset whose schema lists a type, for all but the operators' first version."""
    for kind, since in CODES_SINCE.items():
        name = f"tensor({kind.replace('_', '').replace('e2m1fn', 'e2m1')})"
        versions = [
            schema.since_version
            for schema in onnx.defs.get_all_schemas_with_history()
            if schema.name == "DequantizeLinear"
            and schema.domain == ""
            and any(name in constraint.allowed_type_strs for constraint in schema.type_constraints)
        ]
        assert min(versions, default=0) == since, kind


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("bits", "opset"), [("w8a8", 13), ("fp8", 19), ("w4a0", 21)], ids=["int8", "fp8", "int4 weights"]
)
@pytest.mark.parametrize("form", ["codes", "qdq"])
def test_the_opset_is_the_lowest_that_the_types_need(bits: str, opset: int, form: Literal["codes", "qdq"]) -> None:
    proto = mlp(opset=13)
    report = sbonnx.quantize(proto, feeds(proto), backend="tensorrt@10", bits=bits, weights=form)
    assert report.ok, report.problems
    assert report.quantized is not None
    assert [entry.version for entry in report.quantized.opset_import] == [opset]
    assert not [one for one in lint(report.quantized, "tensorrt@10") if one.severity != "info"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_newer_than_the_parser_is_refused(version: Version) -> None:
    newest = PROFILES[version].newest_opset
    proto = residual(opset=min(newest + 1, 25))
    data = feeds(proto)
    if newest < 25:
        wanted = rf"opset {newest + 1}; the parser of TensorRT {version} reads up to {newest}: export it"
        with pytest.raises(ModelError, match=wanted):
            sbonnx.quantize(proto, data, backend="tensorrt", version=version)
        return
    assert sbonnx.quantize(proto, data, backend="tensorrt", version=version, verify=False).quantized is not None


def test_half_precision_needs_an_opset_that_8_6_does_not_read() -> None:
    text = "agraph (float16[N,32] x) => (float16[N,32] y) { h = MatMul (x, w) y = Relu (h) }"
    proto = model(text, opset=13, w=RNG.standard_normal((32, 32)).astype(np.float16))
    data = [{"x": RNG.standard_normal((4, 32)).astype(np.float16)}]
    with pytest.raises(ModelError, match=r"needs opset 19 for the types of its Q/DQ; the parser of TensorRT 8.6 reads"):
        sbonnx.quantize(proto, data, backend="tensorrt@8.6")
    report = sbonnx.quantize(proto, data, backend="tensorrt@10", verify=False)
    assert report.quantized is not None and report.quantized.opset_import[0].version == 19


INT4 = QuantSpec(bits=4, axis=0, block_size=64)
F8 = QuantSpec(kind="fp8", axis=0)
CONV = "agraph (float[1,64,8,8] x) => (float[1,64,?,?] y) { y = Conv <group = GROUP> (x, w) }"
REFUSED: list[tuple[str, Any, QuantSpec, str | None]] = [
    ("MatMul (x, w)", (128, 32), INT4, None),
    ("MatMul (x, w)", (128, 33), INT4, "odd last dimension, 33"),
    ("MatMul (x, w)", (96, 32), INT4, "sums over 96 values; TensorRT takes int4 in whole blocks of 64 or 128"),
    ("MatMul (x, w)", (128, 32), QuantSpec(bits=4, axis=0, block_size=32), "not of 32"),
    ("MatMul (x, w)", (128, 32), QuantSpec(bits=4, axis=1), "in blocks along the summed axis of MatMul and Gemm"),
    ("Gemm <transB = 1> (x, w)", (32, 128), QuantSpec(bits=4, axis=1, block_size=128), None),
    ("MatMul (x, w)", (96, 33), QuantSpec(axis=1), None),
    ("MatMul (x, w)", (96, 33), F8, None),
]


@pytest.mark.parametrize(("call", "shape", "spec", "why"), REFUSED)
def test_which_products_take_which_types(call: str, shape: tuple[int, int], spec: QuantSpec, why: str | None) -> None:
    summed = shape[1] if "transB" in call else shape[0]
    graph = load(model(f"agraph (float[4,{summed}] x) => (float[4,N] y) {{ y = {call} }}", w=shape))
    found = TENSORRT.numbers.unfit(graph.nodes[0], spec)
    assert found is None if why is None else found is not None and why in found


@pytest.mark.parametrize(
    ("weight", "group", "why"),
    [
        ((64, 64, 3, 3), 1, None),
        ((64, 64, 5, 7), 1, "a filter of 35 values; TensorRT's fp8 convolutions take 32 at most"),
        ((64, 16, 3, 3), 4, "it has 4 groups; TensorRT has no optimised fp8 convolution with groups"),
        ((64, 1, 3, 3), 64, "it has 64 groups"),
    ],
)
def test_which_convolutions_take_fp8(weight: tuple[int, ...], group: int, why: str | None) -> None:
    text = "agraph (float[1,64,8,8] x) => (float[1,64,H,W] y) { c = Conv <group = GROUP> (x, w) y = Relu (c) }"
    proto = model(text.replace("GROUP", str(group)), w=weight)
    found = TENSORRT.numbers.unfit(load(proto).nodes[0], F8)
    assert found is None if why is None else found is not None and why in found
    report = sbonnx.quantize(proto, feeds(proto), backend="tensorrt", bits="fp8", verify=False)
    refused = [one.why for one in report.refusals if one.what == "quantize"]
    assert bool(refused) == (why is not None)
    assert why is None or weight[1] == 1 or why in refused[0]  # depthwise ones are refused at any type


def test_convolutions_have_no_4_bit_weights() -> None:
    proto = residual()
    report = sbonnx.quantize(proto, feeds(proto), backend="tensorrt", bits="w4a0", verify=False)
    assert "nothing was quantized" in report.problems[0]
    assert {one.where for one in report.refusals if "not in Conv" in one.why} == {"stem", "conv1", "conv2"}


def test_4_bits_for_some_weights_among_8() -> None:
    """The inputs of those stay float; the others are int8 on both sides."""
    proto = mlp()
    wishes = {"BACKEND": "tensorrt", "W": {"SPECIFIC": [{"tensor:w2": {"QUANTIZER.BIT": 4, "BLOCK_SIZE": 64}}]}}
    report = sbonnx.quantize(proto, feeds(proto), recipe=wishes)
    assert report.ok, report.problems
    assert report.quantized is not None
    graph = load(report.quantized, opset=21)
    types = {
        node.inputs[1].inputs[0].op: str(query.dtype(node.inputs[1].inputs[0].inputs[0]))
        for node in graph.nodes
        if node.op == "Gemm"
    }
    assert types == {"DequantizeLinear": "int4"}
    assert query.producer(next(n for n in graph.nodes if n.op == "Gemm").inputs[0]).op == "Relu"  # type: ignore[union-attr]
    assert query.producer(next(n for n in graph.nodes if n.op == "MatMul").inputs[0]).op == "DequantizeLinear"  # type: ignore[union-attr]
    assert any("int4 for weights alone" in one.why for one in report.refusals)
    assert not [one for one in lint(report.quantized, "tensorrt@11") if one.severity != "info"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("wanted", "found"), [(None, 128), (64, 64)])
def test_blocks_are_128_where_that_divides(wanted: int | None, found: int) -> None:
    proto = mlp()
    more: dict[str, Any] = {} if wanted is None else {"block_size": wanted}
    report = sbonnx.quantize(proto, feeds(proto), backend="tensorrt", bits="w4a0", verify=False, **more)
    assert report.quantized is not None
    nodes = [node for node in report.quantized.graph.node if node.op_type == "DequantizeLinear"]
    sizes = {attribute.i for node in nodes for attribute in node.attribute if attribute.name == "block_size"}
    assert sizes == {found}
